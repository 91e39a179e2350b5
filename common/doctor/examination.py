"""The doctor: it examines every node and the job before the training, and shows all problems in a table,
the worst first.

    python -m launch doctor jobs/train_ddp.py -- --data_url ...    or --doctor true after the job's arguments

Each node checks itself (checks.py). The nodes then meet, and the ranks open the data and end before the first
step.
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
from common.doctor.meeting import meet_and_compare_clocks, meeting_failure
from common.doctor.table import BAD, Finding, bad, doubtful, finding_of_error, good, table
from common.errors import TrainingFailed, UserError, count, is_victim, one_line
from common.moments import REPLACED
from common.secrets import mask
from common.world import World, folders, naming

# that a collective may take while the doctor examines: a hung one is found in a short time
COLLECTIVE_SECONDS = 150
# set by the doctor of a node for its ranks: the file into which rank 0 writes the ranks' findings
FILE = "ANYRANK_DOCTOR"

Located = tuple[Optional[int], Finding]  # (node or None for the whole job, Finding)


class Examination:
    """The doctor of one job: it checks at the moments that the job announces (common/moments.py)."""

    def __init__(self, args: argparse.Namespace):
        """Also limit each collective of this process to COLLECTIVE_SECONDS."""
        if args.evaluate:
            raise UserError(
                "--doctor true and --evaluate were given, but the doctor examines a training: give one "
                "of them"
            )
        REPLACED.collective_seconds = COLLECTIVE_SECONDS
        self.findings: list[Located] = []
        self._world: Any = None  # the World, once it is known
        self._supervisor: Optional[Supervisor] = None  # in the parent of a node
        self._folder: Optional[tempfile.TemporaryDirectory] = None  # in the parent of a node: for FILE
        self._seconds = args.doctor_seconds

    def add(self, finding: Finding, node: Optional[int] = None) -> None:
        """Add a finding of a node, or of the whole job."""
        self.findings.append((node, finding))

    # --- This node ---

    def world(self, args: argparse.Namespace) -> None:
        """Check the machine, in one process of each node, as soon as the place of this process is known."""
        self._world = args.world
        shm = checks.check_shm(checks.nccl_shm_bytes(args))
        if not heartbeat.has_parent() and not (args.world.level == "process" and args.world.local_rank):
            for finding in (*_node_findings(args, args.world), shm):
                self.add(finding, args.world.node_rank)

    # --- The nodes, where the platform started a process on each ---

    def supervisor(self, of_this_node: Supervisor) -> None:
        """Prepare the supervisor: no restarts, a wait of --doctor_seconds,
        and the findings that this node sends to node 0."""
        self._supervisor = of_this_node
        of_this_node.max_restarts = 0
        of_this_node.join_seconds = self._seconds
        if self._world.num_nodes > 1 and self._world.node_rank == 0:
            self.add(checks.check_secret(bool(of_this_node.key), self._world.master_port))
        of_this_node.hello["findings"] = list(self.findings)
        self._folder = tempfile.TemporaryDirectory(prefix="anyrank-doctor-")
        os.environ[FILE] = os.path.join(self._folder.name, "findings")

    def supervised(self, supervisor: Supervisor, code: int) -> None:
        """Add the findings of other nodes and ranks, show the table on node 0, and end; after a stop signal,
        end at once."""
        if supervisor.loop.stop_signal:
            sys.exit(code)
        self._collect(supervisor)
        world = self._world
        if world.node_rank == 0:
            self._add_meeting()
        if code:
            verdict = supervisor.loop.verdict
            text = verdict["text"] if verdict else f"exit code {code}"
            if code == UserError.exit_code:
                self.add(finding_of_error("job", UserError(text)))
            else:
                self.add(bad("job", text, "see the log of that rank"))
        if world.node_rank:
            supervisor.say("the doctor's findings are in the log of node 0")
            sys.exit(1 if code or self._is_bad() else 0)
        sys.exit(self.show())

    def _collect(self, supervisor: Supervisor) -> None:
        """Add the findings of the other nodes, of their clocks and of this node's ranks."""
        for node, hello in supervisor.loop.hub.hellos.items() if supervisor.loop.hub else ():
            self.findings += decode(hello.get("findings") or [])
            self.add(checks.check_clock(hello["ahead"], "node 0"), node)
        if os.path.exists(os.environ[FILE]):
            self.findings += decode(json.loads(Path(os.environ[FILE]).read_text()))
        if self._folder:
            self._folder.cleanup()

    def _add_meeting(self) -> None:
        """Add that all ranks have met, and reached the master."""
        world = self._world
        self.add(good("ranks", f"all {world.world_size} on {count(world.num_nodes, 'node')} have come"))
        if world.num_nodes > 1:
            self.add(good("master", f"{world.master_addr}:{world.master_port} was reached from every node"))

    # --- The ranks, where the platform started each of them ---

    def meeting(self, _args: argparse.Namespace) -> None:
        """If the platform started each rank, compare clocks, and end if ranks are missing."""
        world = self._world
        if not (world.level == "node" or world.world_size == 1 or heartbeat.has_parent()):
            self._meet(world)

    def _meet(self, world: World) -> None:
        """Wait for all ranks, and add the findings of the others; if any is missing, end."""
        try:
            missing, reports = meet_and_compare_clocks(world, self._seconds, self.findings)
        except UserError as error:
            if world.local_rank:
                raise
            self.add(meeting_failure(world, error), world.node_rank)
            sys.exit(self.show())
        if missing and world.rank:
            print(f"rank {world.rank}: the doctor's findings are in the log of rank 0", flush=True)
            sys.exit(1)
        for node, findings, ahead in reports:
            self.findings += decode(findings)
            if node:
                self.add(checks.check_clock(ahead, "node 0"), node)
        if missing:
            self.add(
                meeting_failure(
                    world, f"{naming.describe_ranks(missing)} did not come within {self._seconds:g} s"
                )
            )
            self.end()
        if world.rank == 0:
            self._add_meeting()

    # --- The job ---

    def data(self, args: argparse.Namespace) -> None:
        """End here if the data would have to be fetched first."""
        if args.input.address and args.input.fetched:
            self.end()

    def run(self, _args: argparse.Namespace, find_unsaved: Callable[[], list[tuple[str, str]]]) -> None:
        """Add a finding for each part that Run was not given, and end before the first step: by now the data
        are open, the network is made and the ranks have met."""
        for name, kind in find_unsaved():
            result = f"{name} ({kind}) is not given to Run: if it is trained, a restart begins it anew"
            self.add(doubtful("script", result, f"give it to Run, or unsaved=[{name}] if that is meant"))
        self.end()

    # --- The end ---

    def failure(self, error: BaseException) -> None:
        """In the process that shows the table, add the error that ends the job,
        show the table and end the process."""
        if heartbeat.has_parent() or (self._world and self._world.level == "process" and self._world.rank):
            return  # run_job reports it
        if self._supervisor and isinstance(error, UserError):
            self.add(meeting_failure(self._world, error), self._world.node_rank)
            self._collect(self._supervisor)
            sys.exit(self.show())
        if not isinstance(error, (UserError, TrainingFailed)) and not is_victim(error):
            print(mask(traceback.format_exc()), end="", file=sys.stderr, flush=True)
        self.add(finding_of_error("job", error))
        self.end()

    def end(self) -> None:
        """End the process.

        Rank 0 first writes its findings for its parent process or, without a parent, shows the table.
        """
        code = 0
        if heartbeat.has_parent():
            if self._world.rank == 0:
                Path(os.environ[FILE]).write_text(json.dumps(self.findings))
            heartbeat.of_this_process().set("done", 0)
        elif self._world is None or self._world.rank == 0 or self._world.level == "node":
            code = self.show()
        sys.exit(code)

    def show(self) -> int:
        """Print the table; return the exit code, 1 if a finding is bad."""
        print(table(self.findings), flush=True)
        return 1 if self._is_bad() else 0

    def _is_bad(self) -> bool:
        return any(finding.severity == BAD for _, finding in self.findings)


def _node_findings(args: argparse.Namespace, world: World) -> Iterator[Finding]:
    """Yield the findings of the checks that one process makes of its node before the job begins."""
    yield checks.check_place(world)
    yield checks.check_gpus(args.enable_gpu, world, checks.gpu_usage())
    yield checks.check_driver(args.enable_gpu)
    if world.world_size > 1:
        yield checks.check_interface(world, os.environ)
    if world.node_rank == 0 or args.ledger:  # without --ledger, other nodes write nothing
        yield stores.check_output([args.output_dir, args.checkpoint_dir, args.tensorboard_dir])
        if reason := folders.why_results_would_be_lost(args, os.environ):
            yield bad("output", reason, "declare an output of the job there (ModelArts: train_url)")
        yield stores.check_disk("disk", args.output_dir, 0, "the results")
    if world.node_rank == 0 and args.output_url:
        yield from stores.check_bucket(args.output_url, "output", needs_write=True)
    if is_bucket(args.input.address):
        inputs = args.input_dir if args.input.fetched else None
        is_streamed = args.input.fetched == "during"
        yield from stores.check_bucket(args.input.address, "data", inputs=inputs, is_streamed=is_streamed)
    elif args.input.address:
        yield stores.check_web(args.input.address)


def decode(findings: list[list]) -> list[Located]:
    """Return the findings that another process sent as lists: texts of at most 1000 characters,
    control characters escaped."""
    return [(node, Finding(*(one_line(field)[:1000] for field in fields))) for node, fields in findings]
