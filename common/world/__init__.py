"""Where am I: which node and process of how many, on which platform, and in which folders it wants me to work."""

from common.world import folders
from common.world.place import World
from common.world.resolve import PLATFORM, here, require_one_device, resolve

__all__ = ["PLATFORM", "World", "folders", "here", "require_one_device", "resolve"]
