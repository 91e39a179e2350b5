"""Find missing ranks and compare clocks before the process group is formed,
if the platform started each rank by itself."""

import json
import time

from torch import distributed

from common.doctor.table import Finding, bad, finding_of_error
from common.errors import one_line
from common.ranks import store
from common.world import World


def meet_and_compare_clocks(world: World, seconds: float, findings: list) -> tuple[list[int], list[tuple]]:
    """Return (missing ranks, [(node, findings, seconds ahead)] on rank 0, else []).

    Only a node's first rank gives its node.
    """
    doctor_store = distributed.PrefixStore("doctor", store.open_store(world, seconds))
    doctor_store.set(
        f"says/{world.rank}",
        json.dumps({"node": None if world.local_rank else world.node_rank, "findings": findings}),
    )
    missing = store.meet(world, doctor_store, seconds)
    reports = []
    if world.rank:
        doctor_store.set(f"clock/{world.rank}", str(time.time()))
        return missing, reports
    for rank in set(range(1, world.world_size)) - set(missing):
        message = json.loads(doctor_store.get(f"says/{rank}"))
        clock = float(doctor_store.get(f"clock/{rank}"))
        reports.append((message["node"], message["findings"], clock - time.time()))
    return missing, reports


def meeting_failure(world: World, error: object) -> Finding:
    """Return a finding for a node 0 that did not answer, or for ranks that did not come."""
    text = one_line(error)
    if "did not answer" in text:
        remedy = (
            "see that node 0 was started, and that this port of it is open for the other nodes (security "
            "group, firewall)"
        )
        return bad("master", text, remedy)
    if "did not come" in text:
        return bad(
            "ranks",
            text,
            f"see that it was started and reaches port {world.master_port} of {world.master_addr}",
        )
    return finding_of_error("master" if "port" in text else "ranks", error)
