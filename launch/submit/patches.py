"""--patch FILE: what a cluster wants of its pods that submit has no option for, as a strategic merge patch.

    metadata:                          # of the job: labels and annotations
      labels: {team: vision}
    template:                          # of its pods, as in a Job
      spec:
        tolerations: [{key: nvidia.com/gpu, operator: Exists}]
        imagePullSecrets: [{name: registry}]
        securityContext: {runAsUser: null}

null takes a field away. Of a list in KEYS an item changes the one with the same key, and is added where there
is none; with `$patch: delete` it takes that one away. Another list stands in the place of the old one.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, Optional

from common.errors import UserError, one_line
from launch.submit.platform import not_installed

Fields = dict[str, Any]  # of an object of Kubernetes

# {list: the key by which strategic merge patches know its items}; of the API reference of Kubernetes
KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
    "imagePullSecrets": "name", "resourceClaims": "name", "schedulingGates": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort", "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
DELETE = ("$patch", "delete")
ALLOWED = {
    "": {"metadata", "template"},
    "metadata": {"labels", "annotations"},
    "template": {"metadata", "spec"},
}


@functools.lru_cache(maxsize=1)  # as the file may be a pipe
def read(path: Optional[str]) -> Fields:
    """Return the content of the file of --patch, {} without one; UserError if it has not the form above."""
    if path is None:
        return {}
    yaml = _yaml()
    try:
        with open(path) as file:
            content = yaml.safe_load(file) or {}
        json.dumps(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--patch {path} cannot be read: {one_line(error)}") from None
    except TypeError as error:
        raise UserError(f"--patch {path}: {one_line(error)}: put a date or the like in quotes") from None
    for section, allowed in ALLOWED.items():
        part = content.get(section, {}) if section else content
        if not isinstance(part, dict) or not set(part) <= allowed:
            raise UserError(
                f"--patch {path}: {section or 'the file'} may have {' and '.join(sorted(allowed))} alone"
            )
    spec = content.get("template", {}).get("spec", {})
    if not isinstance(spec, dict):
        raise UserError(f"--patch {path}: the spec of template has to have fields")
    if not isinstance(spec.get("containers", []), list):
        raise UserError(f"--patch {path}: containers has to be a list")
    _require_keys(content, path)
    return content


def mistakes(path: Optional[str]) -> Iterator[str]:
    """Yield the error of read() as a line, if there is one."""
    try:
        read(path)
    except UserError as error:
        yield str(error)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise not_installed("yaml", "kubernetes") from None
    return yaml


def variables(path: Optional[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each variable of a container that the file sets."""
    try:
        spec = read(path).get("template", {}).get("spec", {})
    except UserError:  # which mistakes() says
        return
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        for variable in container.get("env") or []:
            yield variable["name"], str(variable.get("value", ""))


def _require_keys(value: object, path: str, field: str = "", in_items: bool = False) -> None:
    """Raise UserError for an item of a list in KEYS that lacks its key,
    and for a directive that merged() does not know."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if str(name).startswith("$") and not (in_items and (name, inner) == DELETE):
                raise UserError(
                    f"--patch {path}: {name}: {inner} is not known: $patch: delete is, in an item with "
                    "a {name}"
                )
            _require_keys(inner, path, name)
    elif isinstance(value, list):
        for item in value:
            if field in KEYS and not (
                isinstance(item, dict) and isinstance(item.get(KEYS[field]), (str, int))
            ):
                raise UserError(f"--patch {path}: an item of {field} has no {KEYS[field]}: give each one")
            _require_keys(item, path, in_items=field in KEYS)


def merged(value: Any, change: Any, field: str = "") -> Any:
    """Return `value`, the content of the field `field`, with the patch `change` applied to it;
    null takes a field away."""
    if isinstance(change, dict):
        result = dict(value) if isinstance(value, dict) else {}
        for name, inner_change in change.items():
            if inner_change is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), inner_change, name)
        return result
    if isinstance(change, list) and field in KEYS:
        return _merged_items(value or [], change, KEYS[field])
    return change


def _merged_items(items: list[Fields], changes: list[Fields], key: str) -> list[Fields]:
    by_key = {item[key]: item for item in items}
    for change in changes:
        if DELETE in change.items():
            by_key.pop(change[key], None)
        else:
            by_key[change[key]] = merged(by_key.get(change[key]), change)
    return list(by_key.values())
