"""What of a job's modules an option alone needs: a bundle has it if it is asked for,
or if the job is no job without it.

In the place of a module that is left out is one that ends the job, with the command that makes a bundle with
it.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError, one_line
from launch.bundle import imports
from launch.bundle.requirements import OF_ADDRESSES


class Feature(NamedTuple):
    modules: tuple[str, ...]  # by which other modules come to it
    option_pattern: str  # a pattern of options with their values
    package: str = ""  # that it cannot do without, by the name of its import
    implied_by: str = ""  # a package of ours: a job that imports it by itself has the feature


FEATURES = {
    "buckets": Feature(
        (
            "common.storage.bucket",
            "common.storage.download",
            "common.storage.upload",
            "common.checkpoints.run_bucket",
        ),
        "(s3|obs|oss)://",
        package=OF_ADDRESSES,
        implied_by="common.storage",
    ),
    "dali": Feature(("datasets.dali",), r"--(data.backend[ =]|use.)?dali", package="nvidia"),
    "doctor": Feature(("common.doctor",), "--doctor"),
    "dpex": Feature(("datasets.dpex",), r"--data.backend[ =]dpex", package="ray"),
    "elastic": Feature(("common.elastic",), "--min.nodes"),
    "find_max_batch": Feature(("common.devices.largest_batch",), "--find.max.batch"),
    "kspeed": Feature(("datasets.kspeed",), r"--(data.backend[ =](dali.)?)?kspeed", package="pymemcache"),
    "profile": Feature(("common.run.observers.trace", "common.run.timing"), "--prof"),  # and NVIDIA's --prof
    "timm": Feature((), "timm/", package="timm"),
    "track": Feature(("common.run.observers.tracker",), "--track"),
}

STUB = '''"""Left out of this bundle: it is for one option alone."""

from common.errors import UserError

raise UserError({text!r})
'''


def of_options(options: Sequence[str]) -> set[str]:
    """Return the features that a job with these options needs."""
    return {
        name for name, feature in FEATURES.items() if re.search(feature.option_pattern, " ".join(options))
    }


def named(names: Collection[str]) -> set[str]:
    """Return the features with these names, of which "all" is every one; UserError for an unknown name."""
    if unknown := sorted(set(names) - {"all", *FEATURES}):
        raise UserError(
            f"--with {one_line(unknown[0])}: there is no such feature; give all, or some of "
            f"{','.join(FEATURES)}"
        )
    return set(FEATURES) if "all" in names else set(names)


def packages(names: Collection[str]) -> set[str]:
    """Return the packages that the features with these names cannot do without; "all" has none,
    as no job uses all."""
    return {FEATURES[name].package for name in names if name != "all"} - {""}


def left_out(job: Path, included: Collection[str]) -> dict[str, str]:
    """Return {file: feature} of the modules of features that are neither in `included` nor needed by the
    job."""
    names = set(FEATURES) - set(included)
    while needed := _needed(job, _entries(names)):
        names -= needed
    entries = _entries(names)
    return {file: entries[file] for file in imports.modules_of(job) if file in entries}


def stubs(job: Path, included: Collection[str]) -> dict[str, str]:
    """Return {file: source} of the modules that replace those that are left out,
    and raise UserError when imported."""
    return {
        file: STUB.format(text=_refusal(job, name, included))
        for file, name in left_out(job, included).items()
    }


def _entries(names: Iterable[str]) -> dict[str, str]:
    """Return {file of a module: its feature} for the features with these names."""
    entries = {}
    for name in names:
        for module in FEATURES[name].modules:
            stem = module.replace(".", "/")
            files = {f"{stem}.py", f"{stem}/__init__.py"} & set(imports.files_of(module))
            entries.update(dict.fromkeys(files, name))
    return entries


def _needed(job: Path, entries: Mapping[str, str]) -> set[str]:
    """Return those features of `entries` that the job itself imports anywhere,
    or another module as soon as it is imported."""
    job_imports = set(imports.names_in(job))
    imported = set(job_imports)
    for file in imports.modules_of(job, without=entries):
        imported.update(imports.names_in(imports.path_of(file), at_once=True))
    needed = {entries[file] for name in imported for file in imports.files_of(name) if file in entries}
    implied = {
        name
        for name in entries.values()
        if (package := FEATURES[name].implied_by) and _any_is_in(package, job_imports)
    }
    return needed | implied


def _any_is_in(package: str, names: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for name in names)


def _refusal(job: Path, name: str, included: Collection[str]) -> str:
    names = ",".join(sorted({*included, name}))
    path = job.resolve()
    shown_path = path.relative_to(imports.ROOT) if imports.ROOT in path.parents else path.name
    return (
        f"{name} is not in this bundle: make another with python -m launch bundle "
        f"{shlex.quote(str(shown_path))} --with {names}"
    )
