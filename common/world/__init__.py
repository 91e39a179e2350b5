"""The place of this process: its node and rank, how many there are, the platform, the folders for data and
output, the network over which it reaches the others."""

from common.world import folders
from common.world.resolve import (
    PLATFORM,
    PROMISED,
    advice_for_several_devices,
    find_place,
    require_one_device,
    resolve,
)
from common.world.world import World

__all__ = [
    "PLATFORM",
    "PROMISED",
    "World",
    "advice_for_several_devices",
    "find_place",
    "folders",
    "naming",
    "network",
    "require_one_device",
    "resolve",
]
