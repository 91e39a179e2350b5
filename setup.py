"""What pip installs: our folders in a package called anyrank, as other projects have packages called common and datasets."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("common", "datasets", "jobs", "launch")

setup(
    packages=[
        "anyrank",
        *(f"anyrank.{name}" for folder in FOLDERS for name in find_namespace_packages(include=[f"{folder}*"])),
    ],
    package_dir={"anyrank": "launch/installed", **{f"anyrank.{folder}": folder for folder in FOLDERS}},
    package_data={"": ["*.sh"]},
)
