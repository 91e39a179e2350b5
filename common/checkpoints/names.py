"""The names of checkpoints and of weights: every other file asks here.

checkpoints/000000012800.pt    a checkpoint, whose number is the samples seen; its manifest is .json
checkpoints/000000012800-2.pt  in a bucket: one that the second start of a run has saved (starts.py)
epoch_3.pth                    the weights of an epoch, with epoch_3.pth.sha256 and epoch_3.json beside
"""

import re
from typing import NamedTuple, Optional

from common.files import TEMPORARY

FOLDER = "checkpoints/"
# the ending of a manifest that a killed start, or an upload, has not given its name yet
UNFINISHED = f"json{TEMPORARY}"

_OF_A_CHECKPOINT = re.compile(rf"(\d{{12}})(?:-(\d+))?\.(pt|json|{re.escape(UNFINISHED)})")
_OF_AN_EPOCH = re.compile(r"epoch_(\d+)\.(?:pth(?:\.sha256)?|json)")


class Name(NamedTuple):
    samples: int  # number of the checkpoint
    start: int  # number of the start that saved it; 1 if the name has none
    ending: str  # pt, json or UNFINISHED


def of_checkpoint(samples: int, ending: str, start: int = 1) -> str:
    """Return the name of a file of a checkpoint, without its folder."""
    suffix = f"-{start}" if start > 1 else ""
    return f"{samples:012d}{suffix}.{ending}"


def parse(name: str, folder: str = "") -> Optional[Name]:
    """Return the parts of the name of a checkpoint's file, which `folder` precedes;
    None for any other name."""
    match = _OF_A_CHECKPOINT.fullmatch(name.removeprefix(folder)) if name.startswith(folder) else None
    return Name(int(match[1]), int(match[2] or 1), match[3]) if match else None


def weights(epoch: int) -> str:
    """Return the name of the file with the weights of an epoch."""
    return f"epoch_{epoch}.pth"


def epoch_of(name: str) -> Optional[int]:
    """Return the epoch of a file of weights, or of the .sha256 or .json beside it;
    None for any other name."""
    match = _OF_AN_EPOCH.fullmatch(name)
    return int(match[1]) if match else None
