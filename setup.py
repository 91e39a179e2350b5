"""What pip installs: our folders in a package anyrank, as others have packages called common and datasets."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("common", "datasets", "jobs", "launch")


def rooms_of(folder: str) -> "list[str]":
    inner = find_namespace_packages(folder, exclude=["__pycache__", "*.__pycache__"])
    return [f"anyrank.{folder}", *(f"anyrank.{folder}.{name}" for name in inner)]


setup(
    packages=["anyrank", *(room for folder in FOLDERS for room in rooms_of(folder))],
    package_dir={"anyrank": "launch/installed", **{f"anyrank.{folder}": folder for folder in FOLDERS}},
    package_data={"": ["*.sh"]},
)
