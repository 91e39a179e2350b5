"""What every job shares."""

from common import packages

packages.check_versions()
