"""The place of this process: which node and rank of how many, on which platform, and the folders for its data and output."""

from common.world import folders
from common.world.place import World
from common.world.resolve import PLATFORM, here, require_one_device, resolve

__all__ = ["PLATFORM", "World", "folders", "here", "require_one_device", "resolve"]
