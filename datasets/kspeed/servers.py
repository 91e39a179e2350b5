"""The servers of a cache: their addresses, and the failures of each, which are reported once."""

import mmap
import re
import threading
from collections.abc import Sequence
from typing import NoReturn, Union

from common.errors import UserError, one_line
from common.progress import warn

PORT = 11211
MAX_WRONG_ANSWERS = 3  # after so many wrong answers a server is left alone for a while
PAUSE_SECONDS = 30  # seconds until a server that failed is asked again

# Kinds of warnings about a server (bits); each is logged once, DOWN once for every outage.
DOWN = 1
WRONG = 2
LOGIN = 4
OPEN = 8

Server = tuple[str, int]  # (host, port)
Addresses = Union[str, Sequence[str], None]  # "host:port,host:port", or a list of host:port


class Unfit(OSError):
    """The server answers, but cannot be used. The log already says so."""


class Servers:
    """The servers and their failures.

    What was reported is in memory that forks share, so each outage is reported once.
    """

    def __init__(self, servers: list[Server]) -> None:
        self.addresses = servers
        self._reported = mmap.mmap(-1, len(servers))  # a byte each
        self._wrong_answers = dict.fromkeys(servers, 0)  # answers
        self._failing: set[Server] = set()
        self.begin_process()

    def begin_process(self) -> None:
        """Renew the lock in a forked process: another thread may have held it during the fork."""
        self._lock = threading.Lock()

    def __getstate__(self) -> list[Server]:
        return self.addresses

    def __setstate__(self, servers: list[Server]) -> None:
        self.__init__(servers)

    def failing(self) -> list[Server]:
        """Return the servers that failed and have not answered this process on a new connection since."""
        return [server for server in self.addresses if server in self._failing]

    def note_answer(self, server: Server) -> None:
        """Note that a server answered on a new connection.

        If its outage was reported, here or by a fork, print its end.
        """
        self._failing.discard(server)
        index = self.addresses.index(server)
        with self._lock:
            reported = self._reported[index] & DOWN
            self._reported[index] &= ~DOWN
        if reported:
            print(f"cache server {name_of(server)} answers again", flush=True)

    def note_outage(self, server: Server, error: Exception) -> None:
        """Note that a server does not answer, and warn once for each outage."""
        self._failing.add(server)
        message = (
            f"does not answer ({one_line(error)[:100]}): the files are read instead, and it is asked again "
            f"in {PAUSE_SECONDS} s"
        )
        self._warn_once(server, DOWN, message)

    def count_wrong_answer(self, server: Server, error: Union[Exception, str]) -> None:
        """Count a server's wrong answer.

        Raise Unfit after every MAX_WRONG_ANSWERS, so that it is avoided for a while.
        """
        self._wrong_answers[server] += 1
        if self._wrong_answers[server] % MAX_WRONG_ANSWERS == 0:
            self.give_up(
                server, WRONG, f"gives wrong answers ({one_line(error)[:100]}): the files are read instead"
            )

    def give_up(self, server: Server, kind: int, message: str) -> NoReturn:
        """Warn once for each `kind` of failure.

        Raise Unfit: pymemcache then avoids the server for PAUSE_SECONDS.
        """
        self._failing.add(server)
        self._warn_once(server, kind, message)
        raise Unfit(message)

    def warn_of_no_password(self, server: Server) -> None:
        """Warn once that the server accepts everybody."""
        self._warn_once(
            server, OPEN, "asks for no password: anybody who can reach it can read and delete what it holds"
        )

    def _warn_once(self, server: Server, kind: int, message: str) -> None:
        index = self.addresses.index(server)
        with self._lock:
            reported = self._reported[index] & kind
            self._reported[index] |= kind
        if not reported:
            warn(f"cache server {name_of(server)} {message}")


def addresses(iplist: Addresses) -> list[Server]:
    """Return [(host, port)] of a list of servers, each once; the port is memcached's if none is given.

    UserError for a bad or missing address. An address of IPv6 needs its brackets.
    """
    entries = iplist.split(",") if isinstance(iplist, str) else iplist or []
    servers = []
    for entry in filter(None, (entry.strip() for entry in entries)):
        host, colon, port = entry.rpartition(":")
        if not colon or entry.endswith("]"):
            host = entry
            port = str(PORT)
        has_brackets = host.startswith("[") and host.endswith("]")
        if has_brackets:
            host = host[1:-1]
        is_host = bool(host) and not re.search(r"[\s\[\]]", host) and (has_brackets or ":" not in host)
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if not is_host or not is_port:
            raise UserError(
                f"{one_line(entry)!r} is no cache server: give host:port, several with commas between them"
            )
        servers.append((host, int(port)))
    if not servers:
        raise UserError(
            "no cache server is given: give host:port, several with commas between them, or set KSPEED_IPLIST"
        )
    return list(dict.fromkeys(servers))


def name_of(server: Server) -> str:
    """Return host:port, fit for a line of the log."""
    return one_line("{}:{}".format(*server))
