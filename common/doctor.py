"""The examination of a job before it starts: what ruins runs, on every node, in one table, the worst first.

    python -m launch doctor jobs/train_ddp.py -- --data_url ...      or --doctor true behind the job's own arguments

Each node looks at itself (checks.py). Then the nodes meet as they would for the training, only that nobody waits long; the
ranks begin the job, load its data, take a few steps whose result is thrown away, and end. Nothing of a run is written.
"""

import datetime
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
import traceback

import torch
from torch import distributed

from common import bucket, channel, checkpoint, checks, errors, pulse, storage_checks, trial, world
from common.errors import UserError, is_victim, one_line
from common.findings import BAD, Finding, bad, count, doubtful, good, refusal, spans, table

FOLDER = "ANYRANK_DOCTOR"  # set by the doctor of a node for its ranks: where rank 0 leaves what they have found
KEYS = "anyrank/doctor"


def begin(args):
    """Look at this node, and from here on turn a failure into a line of the table; once in a process."""
    if of_this_process() is None:
        begin.examination = Examination(args)
        begin.examination.look_at_node()


def of_this_process():
    return getattr(begin, "examination", None)


class Examination:
    """What is found, as (node or None for the whole job, Finding)."""

    def __init__(self, args):
        self.args, self.here, self.found = args, None, []
        self._rate = self._store = None  # of an all-reduce; kept open until the end, others may still be reading
        errors.AT_FAILURE.append(self._at_failure)

    def look_at_node(self):
        if getattr(self.args, "evaluate", False):
            raise UserError("--doctor true looks at a training: leave --evaluate out")
        self.here = here = world.here(self.args)
        shm = checks.check_shm(*checks.shared_memory(self.args, here))
        if not pulse.has_parent() and not (here.level == "process" and here.local_rank):  # one process for each node
            for finding in (*_of_node(self.args, here), shm):
                self.add(finding, here.node_rank)
        self._loader_would_hang = shm.severity == BAD
        if self._loader_would_hang:
            self.args.workers = 0
        if not hasattr(self.args, "nproc_per_node"):
            self._end_without_data()

    def add(self, finding, node=None):
        self.found.append((node, finding))

    # --- The nodes, where the platform started a process on each ---

    def of_all_nodes(self, alike):
        """Meet the others, let the ranks try the job, show what everybody has found; the exit code."""
        from common.parent import Parent

        here, seconds = self.here, self.args.doctor_seconds
        parent = Parent(here, 0, seconds, alike)
        parent.hello["found"] = encode(self.found)
        with tempfile.TemporaryDirectory(prefix="anyrank-doctor-") as folder:
            os.environ[FOLDER] = os.path.join(folder, "found")
            try:
                code = parent.run()
            except UserError as error:
                self.add(self._not_met(error), here.node_rank)
                code = None
            for node, hello in parent.hub.hellos.items() if parent.hub else ():
                self.found += decode(hello.get("found") or [])
                self.add(checks.check_clock(hello["ahead"], "node 0"), node)
            if os.path.exists(os.environ[FOLDER]):
                with open(os.environ[FOLDER]) as file:
                    self.found += decode(json.load(file))
        if parent.stop_signal:
            return code
        if code is not None and here.node_rank == 0:
            self._add_met()
        if code:
            text, mistake = parent.verdict["text"], code == UserError.exit_code
            self.add(refusal("job", UserError(text)) if mistake else bad("job", text, "see the log of that rank"))
        if code is not None and here.node_rank:
            parent.say("what the doctor has found is in the log of node 0")
            return int(bool(code) or self._is_bad())
        return self.show()

    def _not_met(self, error):
        here, text = self.here, one_line(error)
        if "did not answer" in text:
            do = "see that node 0 was started, and that this port of it is open for the other nodes (security group, firewall)"
            return bad("master", text, do)
        if "did not come" in text:
            return bad("ranks", text, f"see that it was started and reaches port {here.master_port} of {here.master_addr}")
        return refusal("master" if "port" in text else "ranks", error)

    def _add_met(self):
        here = self.here
        self.add(good("ranks", f"all {here.world_size} on {count(here.num_nodes, 'node')} have come"))
        if here.num_nodes > 1:
            self.add(good("master", f"{here.master_addr}:{here.master_port} was reached from every node"))

    # --- The ranks, where the platform started each of them ---

    def meet(self):
        """Who is there, and by which clock: before the process group is made, which could only wait."""
        here, seconds = self.here, self.args.doctor_seconds
        if here.level == "node" or here.world_size == 1 or pulse.has_parent():
            return
        try:
            self._store = store = _store(here, seconds)
            if store.add(f"{KEYS}/claimed/{here.restart_count}/{here.rank}", 1) > 1:
                raise UserError(f"two processes say that they are rank {here.rank}; give each its own RANK")
        except UserError as error:
            if here.local_rank:
                raise
            self.add(self._not_met(error), here.node_rank)
            sys.exit(self.show())
        node = None if here.local_rank else here.node_rank
        store.set(f"{KEYS}/came/{here.rank}", json.dumps({"node": node, "found": encode(self.found)}))
        if here.rank:
            self._be_counted(store)
        else:
            self._count(store, time.monotonic() + seconds)

    def _be_counted(self, store):
        """Wait for rank 0, which waits for the others."""
        try:
            store.wait([f"{KEYS}/missing"], datetime.timedelta(seconds=2 * self.args.doctor_seconds))
            missing = json.loads(store.get(f"{KEYS}/missing"))
            store.set(f"{KEYS}/clock/{self.here.rank}", str(time.time()))
        except RuntimeError:
            raise UserError(f"rank 0 has said nothing for {2 * self.args.doctor_seconds:g} s; see its log") from None
        if missing:
            print(f"rank {self.here.rank}: what the doctor has found is in the log of rank 0", flush=True)
            sys.exit(1)

    def _count(self, store, deadline):
        here = self.here
        while True:
            missing = [rank for rank in range(1, here.world_size) if not store.check([f"{KEYS}/came/{rank}"])]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        store.set(f"{KEYS}/missing", json.dumps(missing))
        for rank in set(range(1, here.world_size)) - set(missing):
            theirs, ahead = json.loads(store.get(f"{KEYS}/came/{rank}")), float(store.get(f"{KEYS}/clock/{rank}")) - time.time()
            self.found += decode(theirs["found"])
            if theirs["node"]:
                self.add(checks.check_clock(ahead, "node 0"), theirs["node"])
        if not missing:
            return self._add_met()
        who = f"rank{'s' * (len(missing) > 1)} {spans(missing)}"
        self.add(self._not_met(f"{who} did not come within {self.args.doctor_seconds:g} s"))
        self.end()

    # --- The job ---

    def joined(self, device):
        """The process group is there: how fast is it between the nodes?"""
        if self.here.num_nodes > 1:
            self._rate = trial.all_reduce_rate(device)
        self._end_without_data()

    def _end_without_data(self):
        """Where they would have to be fetched first, there is nothing to measure yet."""
        if storage_checks.elsewhere(self.args)[1]:
            if self._rate:
                self.add(checks.check_network(self._rate, None, None, self.here.world_size))
            why = "not measured, the data would have to be fetched first"
            self.add(good("loader", f"{why}; --custom_data true measures the model on synthetic images"))
            self.end()

    def try_out(self, run, loader):
        """Batches for a few steps of the job; then the end."""
        args, here = self.args, self.here
        guard = threading.Timer(trial.HANG_SECONDS, self._hangs)
        guard.daemon = True
        guard.start()
        batch, load_seconds = trial.time_loader(loader, args.workers or 0, counts=not self._loader_would_hang)
        seconds = yield from trial.time_steps(run, batch)
        guard.cancel()
        sampler, samples = run.sampler, run.global_batch // run.world_size
        beside = loader.beside or bool(args.workers)
        self.add(checks.check_batches(sampler.num_samples, run.global_batch, run.world_size, args.epochs))
        if load_seconds:
            self.add(checks.check_loader(args, load_seconds, seconds, samples, beside, here.local_world_size))
        if self._rate:
            gradients = checkpoint.size_of([parameter for parameter in run.model.parameters() if parameter.requires_grad])
            self.add(checks.check_network(self._rate, gradients, seconds, run.world_size))
        gpus = torch.cuda.device_count() if loader.device.type == "cuda" else 1
        if gpus > 1 == run.world_size and not run.uses_all_gpus:
            self.add(doubtful("gpus", f"{gpus - 1} of {gpus} would stay idle", "start train_ddp.py, which uses all of them"))
        step_seconds = max(seconds, load_seconds) if beside else seconds + load_seconds
        self.add(checks.check_time(trial.steps_left(args, sampler) * step_seconds, checks.time_limit(args, os.environ)))
        self.add(storage_checks.check_disk("disk", args.output_dir, trial.room_to_save(run), "the checkpoints"), here.node_rank)
        self.end()

    # --- The end ---

    def _at_failure(self):
        """What stops the job is a line of the table, where this process has the table."""
        error = sys.exc_info()[1]
        if pulse.has_parent() or (self.here and self.here.level == "process" and self.here.rank):
            return  # it is said in the usual way
        if not isinstance(error, (UserError, errors.TrainingFailed)) and not is_victim(error):
            traceback.print_exc()
        self.add(refusal("job", error))
        self.end()

    def _hangs(self):
        text = f"the loader, or a step, is not done after {trial.HANG_SECONDS} s"
        faulthandler.dump_traceback()
        if pulse.has_parent():
            pulse.report_fault(text, 1, victim=False)
        else:
            self.add(bad("job", text, "see in the log where it is"))
            self.show()
        os._exit(1)

    def end(self):
        """Show the table, or hand what was found to the doctor of this node; no training."""
        code = 0
        if pulse.has_parent():
            if self.here.rank == 0:
                with open(os.environ[FOLDER], "w") as file:
                    json.dump(encode(self.found), file)
            pulse.of_this_process().set("done", 0)
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
        yield storage_checks.check_output([args.output_dir, args.checkpoint_dir, args.tensorboard_dir])
        yield storage_checks.check_disk("disk", args.output_dir, 0, "the results")
    if here.node_rank == 0 and args.output_url:
        yield from storage_checks.check_bucket(args.output_url, "output", writes=True)
    url, fetches = storage_checks.elsewhere(args)
    if bucket.is_address(url):
        yield from storage_checks.check_bucket(url, "data", fetches=fetches)
    elif url:
        yield storage_checks.check_web(url)


# --- Between processes --------------------------------------------------------------------------------------------------


def _store(here, seconds):
    """The keys and values that all ranks of the platform share; rank 0 has them, unless torchrun's agent does."""
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if here.rank and not theirs:
        channel.connect(here.master_addr, here.master_port, seconds, lambda text: None).close()
    try:
        return distributed.TCPStore(
            here.master_addr,
            here.master_port,
            is_master=here.rank == 0 and not theirs,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        where = f"{here.master_addr}:{here.master_port}"
        raise UserError(f"the ranks cannot meet at {where}, {one_line(error)[:200]}; see MASTER_ADDR and MASTER_PORT") from None


def encode(found):
    return [[node, finding.severity, finding.what, finding.found, finding.do] for node, finding in found]


def decode(found):
    """What another process says, made harmless for a terminal."""
    return [(node, Finding(*(one_line(word)[:1000] for word in words))) for node, *words in found]
