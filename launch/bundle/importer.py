"""Import the modules of a bundled job from the bundle itself;
a copy of this module is the last section of a bundle.

A traceback names them as FILE/common/job.py, with their line numbers in the repository.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re

# A line with the module's path, and its source as it is in the repository, in a string that Python evaluates
# and forgets.
SECTION = re.compile(r"^# ==== (\S+) =+\nr'{3}\n(.*?)^'{3}$", re.DOTALL | re.MULTILINE)


class Bundle(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads the modules whose sources are sections of the file at `path`."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        with open(path, encoding="utf-8") as file:
            self.sources = dict(SECTION.findall(file.read()))

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        module_path = self._module_path(fullname)
        if not module_path:
            return self._without_init(fullname)
        folders = (
            [os.path.join(self.path, os.path.dirname(module_path))] if self.is_package(fullname) else None
        )
        file = os.path.join(self.path, module_path)
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=folders
        )

    def _without_init(self, fullname: str):
        """Return the spec of a folder of modules without __init__.py;
        None if the bundle has no such folder."""
        folder = fullname.replace(".", "/") + "/"
        if not any(module_path.startswith(folder) for module_path in self.sources):
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [os.path.join(self.path, folder)]
        return spec

    def is_package(self, fullname: str) -> bool:
        return self._module_path(fullname).endswith("__init__.py")

    def get_source(self, fullname: str) -> str:
        return self.sources[self._module_path(fullname)]

    def get_code(self, fullname: str):
        return compile(
            self.get_source(fullname),
            os.path.join(self.path, self._module_path(fullname)),
            "exec",
            dont_inherit=True,
        )

    def _module_path(self, name: str) -> str:
        """Return the module's path in the repository; empty if the bundle does not have it."""
        path = name.replace(".", "/")
        return next(
            (candidate for candidate in (f"{path}.py", f"{path}/__init__.py") if candidate in self.sources),
            "",
        )
