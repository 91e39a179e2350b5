"""The rank table of an Ascend job: a JSON file of ModelArts that names the servers, their cards,
and the rank of each card."""

import dataclasses
import json
from typing import Any, Optional

from common.errors import UserError, one_line

VARIABLE = "RANK_TABLE_FILE"
VERSIONS = ("1.0", "1.2")


@dataclasses.dataclass(frozen=True)
class Server:
    host: Optional[str]  # its address, where the table has it
    cards: dict[int, int]  # {rank: number of the card within the server}, in the order of the ranks


def read(path: str) -> list[Server]:
    """Return the rank table's servers in the order of their ranks; UserError if it is unfinished,
    or not as documented."""
    subject = f"{VARIABLE} {one_line(path)[:200]}"
    try:
        with open(path, "rb") as file:
            table = json.loads(file.read(1 << 24))
    except OSError as error:
        raise UserError(
            f"{subject} cannot be read ({error.strerror}): start the job again, or unset {VARIABLE}"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{subject} is damaged, it is no JSON: start the job again") from None
    try:
        if table["status"] != "completed":
            state = one_line(table["status"])[:40]
            raise UserError(
                f"{subject} has the status {state!r}: the platform has not finished it; start the job again"
            )
        if table["version"] not in VERSIONS:
            raise UserError(
                f"{subject} has version {one_line(table['version'])[:40]}; {' and '.join(VERSIONS)} are known"
            )
        servers = [_server(entry) for entry in table["server_list"]]
        _require_consistent(servers, int(table["server_count"]))
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{subject} does not have the documented form ({one_line(repr(error))[:100]}): start the "
            "job again"
        ) from None
    return sorted(servers, key=lambda server: min(server.cards))


def _server(entry: dict[str, Any]) -> Server:
    cards = {int(device["rank_id"]): int(device["device_id"]) for device in entry["device"]}
    if len(cards) != len(entry["device"]) or len(set(cards.values())) != len(cards) or not cards:
        raise ValueError("a server without cards, or a rank or card twice")
    host = entry.get("host_ip")
    if host is not None and not isinstance(host, str):
        raise ValueError("host_ip")
    return Server(host or None, dict(sorted(cards.items())))


def _require_consistent(servers: list[Server], server_count: int) -> None:
    ranks = sorted(rank for server in servers for rank in server.cards)
    if len(servers) != server_count:
        raise ValueError(f"server_count {server_count}, {len(servers)} in the list")
    if ranks != list(range(len(ranks))):
        raise ValueError("the ranks are not 0, 1, 2 and so on, each once")
