"""Mask what must not be shown: passwords and query strings of addresses, and the values of names such as HF_TOKEN.

Text that is printed, saved or published goes through mask(), directly or in errors.one_line().
"""

import re
import urllib.parse
from collections.abc import Iterator

HIDDEN = "***"
BUCKETS = ("s3://", "obs://", "oss://")

# Words that mark the value of a name as a secret, as in API_KEY, api-key, apiKey and X-Amz-Signature.
WORDS = {
    "PWD", "PASSWD", "PASSWORD", "TOKEN", "PAT", "AUTH", "KEY", "APIKEY", "SECRET", "CREDENTIAL", "CREDENTIALS", "COOKIE",
    "SIGNATURE", "SIG", "AK", "SK",
}  # fmt: skip
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# An address in a text, and the punctuation that may follow one. The repetitions are bounded, so that the time is linear in the
# length of the text; of a longer name only the end is matched.
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/+)(\S+)")
PUNCTUATION = ".,:;'\")]}>"
NAMED = re.compile(r"(?P<name>[A-Za-z][\w-]{0,127})=(?P<value>[^\s,;'\"]+)")
IN_QUERY = re.compile(r"[?&#]([^=&]{1,128})=")


def is_secret(name: str) -> bool:
    """Whether a word of this name marks its value as a secret: true for HF_TOKEN and awsAccessKeyId, false for PYTHONPATH."""
    return not WORDS.isdisjoint(word.upper() for word in WORD.findall(name))


def mask(text: object, *known: str) -> str:
    """Return `text` with *** for an address's password and query, VALUE in SECRET=VALUE, and `known` texts of 4 letters up."""
    masked = str(text)
    for secret in sorted(known, key=len, reverse=True):
        masked = masked.replace(secret, HIDDEN) if len(secret) >= 4 else masked
    masked = ADDRESS.sub(_masked_address, masked) if ":/" in masked else masked
    return NAMED.sub(_masked_value, masked) if "=" in masked else masked


def _masked_address(found: "re.Match[str]") -> str:
    rest = found[2].rstrip(PUNCTUATION)
    return found[1] + (_masked_rest(found[1], rest) if rest else "") + found[2][len(rest) :]


def _masked_rest(scheme: str, rest: str) -> str:
    """Return what follows scheme://, masked. A password may hold a slash, and a path an @: in doubt, too much is hidden."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    marks = "?" if scheme in BUCKETS else "?#"  # in a bucket, a key may contain #
    place, mark, query = re.fullmatch(rf"([^{marks}]*)([{marks}]?)(.*)", rest, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    has_password = ":" in host and not re.fullmatch(r"(\[.*\]|[^:\[]*):\d*", host) and "@" in rest
    if has_password and "@" in query:
        return HIDDEN
    if has_password or "@" in host:
        place = f"{HIDDEN}@{place.rpartition('@')[2]}"
    return place + (mark and mark + HIDDEN)


def _masked_value(found: "re.Match[str]") -> str:
    return f"{found['name']}={HIDDEN}" if is_secret(found["name"]) else found[0]


def parts_of(address: str) -> list[str]:
    """Return the parts of an address that may be secret, to mask them where a library's error quotes one alone."""
    rest, _, fragment = address.partition("#")
    place, _, query = rest.partition("?")
    user = place.partition("://")[2].rpartition("@")[0]
    values = [value for part in query.split("&") for value in part.split("=", 1)[1:]]
    parts = [query, fragment, user, user.partition(":")[2], *values]
    return [part for part in (*parts, *map(urllib.parse.unquote, parts)) if part]


def reasons(text: str) -> Iterator[str]:
    """Yield the reasons why a text that is to be sent or stored in the open seems to hold a secret."""
    for scheme, rest in ADDRESS.findall(text):
        rest = rest.rstrip(PUNCTUATION)
        shown = _masked_rest(scheme, rest)
        if shown.startswith(HIDDEN):
            yield f"holds a user or a password ({scheme}{shown})"
        elif any(map(is_secret, IN_QUERY.findall(rest))):
            yield f"is signed or holds a key ({scheme}{shown})"
    for found in NAMED.finditer(ADDRESS.sub("", text)):
        if is_secret(found["name"]):
            yield f"sets {found['name']}"
