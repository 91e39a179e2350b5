"""What a store says of an object. Records of a fetch need this, too, where nothing of a bucket is read."""

import dataclasses
import re
from typing import Optional


@dataclasses.dataclass(frozen=True)
class Item:
    """An object as the store lists it.

    `digest`: the ETag if it looks like an MD5, or an MD5 of MD5s and -N for N parts.
    """

    key: str
    size: int
    etag: str

    @property
    def digest(self) -> Optional[str]:
        return self.etag if re.fullmatch(r"[0-9a-f]{32}(-\d+)?", self.etag) else None
