"""The secret that the nodes of a job share, and how two nodes prove to each other that they have it.

Each side sends a random number, and then the HMAC of both numbers under the secret or, without one, a
publicly known key.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import MutableMapping
from pathlib import Path

from common.errors import UserError, one_line

VARIABLE = "ANYRANK_SECRET"
FILE = "ANYRANK_SECRET_FILE"
SHORTEST = 16
UNPROTECTED = (
    f"the nodes have no common secret, so anybody who reaches port {{port}} can join: set {VARIABLE} or "
    f"{FILE} on every node"
)
DIFFERS = (
    f"the secrets of the nodes differ: give every node the same {VARIABLE}, or the same content of {FILE}"
)


def of_this_job(environ: MutableMapping[str, str] = os.environ) -> bytes:
    """Return the secret of ANYRANK_SECRET (removed, so no child process has it) or ANYRANK_SECRET_FILE;
    b"" without either."""
    value = environ.pop(VARIABLE, "").strip()
    path = environ.get(FILE)
    if value and path:
        raise UserError(f"{VARIABLE} and {FILE} are both set: give one of them")
    if path:
        try:
            value = Path(path).read_text().strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{FILE} is {path!r}, which cannot be read: {one_line(error)}") from None
    if not value and not path:
        return b""
    if len(value) < SHORTEST:
        name = FILE if path else VARIABLE
        raise UserError(
            f"{name} has a secret of {len(value)} characters: give at least {SHORTEST}, such as "
            "`openssl rand -hex 32`"
        )
    return value.encode()


def nonce() -> str:
    """Return a new random number, as a text of 32 characters."""
    return secrets.token_hex(16)


def proof(secret: bytes, side: str, hub: str, node: str) -> str:
    """Return the HMAC by which `side`, "hub" or "node", proves to have the secret.

    `hub`, `node`: the nonces of the two.
    """
    return hmac.new(b"anyrank " + secret, f"{side} {hub} {node}".encode(), hashlib.sha256).hexdigest()


def proves(candidate: object, secret: bytes, side: str, hub: str, node: str) -> bool:
    """Whether the first argument is the proof() of the others; compared in constant time."""
    return isinstance(candidate, str) and hmac.compare_digest(
        candidate.encode(), proof(secret, side, hub, node).encode()
    )
