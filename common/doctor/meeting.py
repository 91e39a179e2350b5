"""Find missing ranks and compare clocks before the process group is formed, if the platform started each rank by itself."""

import json
import time

from torch import distributed

from common.doctor.table import Finding, bad, refusal
from common.errors import one_line
from common.ranks import store
from common.world import World


def meet_and_compare_clocks(here: World, seconds: float, findings: list) -> tuple[list[int], list[tuple]]:
    """Return (missing ranks, [(node, findings, seconds ahead)] on rank 0, else []). Only a node's first rank gives its node."""
    keys = distributed.PrefixStore("doctor", store.open_store(here, seconds))
    keys.set(f"says/{here.rank}", json.dumps({"node": None if here.local_rank else here.node_rank, "findings": findings}))
    missing = store.meet(here, keys, seconds)
    others = []
    if here.rank:
        keys.set(f"clock/{here.rank}", str(time.time()))
        return missing, others
    for rank in set(range(1, here.world_size)) - set(missing):
        theirs = json.loads(keys.get(f"says/{rank}"))
        clock = float(keys.get(f"clock/{rank}"))
        others.append((theirs["node"], theirs["findings"], clock - time.time()))
    return missing, others


def not_met(here: World, error: object) -> Finding:
    text = one_line(error)
    if "did not answer" in text:
        do = "see that node 0 was started, and that this port of it is open for the other nodes (security group, firewall)"
        return bad("master", text, do)
    if "did not come" in text:
        return bad("ranks", text, f"see that it was started and reaches port {here.master_port} of {here.master_addr}")
    return refusal("master" if "port" in text else "ranks", error)
