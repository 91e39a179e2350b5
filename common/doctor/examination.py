"""The examination of a job before it starts: what ruins runs, on every node, in one table, the worst first.

    python -m launch doctor jobs/train_ddp.py -- --data_url ...      or --doctor true behind the job's own arguments

It listens to the job's course (common/moments.py). Each node looks at itself (checks.py). Then the nodes meet as they would for
the training, only that nobody waits long; the ranks begin the job, load its data, take a few steps as a trial, and end.
"""

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import threading
import traceback
from typing import Any

import torch

from common import heartbeat
from common.doctor import checks, measure, stores
from common.doctor.meeting import Meeting, not_met
from common.doctor.table import BAD, Finding, bad, count, doubtful, good, refusal, table
from common.errors import TrainingFailed, UserError, is_victim, one_line
from common.run import checkpoint
from common.storage import bucket

FOLDER = "ANYRANK_DOCTOR"  # set by the doctor of a node for its ranks: where rank 0 leaves what they have found


class Examination:
    """Hears the moments of a job; what it finds is (node or None for the whole job, Finding)."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.found = args, []
        self.here: Any = None  # the World, once it is known
        self._rate = self._meeting = self._supervisor = None
        self._guard = threading.Timer(measure.HANG_SECONDS, self._hangs)
        self._guard.daemon = True
        self._seconds = args.doctor_seconds
        if args.evaluate:
            raise UserError("--doctor true looks at a training: leave --evaluate out")
        args.trial = True  # nothing of a run is read or written

    def add(self, finding, node=None):
        self.found.append((node, finding))

    # --- This node ---

    def world(self, args):
        """The place of this process is known: look at the machine, once for each node."""
        self.here = here = args.world
        shm = checks.check_shm(*checks.shared_memory(args))
        if not heartbeat.has_parent() and not (here.level == "process" and here.local_rank):
            for finding in (*_of_node(args, here), shm):
                self.add(finding, here.node_rank)
        self._loader_would_hang = shm.severity == BAD
        if self._loader_would_hang:
            args.workers = 0

    # --- The nodes, where the platform started a process on each ---

    def supervisor(self, supervisor):
        """Let the ranks try the job, and wait for the other nodes no longer than the doctor does."""
        self._supervisor = supervisor
        supervisor.max_restarts, supervisor.join_seconds = 0, self._seconds
        supervisor.hello["found"] = encode(self.found)
        self._folder = tempfile.TemporaryDirectory(prefix="anyrank-doctor-")
        os.environ[FOLDER] = os.path.join(self._folder.name, "found")

    def supervised(self, supervisor, code):
        """Show what everybody has found, and leave with the exit code."""
        if supervisor.stop_signal:
            sys.exit(code)
        self._collect(supervisor)
        here = self.here
        if here.node_rank == 0:
            self._add_met()
        if code:
            text, mistake = supervisor.verdict["text"], code == UserError.exit_code
            self.add(refusal("job", UserError(text)) if mistake else bad("job", text, "see the log of that rank"))
        if here.node_rank:
            supervisor.say("what the doctor has found is in the log of node 0")
            sys.exit(int(bool(code) or self._is_bad()))
        sys.exit(self.show())

    def _collect(self, supervisor):
        for node, hello in supervisor.hub.hellos.items() if supervisor.hub else ():
            self.found += decode(hello.get("found") or [])
            self.add(checks.check_clock(hello["ahead"], "node 0"), node)
        if os.path.exists(os.environ[FOLDER]):
            with open(os.environ[FOLDER]) as file:
                self.found += decode(json.load(file))
        self._folder.cleanup()

    def _add_met(self):
        here = self.here
        self.add(good("ranks", f"all {here.world_size} on {count(here.num_nodes, 'node')} have come"))
        if here.num_nodes > 1:
            self.add(good("master", f"{here.master_addr}:{here.master_port} was reached from every node"))

    # --- The ranks, where the platform started each of them ---

    def meeting(self, args):
        """Who is there, and by which clock: before the process group is made, which could only wait."""
        args.collective_seconds = measure.HANG_SECONDS + 30
        here = self.here
        if here.level == "node" or here.world_size == 1 or heartbeat.has_parent():
            return
        try:
            self._meeting = Meeting(here, self._seconds)
            missing, others = self._meeting.hold(encode(self.found))
        except UserError as error:
            if here.local_rank:
                raise
            self.add(not_met(here, error), here.node_rank)
            sys.exit(self.show())
        if missing and here.rank:
            print(f"rank {here.rank}: what the doctor has found is in the log of rank 0", flush=True)
            sys.exit(1)
        for node, found, ahead in others:
            self.found += decode(found)
            if node:
                self.add(checks.check_clock(ahead, "node 0"), node)
        if missing:
            self.add(not_met(here, f"{missing} did not come within {self._seconds:g} s"))
            self.end()
        if here.rank == 0:
            self._add_met()

    # --- The job ---

    def joined(self, device):
        """The process group is there: how fast is it between the nodes?"""
        if self.here.num_nodes > 1:
            self._rate = measure.all_reduce_rate(device)

    def data(self, args):
        """Where they would have to be fetched first, there is nothing to measure yet."""
        if not (args.input.address and args.input.fetched):
            return
        if self._rate:
            self.add(checks.check_network(self._rate, None, None, self.here.world_size))
        why = "not measured, the data would have to be fetched first"
        self.add(good("loader", f"{why}; --custom_data true measures the model on synthetic images"))
        self.end()

    def batches(self, run, loader):
        """The first step: measure the loader, and give the job one of its batches for a few steps."""
        self._guard.start()
        batch, load_seconds = measure.time_loader(loader, self.args.workers or 0, counts=not self._loader_would_hang)
        return self._steps(run, loader, batch, load_seconds)

    def _steps(self, run, loader, batch, load_seconds):
        step_seconds = yield from measure.time_steps(run, batch)
        self._judge(run, loader, load_seconds, step_seconds)

    def _judge(self, run, loader, load_seconds, seconds):
        self._guard.cancel()
        args, here = self.args, self.here
        sampler, samples = run.sampler, run.global_batch // run.world_size
        beside = loader.beside or bool(args.workers)
        self.add(checks.check_batches(sampler.num_samples, run.global_batch, run.world_size, args.epochs))
        if load_seconds:
            self.add(checks.check_loader(args.input.remedies, load_seconds, seconds, samples, beside))
        if self._rate:
            gradients = checkpoint.size_of([parameter for parameter in run.model.parameters() if parameter.requires_grad])
            self.add(checks.check_network(self._rate, gradients, seconds, run.world_size))
        gpus = torch.cuda.device_count() if loader.device.type == "cuda" else 1
        if gpus > 1 == run.world_size and not run.uses_all_gpus:
            self.add(doubtful("gpus", f"{gpus - 1} of {gpus} would stay idle", "start train_ddp.py, which uses all of them"))
        step_seconds = max(seconds, load_seconds) if beside else seconds + load_seconds
        self.add(checks.check_time(measure.steps_left(args, sampler) * step_seconds, checks.time_limit(args, os.environ)))
        self.add(stores.check_disk("disk", args.output_dir, measure.room_to_save(run), "the checkpoints"), here.node_rank)
        self.end()

    # --- The end ---

    def failure(self, error):
        """What stops the job is a line of the table, where this process has the table."""
        if heartbeat.has_parent() or (self.here and self.here.level == "process" and self.here.rank):
            return  # it is said in the usual way
        if self._supervisor and isinstance(error, UserError):
            self.add(not_met(self.here, error), self.here.node_rank)
            self._collect(self._supervisor)
            sys.exit(self.show())
        if not isinstance(error, (UserError, TrainingFailed)) and not is_victim(error):
            traceback.print_exc()
        self.add(refusal("job", error))
        self.end()

    def _hangs(self):
        text = f"the loader, or a step, is not done after {measure.HANG_SECONDS} s"
        faulthandler.dump_traceback()
        if heartbeat.has_parent():
            heartbeat.report_fault(text, 1, victim=False)
        else:
            self.add(bad("job", text, "see in the log where it is"))
            self.show()
        os._exit(1)

    def end(self):
        """Show the table, or hand what was found to the doctor of this node; no training."""
        code = 0
        if heartbeat.has_parent():
            if self.here.rank == 0:
                with open(os.environ[FOLDER], "w") as file:
                    json.dump(encode(self.found), file)
            heartbeat.of_this_process().set("done", 0)
        elif self.here is None or self.here.rank == 0 or self.here.level == "node":
            code = self.show()
        sys.exit(code)

    def show(self):
        print(table(self.found), flush=True)
        return int(self._is_bad())

    def _is_bad(self):
        return any(finding.severity == BAD for _, finding in self.found)


def _of_node(args, here):
    """What one process can say of its node before the job begins."""
    yield checks.check_place(here)
    yield checks.check_gpus(args.enable_gpu, here, checks.cards())
    yield checks.check_driver(args.enable_gpu)
    if here.world_size > 1:
        yield checks.check_interface(here, os.environ)
    if here.node_rank == 0 or args.ledger:  # nobody else writes
        yield stores.check_output([args.output_dir, args.checkpoint_dir, args.tensorboard_dir])
        yield stores.check_disk("disk", args.output_dir, 0, "the results")
    if here.node_rank == 0 and args.output_url:
        yield from stores.check_bucket(args.output_url, "output", writes=True)
    if bucket.is_address(args.input.address):
        yield from stores.check_bucket(args.input.address, "data", fetches=args.input.fetched)
    elif args.input.address:
        yield stores.check_web(args.input.address)


def encode(found):
    return [[node, finding.severity, finding.what, finding.found, finding.do] for node, finding in found]


def decode(found):
    """What another process says, made harmless for a terminal."""
    return [(node, Finding(*(one_line(word)[:1000] for word in words))) for node, *words in found]
