"""DpexDataLoader compared with torch's DataLoader: in the single process, with torch's workers and with Ray's."""

import collections
import inspect
import io
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, _DatasetKind, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.distributed import DistributedSampler

from common.errors import TrainingFailed, UserError
from datasets import imagenet
from datasets.dpex import DpexDataLoader, client, cluster, wire
from datasets.dpex.loader import RayIterator
from datasets.dpex.worker import EndOfStream, LoaderWorker
from datasets.photos import tree
from datasets.sampler import EpochSampler
from tests.tools.jobs import PATIENCE, ROOT, assert_same_bits, environment, wait_for
from tests.tools.ranks import LOOPBACK, listening, ports_of
from tests.tools.rayhosts import processes

Pair = collections.namedtuple("Pair", "one two")


class Squares(Dataset):
    def __init__(self, count=23):
        self.values = torch.arange(float(count)).square()

    def __len__(self):
        return len(self.values)

    def __getitem__(self, number):
        return self.values[number], number


class Everything(Squares):
    """Whatever a batch may consist of."""

    def __getitem__(self, number):
        image = torch.arange(48.0).view(1, 3, 4, 4).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)[0] + number
        return {
            "image": image, "name": f"sample {number}", "pair": Pair(torch.tensor(number), [torch.tensor(True), 1.5]),
            "array": np.full((2, 3), number), "none of it": torch.zeros(0, 3), "complex": torch.tensor(1j * number),
        }  # fmt: skip


class Random(Squares):
    def __getitem__(self, number):
        return torch.rand(2), np.random.rand(), random.random(), number


class Told(Squares):
    """What a worker knows of itself."""

    def __getitem__(self, number):
        about = get_worker_info()
        return (
            number,
            about.id,
            about.num_workers,
            about.seed,
            len(about.dataset),
            torch.initial_seed(),
            torch.get_num_threads(),
            os.getpriority(os.PRIO_PROCESS, 0),
        )


class Dies(Squares):
    """A sample that ends its worker, so many times."""

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times = str(folder), times

    def __getitem__(self, number):
        if number == 9 and len(os.listdir(self.folder)) < self.times:
            os.close(tempfile.mkstemp(dir=self.folder)[0])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Marks(Squares):
    """Writes down which process has made a sample, and gives each in the same memory."""

    def __init__(self, folder, size=1):
        super().__init__()
        self.folder, self.memory = folder, torch.zeros(size)

    def __getitem__(self, number):
        self.memory.fill_(number)
        (self.folder / str(number)).write_text(str(os.getpid()))
        return self.memory


class Stream(IterableDataset):
    def __init__(self, count=23, shared=False, noise=False):
        self.count, self.shared, self.noise = count, shared, noise

    def __iter__(self):
        about = get_worker_info()
        first, step = (about.id, about.num_workers + 1) if about and self.shared else (0, 1)
        for number in range(first, self.count, step):
            yield (number, torch.rand(1)) if self.noise else number


class Fails(Squares):
    def __getitem__(self, number):
        if number == 5:
            raise KeyError("no such picture")
        return super().__getitem__(number)


def add_hundred(worker):
    get_worker_info().dataset.values += 100 * (worker + 1)


def as_list(samples):
    return [samples, Pair(1, torch.ones(2))]


# name: (the data set, the loader's arguments, whether the single process gives the same)
TABLE = {
    "in order": (Squares, {"batch_size": 4}, True),
    "drop_last": (Squares, {"batch_size": 4, "drop_last": True}, True),
    "shuffle": (Squares, {"batch_size": 4, "shuffle": True}, True),
    "a batch_sampler": (Squares, {"batch_sampler": [[3, 1], [2], [0, 4, 5]]}, True),
    "no batches": (Squares, {"batch_size": None}, True),
    "a sampler": (Squares, {"batch_size": 3, "sampler": [5, 3, 8, 1]}, True),
    "a rank's sampler": (Squares, {"batch_size": 3, "sampler": DistributedSampler(range(23), 3, 1)}, True),
    "a collate_fn": (Squares, {"batch_size": 4, "collate_fn": as_list}, True),
    "a lambda": (Squares, {"batch_size": 4, "collate_fn": lambda samples: len(samples)}, True),
    "everything": (Everything, {"batch_size": 4}, True),
    "tensors": (lambda: TensorDataset(torch.arange(12).view(4, 3).t(), torch.arange(3)), {"batch_size": 2}, True),
    "further ahead": (Squares, {"batch_size": 2, "prefetch_factor": 4}, True),
    "empty": (lambda: Squares(0), {}, True),
    "global randomness": (Random, {"batch_size": 4}, False),
    "get_worker_info": (Told, {"batch_size": 4}, False),
    "worker_init_fn": (Squares, {"batch_size": 4, "worker_init_fn": add_hundred}, False),
    "a stream in every worker": (Stream, {"batch_size": 4}, False),
    "a stream shared out": (lambda: Stream(40, shared=True, noise=True), {"batch_size": 3}, False),
    "a stream without batches": (lambda: Stream(9, shared=True), {"batch_size": None}, False),
    "a stream, the last dropped": (Stream, {"batch_size": 4, "drop_last": True}, False),
}


@pytest.fixture(scope="module")
def warm():
    """Two workers that go from one loader of this file to the next, as from epoch to epoch of one: it saves their start."""
    kept = DpexDataLoader(Squares(), distribute_mode=True, head_address="local", num_workers=2)
    list(kept)
    yield kept._idle_workers
    del kept


def loader(warm, data, **how):
    made = DpexDataLoader(data, distribute_mode=True, head_address="local", num_workers=2, **how)
    made._idle_workers = warm
    return made


def in_this_process(how):
    """torch refuses to fetch ahead without workers."""
    return {name: value for name, value in how.items() if name != "prefetch_factor"}


@pytest.mark.parametrize("name", TABLE)
def test_three_modes_give_the_same_batches(warm, name):
    """Two epochs of each; they begin with the same seed, so that shuffling and the seeds of the workers are the same."""
    make, how, single = TABLE[name]
    makers = [lambda: loader(warm, make(), **how), lambda: DpexDataLoader(make(), distribute_mode=False, num_workers=2, **how)]
    makers += [lambda: DataLoader(make(), num_workers=2, **how)]
    makers += [lambda: DpexDataLoader(make(), distribute_mode=True, num_workers=0, **in_this_process(how))] if single else []
    results = []
    for maker in makers:
        torch.manual_seed(7)
        made = maker()
        results.append([list(made) for _ in range(2)])
        results[-1].append(torch.rand(1))  # and they leave the generator alike
        if not isinstance(made.dataset, IterableDataset):
            assert len(made) == len(results[-1][0])
    for others in results[1:]:
        assert_same_batches(results[0], others)


def assert_same_batches(one, other):
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    elif isinstance(one, torch.Tensor):
        assert one.stride() == other.stride()
        assert_same_bits(one, other)
    elif isinstance(one, dict):
        assert_same_batches(list(one.items()), list(other.items()))
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other) and len(one) == len(other)
        for pair in zip(one, other):
            assert_same_batches(*pair)
    else:
        assert_same_bits(one, other)


def test_what_talks_to_ray_imports_neither_torch_nor_ray_at_its_start():
    modules = ", ".join(f"datasets.dpex.{name}" for name in ("bridge", "pool", "cluster", "wire"))
    script = f"import {modules}, sys; print(*{{'torch', 'ray'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, env=environment(), text=True) == "\n"


def test_the_signature_is_that_of_the_article_and_torchs():
    """Without names they are torch's: in the article's order another loader's positional call would give other batches."""
    names = list(inspect.signature(DpexDataLoader).parameters)
    torchs = list(inspect.signature(DataLoader).parameters)
    assert names[:15] == [*torchs[:13], "distribute_mode", "head_address"]
    assert issubclass(DpexDataLoader, DataLoader) and isinstance(DpexDataLoader[torch.Tensor](Squares()), DpexDataLoader)
    torch.manual_seed(3)
    batches = list(DpexDataLoader(Squares(), 5, True))
    torch.manual_seed(3)
    assert_same_batches(batches, list(DataLoader(Squares(), 5, True)))
    for first in (True, False):
        with pytest.raises(UserError, match=f"give distribute_mode={first} by its name"):
            DpexDataLoader(Squares(), first, "auto")
    with pytest.raises(TypeError, match="batch_size"):
        DpexDataLoader(Squares(), True, "auto", batch_size=2)
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in multiprocessing"):
        DpexDataLoader(Squares(), distribute_mode=True, prefetch_factor=3)
    assert [DpexDataLoader(Squares(), num_workers=count).prefetch_factor for count in (0, 1)] == [None, 2]
    with pytest.raises(ValueError, match="mutually exclusive"):
        DpexDataLoader(Squares(), distribute_mode=True, shuffle=True, sampler=[1])
    with pytest.raises(UserError, match="neither 'local' nor 'stop'"):
        DpexDataLoader(Squares(), distribute_mode=True, num_workers=1, head_lost="hope")


def test_a_pass_that_begins_after_the_cluster_was_lost_stops_too_where_that_was_asked_for(monkeypatch):
    bridge = types.SimpleNamespace(loss_reason="it does not answer")
    monkeypatch.setattr("datasets.dpex.loader.get_bridge", lambda address: bridge)
    strict = DpexDataLoader(Squares(), distribute_mode=True, num_workers=1, head_lost="stop")
    said = "the Ray cluster is lost: it does not answer; head_lost='stop' was asked for"
    with pytest.raises(TrainingFailed, match=said):
        iter(strict)
    # With persistent workers the iterator of the pass before goes on; it lost its workers with the cluster.
    persistent = RayIterator.__new__(RayIterator)
    vars(persistent).update(_pass_number=0, _num_workers=1, _workers=None, _bridge=bridge, _stop_when_lost=True)
    monkeypatch.setattr("datasets.dpex.loader._BaseDataLoaderIter._reset", lambda *_: None)
    with pytest.raises(TrainingFailed, match=said):
        persistent._reset(strict)


def test_an_error_comes_in_its_place_with_the_workers_traceback_and_the_next_batches_follow(warm):
    batches, numbers = iter(loader(warm, Fails(12), batch_size=2)), []
    for place in range(6):
        if place == 2:
            with pytest.raises(KeyError, match="no such picture") as error:
                next(batches)
            assert "in __getitem__" in str(error.value) and "DataLoader worker process 0 (Ray, " in str(error.value)
        else:
            numbers += next(batches)[1].tolist()
    assert numbers == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11] and next(batches, None) is None


def refuse(worker):
    raise ValueError(f"worker {worker} will not")


class Holds(Squares):
    def __init__(self, thing):
        super().__init__()
        self.thing = thing


class Unpicklable(Squares):
    def __getitem__(self, number):
        return (value for value in ())


@pytest.mark.parametrize(
    "data, how, kind, words",
    [
        (Squares(), {"worker_init_fn": refuse}, ValueError, "worker 0 will not"),
        (Unpicklable(), {"batch_size": None}, TypeError, "generator"),
        (
            Holds(multiprocessing.Value("i")),
            {},
            UserError,
            "cannot be sent to the Ray cluster: Synchronized objects .+ distribute",
        ),
        (Holds(multiprocessing.Lock()), {}, UserError, "Lock objects should only be shared between processes"),
        (Holds(threading.Lock()), {}, UserError, "cannot pickle '_thread.lock' object; leave out"),
    ],
)
def test_what_cannot_work_says_why(warm, data, how, kind, words):
    with pytest.raises(kind, match=words):
        list(loader(warm, data, **how))


class Slow(Squares):
    def __getitem__(self, number):
        if number == 3:
            time.sleep(30)
        return number


def test_a_batch_that_takes_too_long_is_an_error_but_the_start_of_the_workers_is_none():
    batches = iter(DpexDataLoader(Slow(), distribute_mode=True, head_address="local", num_workers=1, timeout=PATIENCE))
    assert [next(batches).item() for _ in range(3)] == [0, 1, 2]
    batches._timeout = 2
    with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
        next(batches)


class Counts(Squares):
    """How often its copy was begun, and asked."""

    asked = 0

    def __getitem__(self, number):
        self.asked += 1
        return self.asked, os.getpid()


def test_persistent_workers_keep_their_copy_and_others_begin_anew(warm):
    def asked(made):
        return [[number.tolist() for number, _ in made] for _ in range(2)]

    again = [[[1, 2], [1, 2], [3, 4], [3, 4]]] * 2
    assert asked(loader(warm, Counts(8), batch_size=2)) == again
    kept = asked(loader(warm, Counts(8), batch_size=2, persistent_workers=True))
    assert kept == asked(DataLoader(Counts(8), batch_size=2, num_workers=2, persistent_workers=True)) != again


def test_a_stream_without_an_end_can_be_left_and_begun_again(warm):
    """With workers that stay, whose second pass is a new one over the same copy."""
    made = loader(warm, Stream(10**9), batch_size=2, persistent_workers=True)
    for _ in range(2):
        for number, batch in enumerate(made):
            assert batch.tolist() == [number // 2 * 2, number // 2 * 2 + 1]
            if number == 5:
                break


def test_a_data_set_that_changed_between_two_epochs_is_sent_again(warm):
    data = Squares(4)
    made = loader(warm, data)
    assert [value.item() for value, _ in made] == [0, 1, 4, 9]
    data.values += 1
    assert [value.item() for value, _ in made] == [1, 2, 5, 10]


def test_a_worker_that_is_killed_is_replaced_and_every_batch_comes_in_its_place(warm, tmp_path):
    with pytest.warns(UserWarning, match="made again"):
        numbers = [number.tolist() for _, number in loader(warm, Dies(tmp_path, times=1), batch_size=4)]
    assert numbers == [list(range(first, min(first + 4, 23))) for first in range(0, 23, 4)]
    assert len(os.listdir(tmp_path)) == 1, "no worker was killed"


@pytest.mark.rehearsal
def test_a_sample_that_kills_every_worker_is_an_error(warm, tmp_path):
    with pytest.warns(UserWarning, match="made again"), pytest.raises(RuntimeError):
        list(loader(warm, Dies(tmp_path, times=100)))
    assert len(list(loader(warm, Squares()))) == 23, "the next pass has other workers"


def test_two_passes_at_once_and_one_that_was_left():
    made = DpexDataLoader(Squares(), distribute_mode=True, head_address="local", batch_size=4, num_workers=1)
    for (one, _), (other, _) in zip(made, made):
        assert torch.equal(one, other)
    for _ in made:
        break
    assert [numbers.tolist()[0] for _, numbers in made] == [0, 4, 8, 12, 16, 20]


def test_a_batch_is_the_readers_own_to_write_into(warm):
    made = loader(warm, Everything(), batch_size=4)
    first = next(iter(made))
    first["image"].add_(1)
    first["array"].mul_(2)
    again = next(iter(made))
    assert torch.equal(first["image"], again["image"] + 1) and torch.equal(first["array"], 2 * again["array"])


def test_a_data_set_may_write_into_what_it_has_given(warm, tmp_path):
    batches = iter(loader(warm, Marks(tmp_path), batch_size=None))
    first = next(batches)
    wait_for(lambda: (tmp_path / "4").exists(), None, "the third sample of the first worker")
    assert torch.cat([first, *batches]).tolist() == list(range(23))


def test_batches_of_a_worker_that_is_killed_before_they_are_read_are_made_again(warm, tmp_path):
    batches = iter(loader(warm, Marks(tmp_path), batch_size=None))
    first = next(batches)
    wait_for(lambda: (tmp_path / "3").exists(), None, "the second sample of the second worker")
    os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
    with pytest.warns(UserWarning, match="made again"):
        assert torch.cat([first, *batches]).tolist() == list(range(23))


def test_after_the_loss_of_a_worker_a_slow_reader_has_its_batches(tmp_path):
    """They are not made in the order in which they are read."""
    made = DpexDataLoader(Marks(tmp_path, 100_000), None, distribute_mode=True, head_address="local", num_workers=1)
    found, batches = [], iter(made)
    with pytest.warns(UserWarning, match="made again"):
        for batch in batches:
            found += batch.unique().tolist()
            ahead = tmp_path / str(batches._pass.next_request - 1)
            wait_for(ahead.exists, None, "the batches that are fetched ahead")
            if len(found) == 1:
                os.kill(int(ahead.read_text()), signal.SIGKILL)
    assert found == list(range(23))


def require_shown_memory():
    if not client.get_bridge("local").shows_memory():
        pytest.skip("this system shows no process the memory of another")


@pytest.mark.parametrize("shown", [True, False])
def test_batches_are_copied_out_of_the_workers_memory_or_come_through_a_socket(warm, monkeypatch, shown):
    if shown:
        require_shown_memory()
    copies = []
    monkeypatch.setattr(client, "copy_parts", lambda left: copies.append(left) or wire.copy_parts(left))
    if not shown:
        monkeypatch.setattr(client, "open_memory", lambda process: io.FileIO(f"/no/such/folder/{process}"))
    assert_same_batches(list(loader(warm, Everything(), batch_size=4)), list(DataLoader(Everything(), batch_size=4)))
    assert len(copies) == (6 if shown else 0)


def test_a_pass_that_was_interrupted_while_it_read_a_batch_leaves_the_next_one_whole(warm, monkeypatch):
    def interrupted(left):
        raise KeyboardInterrupt

    require_shown_memory()
    made = loader(warm, Squares(), batch_size=4)
    monkeypatch.setattr(client, "copy_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(made))
    monkeypatch.setattr(client, "copy_parts", wire.copy_parts)
    assert [numbers.tolist()[0] for _, numbers in made] == list(range(0, 23, 4))


def test_a_worker_that_replaces_a_lost_one_goes_on_where_that_was_and_can_go_back(monkeypatch):
    """Of a stream it makes the same batches, in whatever pass; of another data set it draws anew."""
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    threads = torch.get_num_threads()

    def fetched(worker, data, index, places, epoch=1):
        kind = _DatasetKind.Iterable if isinstance(data, IterableDataset) else _DatasetKind.Map
        task = {"dataset": data, "kind": kind, "auto_collation": True, "collate_fn": default_collate, "drop_last": False,
                "worker_init_fn": None, "num_workers": 1, "folder": os.getcwd(), "any_index": index}  # fmt: skip
        how = lambda: wire.pack(task).parts, 0, 7, epoch
        answers = [worker.fetch(wire.pack(index).parts, *how, *place) for place in places]
        return [wire.unpack(list(map(bytearray, packed))) for packed in answers]

    # The second pass over the stream was left after two batches.
    places = [
        *(((), place) for place in range(3)),
        *(((3,), place) for place in range(2)),
        *(((3, 2), place) for place in range(3)),
    ]
    stream = Stream(10**9, noise=True)
    expected = fetched(LoaderWorker(is_replacement=False), stream, [0] * 4, places)
    assert [batch[0].tolist()[0] for batch in expected] == [0, 4, 8, 0, 4, 0, 4, 8]
    replacement = LoaderWorker(is_replacement=True)
    for at in (6, 7, 4, 0, 5):
        assert_same_bits(fetched(replacement, stream, [0] * 4, places[at : at + 1]), expected[at : at + 1])
    assert isinstance(fetched(replacement, Stream(12), [0] * 4, [((), 3)], epoch=2)[0], EndOfStream)
    draws = [fetched(LoaderWorker(is_replacement=again), Random(), [1, 2], [((), 0)])[0][0] for again in (False, False, True)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    draws = [fetched(replacement, Random(), [1, 2], [((), 0)], epoch=3)[0][0]]
    assert torch.equal(draws[0], fetched(LoaderWorker(is_replacement=False), Random(), [1, 2], [((), 0)])[0][0]), (
        "that is of one epoch alone"
    )
    torch.set_num_threads(threads)


def test_out_of_order_where_that_was_asked(warm):
    made = loader(warm, Squares(), batch_size=2, in_order=False)
    assert sorted(number for _, numbers in made for number in numbers.tolist()) == list(range(23))


def test_a_batch_that_is_about_to_be_given_is_not_left_out_where_the_cluster_is_lost(warm, monkeypatch):
    made = loader(warm, Squares(), batch_size=2)
    batches = iter(made)
    found = [next(batches)]

    def lost(*_):
        raise client.ClusterLost

    monkeypatch.setattr(client.Workers, "fetch", lost)
    monkeypatch.setattr(client.get_bridge("local"), "loss_reason", "the test cuts it off")
    with pytest.warns(UserWarning, match="the test cuts it off"):
        found += batches
    assert torch.cat([numbers for _, numbers in found]).tolist() == list(range(23))


# --- What is left of it ----------------------------------------------------------------------------------------------------


SCRIPT = """
import gc, os, sys, threading
from tests.datasets.dpex.test_dpex import Squares
from datasets.dpex import DpexDataLoader, client
from datasets.sampler import EpochSampler

kept = DpexDataLoader(Squares(), distribute_mode=True, head_address="local", num_workers=1)
for number in range(20):
    made = DpexDataLoader(Squares(), distribute_mode=True, head_address="local", num_workers=1)
    if number % 5 == 0:
        assert len(list(made)) == 23
    if number == 5:
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before
process = client.get_bridge("local").process
assert process.poll() is None
del made, kept
gc.collect()
assert process.poll() is not None
again = DpexDataLoader(Squares(), distribute_mode=True, head_address="local", num_workers=1)
assert len(list(again)) == 23 and client.get_bridge("local").process.pid != process.pid
"""


@pytest.mark.rehearsal
def test_of_20_loaders_nothing_is_left():
    """Their workers end with them, with the last of them the bridge process, and with that the cluster and its folder."""
    folder = tempfile.mkdtemp(prefix="dpex")  # a short name: Ray's sockets are in it
    script = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(script, cwd=ROOT, env=environment(TMPDIR=folder), capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")  # also of the bridge processes: a traceback at their end would stand there
    wait_for(lambda: not [words for _, _, words in processes() if folder in words], None, "end of all processes")
    wait_for(lambda: not [name for name in os.listdir(folder) if name.startswith("anyrank")], None, "empty folder")


def test_our_own_cluster_listens_on_the_loopback_alone_and_requires_a_token(warm, tmp_path):
    """Every port that Ray's processes listen on, as the kernel says; and a client without the token is refused."""
    bridge = client.get_bridge("local")
    parents = {pid: parent for pid, parent, _ in processes()}
    own = [pid for pid, parent in parents.items() if bridge.process.pid in (pid, parent, parents.get(parent))]
    assert len(own) > 5 and int(bridge.address.rpartition(":")[2]) in ports_of(own)
    assert listening(own) <= {LOOPBACK, f"0000000000000000FFFF0000{LOOPBACK}"}
    script = f"import ray; ray.init(address='{bridge.address}')"
    words = [sys.executable, "-c", script]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(**cluster.LOOPBACK_VARIABLES), stderr=subprocess.PIPE, text=True
    ) as client_process:
        said = next((line for line in client_process.stderr if "Unauthenticated" in line or "AuthToken" in line), "")
        refused = client_process.poll() is None or client_process.returncode  # it would try for a minute
        client_process.kill()
    assert said and refused


@pytest.mark.parametrize("consumed", [pytest.param(0, marks=pytest.mark.rehearsal), 12])
def test_the_flagships_photographs_come_in_the_same_order_to_the_same_bits_also_from_the_middle(
    tmp_path, monkeypatch, consumed
):
    """--data_backend dpex on rank 1 of 2, compared with the pytorch backend."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    draw = np.random.default_rng(0)
    for number in range(30):
        where = tmp_path / "train" / f"class{number % 3}"
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (40 + number, 60, 3), dtype=np.uint8)).save(where / f"{number}.jpg")
    data = imagenet.Photos(tree.load("train"), 32, True, seed=0)  # a relative path, which Ray's workers have to find, too
    results = []
    for backend in ("pytorch", "dpex"):
        sampler = EpochSampler(len(data), 3, seed=5)
        sampler.shard(1, 2)
        sampler.start_at(2, consumed)
        loader = imagenet.loader(data, sampler, torch.device("cpu"), 2, backend)
        results.append([(loader.ids.tolist(), images, labels) for images, labels in loader])
    assert len(results[0]) == (30 - consumed) // 6
    assert_same_batches(*results)
