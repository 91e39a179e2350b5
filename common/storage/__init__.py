"""Data in, results out: the same for a folder, a bucket and a web server."""

from common.storage.transfer import fetch, publish

__all__ = ["fetch", "publish"]
