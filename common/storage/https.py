"""Fetch one file from a web server. The file has its name only when it is whole and verified."""

import contextlib
import email.utils
import gzip
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from typing import Any, Optional

from common import files
from common.alive.patience import Patience, limit
from common.errors import UserError, is_system_error, one_line
from common.progress import Progress, Tell
from common.secrets import mask, secret_parts
from common.storage import index

STALL_SECONDS = 15  # without a byte, after which a connection is opened again
CHUNK = 1 << 20
REFUSED_BY_PROXY = "Tunnel connection failed: 4"  # http.client's words for an answer of 400 to 499
BUCKET_ADVICE = (
    "put it into OBS or another bucket, which a job without Internet reaches, and give that address"
)


def download(url: str, path: str, sha256: Optional[str] = None, tell: Optional[Tell] = None) -> None:
    """Fetch `url` as the file `path`.

    If the server can send a part, a broken download goes on where it stopped.

    The checksum in a .gz or .tgz file is verified; also `sha256` or, without it, the length that the server
    states.
    """
    refuse_unsafe(url)
    records_folder = index.make_records_folder(os.path.dirname(path))
    try:
        _fetch(url, path, os.path.join(records_folder, f"{os.path.basename(path)}.part"), sha256, tell)
    finally:
        with contextlib.suppress(OSError):  # it holds a part, or the lock or notes of a fetch
            os.rmdir(records_folder)


def _fetch(url: str, path: str, part: str, sha256: Optional[str], tell: Optional[Tell]) -> None:
    """Fetch `url` into the file `part`, verify it and rename it to `path`; retry temporary errors."""
    shown = one_line(url)
    secrets = secret_parts(url)
    if os.path.islink(part):
        os.unlink(part)
    patience = Patience(limit() / 20)  # a job without Internet should fail soon
    while True:
        previous_size = _size(part)
        began = time.monotonic()
        try:
            _download(url, path, part, sha256 is None, tell)
            break
        except urllib.error.HTTPError as error:
            if error.code == 416 and previous_size:
                if error.headers.get("Content-Range") == f"bytes */{previous_size}":
                    break
                os.unlink(part)  # it is longer than the file, so it is of an older one
            elif error.code < 500 and error.code != 429:
                raise UserError(
                    f"{shown} answered {error.code} {one_line(mask(error.reason, *secrets))}; fetch it to "
                    f"{path}, or {BUCKET_ADVICE}"
                ) from None
            reason = error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and is_system_error(error):  # of the disk here, not of the network
                raise OSError(error.errno, error.strerror, part) from None
            cause = getattr(error, "reason", None)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise UserError(
                    f"{shown}: the server's certificate cannot be verified ({cause.verify_message}): give "
                    f"the file of its authority as SSL_CERT_FILE, or fetch it to {path}, or {BUCKET_ADVICE}"
                ) from None
            reason = error
        message = one_line(mask(reason, *secrets))
        if proxy := _proxy(url):
            message = f"{message}, through the proxy {proxy}"
            if REFUSED_BY_PROXY in message:
                raise UserError(
                    f"{shown}: {message}: give another as https_proxy, or fetch it to {path}, or "
                    f"{BUCKET_ADVICE}"
                )
        if _size(part) > previous_size:
            patience.succeeded(shown)
            patience.set_limit(limit(), blocks_training=True)
        if patience.failed(shown, began):
            raise UserError(
                f"{shown} cannot be fetched: {message}; fetch it to {path}, or {BUCKET_ADVICE}"
            ) from None
        patience.pause(shown, print, f"{shown}: {message}")
    patience.succeeded(shown)
    digest = files.sha256(part) if sha256 else None
    if digest != sha256:
        os.unlink(part)
        raise UserError(
            f"{shown} has SHA-256 {digest}, expected {sha256}: it was damaged on the way, or replaced; "
            f"start again, or fetch it to {path}, or {BUCKET_ADVICE}"
        )
    if path.endswith((".gz", ".tgz")) and (reason := _damage(part)):
        os.unlink(part)
        raise UserError(
            f"{url} is no whole archive: {one_line(reason)}; start again, or fetch it to {path}, or "
            f"{BUCKET_ADVICE}"
        )
    os.replace(part, path)


def _proxy(url: str) -> Optional[str]:
    """Return the proxy by which `url` is fetched, without its password, or None."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    return one_line(proxy.rpartition("@")[2])


def is_replaced(url: str, path: str) -> bool:
    """Return whether the server's file is newer than `path`, or has another length;
    False if that cannot be found out."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.build_opener(SafeRedirects).open(request, timeout=STALL_SECONDS) as answer:
            return _is_newer(answer, path) or stated_length(url, answer) not in (None, os.path.getsize(path))
    except (OSError, ValueError, TypeError, http.client.HTTPException, UserError):
        return False  # no Internet, or an address that can be requested only once


def _damage(archive: str) -> str:
    """Return what is wrong with a gzip file, which has a checksum at its end;
    an empty text if it is intact."""
    try:
        with gzip.open(archive) as stream:
            while stream.read(CHUNK):
                pass
    except (OSError, EOFError, zlib.error) as error:
        return str(error)
    return ""


def refuse_unsafe(url: str) -> None:
    """Raise UserError unless `url` is an https:// address, or http:// of this machine,
    without a user or password."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = (
            bool(parts.hostname)
            and parts.port != 0
            and url.isascii()
            and not re.search(r"[\s\0-\x1f\x7f]", url)
        )
    except ValueError:  # an invalid port or IPv6 address
        is_valid = False
    if not is_valid:
        raise UserError(
            f"{one_line(url)[:200]} is not an https:// address: give https://HOST/FILE, with %20 for a space"
        )
    if parts.scheme != "https" and not (
        parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    ):
        raise UserError(f"{one_line(url)[:200]} is not an https:// address")
    if "@" in parts.netloc:
        raise UserError(
            f"{one_line(url)[:200]} holds a user or a password, which is not sent: fetch the file, and "
            f"{BUCKET_ADVICE}"
        )


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but raises UserError for one to an unsafe address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Optional[urllib.request.Request]:
        refuse_unsafe(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_newer(answer: http.client.HTTPResponse, path: str) -> bool:
    """Whether the server says that its file was changed after the local one;
    False if it does not say when."""
    with contextlib.suppress(ValueError, TypeError):
        return email.utils.parsedate_to_datetime(
            answer.headers["Last-Modified"]
        ).timestamp() > os.path.getmtime(path)
    return False


def stated_length(url: str, answer: http.client.HTTPResponse) -> Optional[int]:
    """Return the length that an answer states, or None.

    UserError for an invalid length, or a web page in place of a file.
    """
    if answer.headers.get_content_type() == "text/html" and not re.search(
        r"\.html?$", urllib.parse.urlsplit(url).path
    ):
        raise UserError(
            f"{url} answered with a page in place of the file: open it in a browser, fetch the file, "
            f"and {BUCKET_ADVICE}"
        )
    length = answer.headers.get("Content-Length")
    if length is not None and not re.fullmatch(r"[0-9]{1,18}", length):
        raise UserError(
            f"{url} states the length {length[:40]!r}, which is none: fetch the file, and {BUCKET_ADVICE}"
        )
    return None if length is None else int(length)


def _download(url: str, path: str, part: str, needs_length: bool, tell: Optional[Tell]) -> None:
    """Append the missing bytes of `url` to `part`, or rewrite it if the server sends the whole file."""
    offset = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    with urllib.request.build_opener(SafeRedirects).open(request, timeout=STALL_SECONDS) as answer:
        if answer.status != 206:
            offset = 0  # the server gives the whole file
        elif not (answer.headers.get("Content-Range") or "").startswith(f"bytes {offset}-"):
            os.unlink(part)
            raise ConnectionError("the server answered with another part than was asked for")
        elif _is_newer(answer, part):
            os.unlink(part)
            raise ConnectionError("the file was replaced on the server since the first part was fetched")
        length = stated_length(url, answer)
        total = None if length is None else offset + length
        if total is None and needs_length:
            problem = f"{one_line(url)} does not state its length, so it cannot be verified"
            raise UserError(f"{problem}; fetch it to {path}, or {BUCKET_ADVICE}")
        with (
            open(part, "r+b") if offset else files.create(part) as file,
            Progress(f"fetching {url}", total_bytes=total, tell=tell) as progress,
        ):
            file.seek(offset)
            progress.add(size=offset, old=True)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                progress.add(size=len(chunk))
            if total is not None and file.tell() < total:
                raise ConnectionError(f"the connection closed after {file.tell()} of {total} bytes")


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0
