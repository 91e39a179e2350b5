"""Mask what must not be shown: passwords and query strings of addresses, and the values of names such as HF_TOKEN.

What is printed, saved or published goes through `mask`; errors.one_line calls it.
"""

import re
import urllib.parse
from collections.abc import Iterator

HIDDEN = "***"
BUCKETS = ("s3://", "obs://", "oss://")

# The words of a name whose value is a secret, as in API_KEY, api-key, apiKey and X-Amz-Signature.
WORDS = {
    "PWD", "PASSWD", "PASSWORD", "TOKEN", "PAT", "AUTH", "KEY", "APIKEY", "SECRET", "CREDENTIAL", "CREDENTIALS", "COOKIE",
    "SIGNATURE", "SIG", "AK", "SK",
}  # fmt: skip
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# An address in any text, and what is written around one. The repetitions have bounds, so that long texts take no longer than
# their length: of a name that is longer, the end is looked at.
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/+)(\S+)")
PUNCTUATION = ".,:;'\")]}>"
NAMED = re.compile(r"(?P<name>[A-Za-z][\w-]{0,127})=(?P<value>[^\s,;'\"]+)")
IN_QUERY = re.compile(r"[?&#]([^=&]{1,128})=")


def is_secret(name: str) -> bool:
    """Whether a word of this name says that its value is a secret: HF_TOKEN and awsAccessKeyId are, PYTHONPATH is not."""
    return not WORDS.isdisjoint(word.upper() for word in WORD.findall(name))


def mask(text: object, *known: str) -> str:
    """`text` with *** for every password and query of an address, for the VALUE of SECRET=VALUE, and for what is `known`."""
    masked = str(text)
    for secret in sorted(known, key=len, reverse=True):
        masked = masked.replace(secret, HIDDEN) if len(secret) >= 4 else masked
    masked = ADDRESS.sub(_masked_address, masked) if ":/" in masked else masked
    return NAMED.sub(_masked_value, masked) if "=" in masked else masked


def _masked_address(found: "re.Match[str]") -> str:
    rest = found[2].rstrip(PUNCTUATION)
    return found[1] + (_masked_rest(found[1], rest) if rest else "") + found[2][len(rest) :]


def _masked_rest(scheme: str, rest: str) -> str:
    """What comes after scheme://. A password may hold a slash, and a path an @: where both could be meant, all is hidden."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    marks = "?" if scheme in BUCKETS else "?#"  # a key may have a #
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
    """Return the secret parts of an address, which an error of a library may quote without the rest."""
    rest, _, fragment = address.partition("#")
    place, _, query = rest.partition("?")
    user = place.partition("://")[2].rpartition("@")[0]
    values = [value for part in query.split("&") for value in part.split("=", 1)[1:]]
    parts = [query, fragment, user, user.partition(":")[2], *values]
    return [part for part in (*parts, *map(urllib.parse.unquote, parts)) if part]


def reasons(text: str) -> Iterator[str]:
    """Why a text that is to be sent or stored in the open looks like a secret."""
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
