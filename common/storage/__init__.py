"""Fetch data and publish results, whether the place is a folder, a bucket or a web server."""

from common.storage.transfer import fetch, publish

__all__ = ["bucket", "download", "fetch", "https", "index", "listing", "once", "publish", "ranges", "upload"]
