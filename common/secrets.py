"""Mask what must not be shown: passwords and query strings of addresses,
and the values of names such as HF_TOKEN.

Text that is printed, saved or published goes through mask(), directly or in errors.one_line().
"""

import re
import urllib.parse
from collections.abc import Iterator

HIDDEN = "***"
BUCKETS = ("s3://", "obs://", "oss://")

# Words that mark the value of a name as a secret, as in API_KEY, api-key, apiKey and X-Amz-Signature.
WORDS = {
    "PWD", "PASSWD", "PASSWORD", "TOKEN", "PAT", "AUTH", "KEY", "APIKEY", "SECRET", "CREDENTIAL",
    "CREDENTIALS", "COOKIE", "SIGNATURE", "SIG", "AK", "SK",
}  # fmt: skip
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# An address in a text, and the punctuation that may follow one. The repetitions are bounded, so that the time
# is linear in the length of the text; of a longer name only the end is matched.
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/+)(\S+)")
PUNCTUATION = ".,:;'\")]}>"
NAMED = re.compile(r"(?P<name>[A-Za-z][\w-]{0,127})=(?P<value>[^\s,;'\"]+)")
IN_QUERY = re.compile(r"[?&#]([^=&]{1,128})=")


def is_secret(name: str) -> bool:
    """Whether a word of this name marks its value as a secret: true for HF_TOKEN and awsAccessKeyId,
    false for PYTHONPATH."""
    return not WORDS.isdisjoint(word.upper() for word in WORD.findall(name))


def mask(text: object, *known_secrets: str) -> str:
    """Return `text` with *** for an address's password and query, for VALUE in SECRET=VALUE,
    and for `known_secrets`.

    `known_secrets`: texts that are secret; those shorter than 4 characters are not masked.
    """
    masked = str(text)
    for secret in sorted(known_secrets, key=len, reverse=True):
        if len(secret) >= 4:
            masked = masked.replace(secret, HIDDEN)
    if ":/" in masked:
        masked = ADDRESS.sub(_masked_address, masked)
    if "=" in masked:
        masked = NAMED.sub(_masked_value, masked)
    return masked


def _masked_address(match: "re.Match[str]") -> str:
    rest = match[2].rstrip(PUNCTUATION)
    return match[1] + (_masked_rest(match[1], rest) if rest else "") + match[2][len(rest) :]


def _masked_rest(scheme: str, rest: str) -> str:
    """Return what follows scheme://, masked.

    A password may hold a slash, and a path an @: in doubt, too much is hidden.
    """
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    separators = "?" if scheme in BUCKETS else "?#"  # in a bucket, a key may contain #
    location, separator, query = re.fullmatch(
        rf"([^{separators}]*)([{separators}]?)(.*)", rest, re.DOTALL
    ).groups()  # pyright: ignore[reportOptionalMemberAccess]
    has_password = ":" in host and not re.fullmatch(r"(\[.*\]|[^:\[]*):\d*", host) and "@" in rest
    if has_password and "@" in query:
        return HIDDEN
    if has_password or "@" in host:
        location = f"{HIDDEN}@{location.rpartition('@')[2]}"
    if separator:
        return f"{location}{separator}{HIDDEN}"
    return location


def _masked_value(match: "re.Match[str]") -> str:
    if is_secret(match["name"]):
        return f"{match['name']}={HIDDEN}"
    return match[0]


def secret_parts(address: str) -> list[str]:
    """Return the parts of an address that may be secret,
    to mask them where a library's error quotes one alone."""
    rest, _, fragment = address.partition("#")
    location, _, query = rest.partition("?")
    user = location.partition("://")[2].rpartition("@")[0]
    values = [value for part in query.split("&") for value in part.split("=", 1)[1:]]
    parts = [query, fragment, user, user.partition(":")[2], *values]
    return [part for part in (*parts, *map(urllib.parse.unquote, parts)) if part]


def reasons(text: str) -> Iterator[str]:
    """Yield why a text seems to hold a secret, so that it should not be sent or stored unencrypted."""
    for scheme, rest in ADDRESS.findall(text):
        rest = rest.rstrip(PUNCTUATION)
        shown = _masked_rest(scheme, rest)
        if shown.startswith(HIDDEN):
            yield f"holds a user or a password ({scheme}{shown})"
        elif any(map(is_secret, IN_QUERY.findall(rest))):
            yield f"is signed or holds a key ({scheme}{shown})"
    for match in NAMED.finditer(ADDRESS.sub("", text)):
        if is_secret(match["name"]):
            yield f"sets {match['name']}"
