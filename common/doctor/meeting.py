"""The ranks of a job that the platform started one by one: which have come, and their clocks, before they form a group."""

import datetime
import json
import time

from common import naming
from common.doctor.table import Finding, bad, refusal
from common.errors import UserError, one_line
from common.ranks import store
from common.world import World

KEYS = "anyrank/doctor"


class Meeting:
    """Through a key-value store that all ranks share; kept open until the end, as others may still be reading."""

    def __init__(self, here: World, seconds: float):
        self._here, self._seconds = here, seconds
        self._store = store.of_all_ranks(here, seconds)
        if self._store.add(f"{KEYS}/claimed/{here.restart_count}/{here.rank}", 1) > 1:
            raise UserError(f"two processes say that they are rank {here.rank}; give each process its own RANK")

    def hold(self, findings: list) -> tuple[str, list[tuple]]:
        """("ranks 1-2", which have not come, or ""; on rank 0: [(node or None, findings, clock ahead)] of the others)"""
        here, keys = self._here, self._store
        node = None if here.local_rank else here.node_rank
        keys.set(f"{KEYS}/says/{here.rank}", json.dumps({"node": node, "findings": findings}))
        keys.add(f"{KEYS}/came/{here.rank}", 1)
        missing = self._be_counted() if here.rank else self._count()
        named = naming.describe_ranks(missing) if missing else ""
        if here.rank:
            return named, []
        others = []
        for rank in set(range(1, here.world_size)) - set(missing):
            theirs, clock = json.loads(keys.get(f"{KEYS}/says/{rank}")), float(keys.get(f"{KEYS}/clock/{rank}"))
            others.append((theirs["node"], theirs["findings"], clock - time.time()))
        return named, others

    def _be_counted(self):
        """Wait for rank 0, which waits for the others; returns the ranks that are missing."""
        try:
            self._store.wait([f"{KEYS}/missing"], datetime.timedelta(seconds=2 * self._seconds))
            missing = json.loads(self._store.get(f"{KEYS}/missing"))
            self._store.set(f"{KEYS}/clock/{self._here.rank}", str(time.time()))
        except RuntimeError:
            raise UserError(f"rank 0 did not answer within {2 * self._seconds:g} s; see its log") from None
        return missing

    def _count(self):
        deadline, missing = time.monotonic() + self._seconds, list(range(1, self._here.world_size))
        while missing := [rank for rank in missing if not store.count(self._store, f"{KEYS}/came/{rank}")]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self._store.set(f"{KEYS}/missing", json.dumps(missing))
        return missing


def not_met(here: World, error: object) -> Finding:
    """The line of the table for nodes or ranks that did not meet."""
    text = one_line(error)
    if "did not answer" in text:
        do = "see that node 0 was started, and that this port of it is open for the other nodes (security group, firewall)"
        return bad("master", text, do)
    if "did not come" in text:
        return bad("ranks", text, f"see that it was started and reaches port {here.master_port} of {here.master_addr}")
    return refusal("master" if "port" in text else "ranks", error)
