"""The modules of a bundled job, imported out of the file that they stand in; a copy of this is the last section of a bundle.

A traceback names them as FILE/common/run.py, with the line that they have in the repository.
"""

import importlib.abc
import importlib.util
import os
import re

# A banner, and then the source as it is in the repository, as a string that does nothing when Python comes to it.
SECTION = re.compile(r"^# ==== (\S+) =+\nr'{3}\n(.*?)^'{3}$", re.DOTALL | re.MULTILINE)


class Bundle(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, path):
        self.path = os.path.abspath(path)
        with open(path, encoding="utf-8") as file:
            self.sources = dict(SECTION.findall(file.read()))

    def find_spec(self, name, path=None, target=None):
        place = self._place(name)
        if place is None:
            return None
        folders = [os.path.join(self.path, os.path.dirname(place))] if self.is_package(name) else None
        file = os.path.join(self.path, place)
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=folders)

    def is_package(self, name):
        return self._place(name).endswith("__init__.py")

    def get_source(self, name):
        return self.sources[self._place(name)]

    def get_code(self, name):
        return compile(self.get_source(name), os.path.join(self.path, self._place(name)), "exec", dont_inherit=True)

    def _place(self, name):
        path = name.replace(".", "/")
        return next((place for place in (f"{path}.py", f"{path}/__init__.py") if place in self.sources), None)
