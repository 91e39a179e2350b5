"""A cache of samples on several memcached servers: jobs and nodes read a file from storage once,
and then from memory.

No job depends on the cache. If a server dies, hangs, or loses or changes values, an operation still ends
within its deadline. A wrong value is a miss. A server that fails is not asked for a while, and one line says
so. Nothing is unpickled.
"""

import os
import threading
from collections.abc import Iterable
from typing import Any, Optional

from common.errors import UserError
from datasets.kspeed.servers import Addresses, Server, Servers, addresses
from datasets.kspeed.values import LARGEST, NOT_STORED, TOO_LARGE, Key, Values


class SampleCache:
    """Client for threads and forked or spawned processes, each with own connections.

    `deadline`: seconds for a get or set.
    """

    def __init__(
        self,
        servers: Addresses,
        user: Optional[str] = None,
        password: Optional[str] = None,
        deadline: float = 0.05,
    ):
        try:
            import pymemcache  # noqa: F401
        except ImportError:
            raise UserError("the sample cache needs pymemcache: pip install .[cache]") from None
        if (user is None) != (password is None):
            raise UserError("--kspeed_user and KSPEED_PASSWORD belong together: give both, or neither")
        if any(character.isspace() for character in f"{user}{password}"):
            raise UserError(
                "--kspeed_user or KSPEED_PASSWORD contains a space, at which memcached ends a user: "
                "choose others"
            )
        self.servers = Servers(addresses(servers))
        self.values = Values(password)
        self.deadline = deadline
        self._login = f"{user} {password}".encode() if user else None
        # bytes, with the header, of the smallest value that each refused
        self._too_large: dict[Server, int] = {}
        self._start_process()

    def _start_process(self) -> None:
        self._thread = threading.local()
        self.servers.begin_process()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_process", "_thread")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_process()

    def get(self, key: Key) -> Optional[bytes]:
        """Return the sample; None if it is not there or damaged, or if its server does not answer."""
        return self.get_many([key])[key]

    def get_many(self, keys: Iterable[Key]) -> dict[Any, Optional[bytes]]:
        """Return {key: sample or None}, with one request to each server for all samples that it may have."""
        hashed = {key: self.values.hashed(key) for key in keys}
        samples = self._fleet().get_many([name for name, _ in hashed.values()], seals=dict(hashed.values()))
        return {key: samples.get(name) for key, (name, _) in hashed.items()}

    def set(self, key: Key, content: bytes) -> str:
        """Store a sample. Return STORED, TOO_LARGE or NOT_STORED, which a job may ignore."""
        if len(content) > LARGEST:
            return TOO_LARGE
        name, seal = self.values.hashed(key)
        return self._fleet().set(name, self.values.header(seal, content) + content) or NOT_STORED

    def has(self, key: Key) -> bool:
        """Return whether a server says that it has a value for this key.

        The value is neither transferred nor verified.
        """
        return bool(self._fleet().touch(self.values.hashed(key)[0]))

    def delete(self, key: Key) -> bool:
        """Delete a sample. Return whether its server had it; False also if the server does not answer."""
        return bool(self._fleet().delete(self.values.hashed(key)[0]))

    def status(self) -> dict[Server, Optional[dict[str, Any]]]:
        """Return {server: memcached's statistics}, with None for a server that does not answer."""
        statistics = {}
        for client in self._fleet().clients.values():
            client.socket_module.begin()
            try:
                statistics[client.server] = {name.decode(): value for name, value in client.stats().items()}
            except Exception:
                statistics[client.server] = None
        return statistics

    def _fleet(self) -> Any:
        """Return this thread's client for all servers; the deadline begins now."""
        if self._process != os.getpid():
            self._start_process()
        local = self._thread  # another thread of a fork may begin the process as well
        if not hasattr(local, "fleet"):
            from datasets.kspeed.fleet import connect

            local.fleet = connect(self.servers, self.values, self._login, self._too_large)
        fleet = local.fleet
        fleet.network.deadline = self.deadline
        fleet.network.begin()
        return fleet
