"""Read objects and parts of objects through obstore if it is installed:
it is several times faster than boto3."""

import contextlib
import datetime
import functools
from collections.abc import Iterator
from typing import Any, Callable, Optional

from common.storage.bucket import Bucket, read_timeout
from common.storage.item import Item

PIECE = 1 << 18  # bytes: they are still in the processor's cache when they are written


class Reader:
    """Reads objects of one bucket.

    It gives no reason for a failure: the caller repeats the request with boto3, which does.
    """

    def __init__(self, get: Callable[..., Any]) -> None:
        self._get = get

    def read_whole(self, item: Item) -> Any:
        """Return an object's bytes, in obstore's buffer;
        None if the request fails or the object has changed."""
        try:
            answer = self._get(item.key)
            if _has_etag_of(answer, item):
                return answer.bytes()
        except Exception:
            return None
        return None

    def read_part(
        self, item: Item, begin: int, length: int, write: Callable[[int, memoryview], None]
    ) -> bool:
        """Read a part and call `write(offset in the object, piece)` with its pieces; return whether all of it
        was read. If not, because the request failed or the object has changed, some pieces may have been
        written."""
        received = 0
        for piece in self._pieces(item, begin, length):
            if received + len(piece) <= length:
                write(begin + received, memoryview(piece))
            received += len(piece)
        return received == length

    def _pieces(self, item: Item, begin: int, length: int) -> Iterator[Any]:
        """Yield the pieces of a part as they come, up to an error of the request;
        none if the object has changed."""
        with contextlib.suppress(Exception):
            answer = self._get(item.key, options={"range": (begin, begin + length)})
            if _has_etag_of(answer, item):
                yield from answer.stream(min_chunk_size=PIECE)


def _has_etag_of(answer: Any, item: Item) -> bool:
    return (answer.meta["e_tag"] or "").strip('"') == item.etag


def reader(bucket: Bucket) -> Optional[Reader]:
    """Return a reader of the bucket, or None if obstore is not installed or does not accept the settings."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return None
    settings = bucket.settings
    endpoint = settings.endpoint
    virtual = settings.style == "virtual"
    if endpoint and virtual:  # obstore needs the bucket's name in the endpoint
        endpoint = endpoint.replace("://", f"://{bucket.name}.")

    def credential() -> Any:  # a TypedDict of obstore's
        keys = settings.session.get_credentials().get_frozen_credentials()
        return {
            "access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token,
            "expires_at": datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=15),
        }  # fmt: skip

    try:
        store = S3Store(
            bucket.name, endpoint=endpoint, region=settings.region, credential_provider=credential,
            virtual_hosted_style_request=virtual,
            client_options={
                "allow_http": True,
                "connect_timeout": f"{read_timeout() / 2:g}s", "timeout": f"{read_timeout():g}s",
            },
            retry_config={"max_retries": 0},
        )  # fmt: skip
    except Exception:
        return None

    return Reader(functools.partial(obstore.get, store))
