"""The doctor: it examines every node and the job before the training, and shows all problems in a table, the worst first.

    python -m launch doctor jobs/train_ddp.py -- --data_url ...      or --doctor true after the job's own arguments

Each node checks itself (checks.py). The nodes then meet, and the ranks open the data and end before the first step.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

from common.address import is_bucket
from common.alive import heartbeat
from common.alive.supervisor import Supervisor
from common.doctor import checks, stores
from common.doctor.meeting import meet_and_compare_clocks, not_met
from common.doctor.table import BAD, Finding, bad, doubtful, good, refusal, table
from common.errors import TrainingFailed, UserError, count, is_victim, one_line
from common.moments import REPLACED
from common.secrets import mask
from common.world import World, folders, naming

FILE = "ANYRANK_DOCTOR"  # set by the doctor of a node for its ranks: the file into which rank 0 writes the ranks' findings

Located = tuple[Optional[int], Finding]  # (node or None for the whole job, Finding)


class Examination:
    """The doctor of one job: it checks at the moments that the job announces (common/moments.py)."""

    def __init__(self, args: argparse.Namespace):
        self.findings: list[Located] = []
        self.here: Any = None  # the World, once it is known
        self._supervisor: Any = None
        self._seconds = args.doctor_seconds
        REPLACED.collective_seconds = 150
        if args.evaluate:
            raise UserError("--doctor true and --evaluate were given, but the doctor examines a training: give one of them")

    def add(self, finding: Finding, node: Optional[int] = None) -> None:
        self.findings.append((node, finding))

    # --- This node ---

    def world(self, args: argparse.Namespace) -> None:
        """Check the machine, in one process of each node, as soon as the place of this process is known."""
        self.here = here = args.world
        shm = checks.check_shm(checks.nccl_shm_bytes(args))
        if not heartbeat.has_parent() and not (here.level == "process" and here.local_rank):
            for finding in (*_of_node(args, here), shm):
                self.add(finding, here.node_rank)

    # --- The nodes, where the platform started a process on each ---

    def supervisor(self, of_this_node: Supervisor) -> None:
        """Prepare the supervisor: no restarts, a wait of --doctor_seconds, and the findings that this node sends to node 0."""
        self._supervisor = of_this_node
        of_this_node.max_restarts = 0
        of_this_node.join_seconds = self._seconds
        if self.here.num_nodes > 1 and self.here.node_rank == 0:
            self.add(checks.check_secret(bool(of_this_node.key), self.here.master_port))
        of_this_node.hello["findings"] = list(self.findings)
        self._folder = tempfile.TemporaryDirectory(prefix="anyrank-doctor-")
        os.environ[FILE] = os.path.join(self._folder.name, "findings")

    def supervised(self, supervisor: Supervisor, code: int) -> None:
        """Add the findings of other nodes and ranks, show the table on node 0, and end; after a stop signal, end at once."""
        if supervisor.loop.stop_signal:
            sys.exit(code)
        self._collect(supervisor)
        here = self.here
        if here.node_rank == 0:
            self._add_met()
        if code:
            verdict = supervisor.loop.verdict
            text = verdict["text"] if verdict else f"exit code {code}"
            mistake = code == UserError.exit_code
            self.add(refusal("job", UserError(text)) if mistake else bad("job", text, "see the log of that rank"))
        if here.node_rank:
            supervisor.say("the doctor's findings are in the log of node 0")
            sys.exit(int(bool(code) or self._is_bad()))
        sys.exit(self.show())

    def _collect(self, supervisor: Supervisor) -> None:
        for node, hello in supervisor.loop.hub.hellos.items() if supervisor.loop.hub else ():
            self.findings += decode(hello.get("findings") or [])
            self.add(checks.check_clock(hello["ahead"], "node 0"), node)
        if os.path.exists(os.environ[FILE]):
            self.findings += decode(json.loads(Path(os.environ[FILE]).read_text()))
        self._folder.cleanup()

    def _add_met(self):
        here = self.here
        self.add(good("ranks", f"all {here.world_size} on {count(here.num_nodes, 'node')} have come"))
        if here.num_nodes > 1:
            self.add(good("master", f"{here.master_addr}:{here.master_port} was reached from every node"))

    # --- The ranks, where the platform started each of them ---

    def meeting(self, _args: argparse.Namespace) -> None:
        """If the platform started each rank, compare clocks, and end if ranks are missing."""
        here = self.here
        if not (here.level == "node" or here.world_size == 1 or heartbeat.has_parent()):
            self._meet(here)

    def _meet(self, here: World) -> None:
        try:
            missing, others = meet_and_compare_clocks(here, self._seconds, self.findings)
        except UserError as error:
            if here.local_rank:
                raise
            self.add(not_met(here, error), here.node_rank)
            sys.exit(self.show())
        if missing and here.rank:
            print(f"rank {here.rank}: the doctor's findings are in the log of rank 0", flush=True)
            sys.exit(1)
        for node, findings, ahead in others:
            self.findings += decode(findings)
            if node:
                self.add(checks.check_clock(ahead, "node 0"), node)
        if missing:
            self.add(not_met(here, f"{naming.describe_ranks(missing)} did not come within {self._seconds:g} s"))
            self.end()
        if here.rank == 0:
            self._add_met()

    # --- The job ---

    def data(self, args: argparse.Namespace) -> None:
        """End here if the data would have to be fetched first."""
        if args.input.address and args.input.fetched:
            self.end()

    def run(self, _args: argparse.Namespace, not_given: Callable[[], list[tuple[str, str]]]) -> None:
        """End before the first step: the data are open and the network is made, and the ranks have met."""
        for name, kind in not_given():
            found = f"{name} ({kind}) is not given to Run: if it is trained, a restart begins it anew"
            self.add(doubtful("script", found, f"give it to Run, or unsaved=[{name}] if that is meant"))
        self.end()

    # --- The end ---

    def failure(self, error: BaseException) -> None:
        """In the process that shows the table, add the error that ends the job, show the table and end the process."""
        if heartbeat.has_parent() or (self.here and self.here.level == "process" and self.here.rank):
            return  # run_job reports it
        if self._supervisor and isinstance(error, UserError):
            self.add(not_met(self.here, error), self.here.node_rank)
            self._collect(self._supervisor)
            sys.exit(self.show())
        if not isinstance(error, (UserError, TrainingFailed)) and not is_victim(error):
            print(mask(traceback.format_exc()), end="", file=sys.stderr, flush=True)
        self.add(refusal("job", error))
        self.end()

    def end(self) -> None:
        """End the process. Rank 0 first writes its findings for its parent process or, without a parent, shows the table."""
        code = 0
        if heartbeat.has_parent():
            if self.here.rank == 0:
                Path(os.environ[FILE]).write_text(json.dumps(self.findings))
            heartbeat.of_this_process().set("done", 0)
        elif self.here is None or self.here.rank == 0 or self.here.level == "node":
            code = self.show()
        sys.exit(code)

    def show(self) -> int:
        """Print the table; return the exit code, 1 if a finding is bad."""
        print(table(self.findings), flush=True)
        return int(self._is_bad())

    def _is_bad(self):
        return any(finding.severity == BAD for _, finding in self.findings)


def _of_node(args: argparse.Namespace, here: World) -> Iterator[Finding]:
    """Yield the findings of the checks that one process makes of its node before the job begins."""
    yield checks.check_place(here)
    yield checks.check_gpus(args.enable_gpu, here, checks.cards())
    yield checks.check_driver(args.enable_gpu)
    if here.world_size > 1:
        yield checks.check_interface(here, os.environ)
    if here.node_rank == 0 or args.ledger:  # without --ledger, other nodes write nothing
        yield stores.check_output([args.output_dir, args.checkpoint_dir, args.tensorboard_dir])
        if why := folders.not_kept(args, os.environ):
            yield bad("output", why, "declare an output of the job there (ModelArts: train_url)")
        yield stores.check_disk("disk", args.output_dir, 0, "the results")
    if here.node_rank == 0 and args.output_url:
        yield from stores.check_bucket(args.output_url, "output", writes=True)
    if is_bucket(args.input.address):
        inputs = args.input_dir if args.input.fetched else None
        passes = args.input.fetched == "during"
        yield from stores.check_bucket(args.input.address, "data", inputs=inputs, passes=passes)
    elif args.input.address:
        yield stores.check_web(args.input.address)


def decode(findings: list[list]) -> list[Located]:
    """Return the findings that another process sent as lists: texts of at most 1000 characters, control characters escaped."""
    return [(node, Finding(*(one_line(word)[:1000] for word in words))) for node, words in findings]
