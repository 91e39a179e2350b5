"""What stands between the batches and the network: the thread that works ahead, the phases of the log, memory over epochs."""

import contextlib
import errno
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
import types

import numpy as np
import pytest
import torch
from PIL import Image

from common import arguments, devices
from common.errors import SampleError, TrainingFailed, UserError, is_victim
from common.machine import cores
from common.run import clock, timing
from common.run.observers import console
from datasets import cifar10, imagenet
from datasets.facade import Dataset, resident_bytes
from datasets.kspeed import samples
from datasets.loader import DeviceLoader, SampleLoader, TransferClock, read_ahead, torch_batches
from datasets.packs import packed
from datasets.photos import labelled, tree
from datasets.sampler import EpochSampler, InOrder
from jobs import train_imagenet, train_restore
from launch.pack import command as pack
from tests.tools.jobs import PATIENCE, assert_same_bits, in_rehearsal
from tests.tools.memcached import Memcached

CPU = torch.device("cpu")


# --- Samples of any data set ---------------------------------------------------------------------------------------------


class Words(torch.utils.data.Dataset):
    """Texts of different lengths, with something drawn for each."""

    def __len__(self):
        return 20

    def __getitem__(self, number):
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return {"text": "a" * number, "letters": torch.arange(number), "drawn": drawn}


def padded(samples):
    letters = torch.nn.utils.rnn.pad_sequence([sample["letters"] for sample in samples], batch_first=True)
    return {"letters": letters, "texts": [sample["text"] for sample in samples], "drawn": [one["drawn"] for one in samples]}


def loaded(epoch, consumed=0, workers=0, data_set=None, beside=False):
    """(batch, ids) of the rest of an epoch."""
    sampler = EpochSampler(20, 4, seed=3)
    sampler.start_at(epoch, consumed)
    loader = SampleLoader(data_set or Words(), sampler, CPU, workers, padded)
    loader.beside = beside
    return [(batch, loader.ids.tolist()) for batch in loader]


def test_samples_of_any_data_set_come_in_the_order_of_the_sampler_as_their_collate_fn_makes_them():
    state = random.getstate(), torch.get_rng_state()
    found = loaded(epoch=1)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])  # it draws nothing from the process
    sampler = EpochSampler(20, 4, seed=3)
    sampler.start_at(1, 0)
    assert [ids for _, ids in found] == [ids.tolist() for ids in sampler]
    for batch, ids in found:
        assert batch["texts"] == ["a" * number for number in ids]
        assert batch["letters"].shape == (4, max(ids)) and batch["letters"].max() == max(ids) - 1
    assert_same_bits([list(one) for one in loaded(1, consumed=8)], [list(one) for one in found[2:]])  # and so after a restart
    for beside in (False, True):  # on a GPU the workers are children of the thread that works ahead
        assert_same_bits([list(one) for one in loaded(1, workers=2, beside=beside)], [list(one) for one in found])
    assert [batch["drawn"] for batch, _ in loaded(2)] != [batch["drawn"] for batch, _ in found]


@pytest.mark.parametrize("draws", [True, False])
def test_a_data_set_that_draws_beside_the_steps_is_told_once_and_only_it(capsys, draws):
    """As on a GPU, where a thread works ahead and the generators are those of the step."""

    class Numbers:
        def __getitem__(self, epoch_and_ids):
            kept.append(torch.get_rng_state())  # equal states may lie at different addresses
            return epoch_and_ids[1] + (np.random.randint(3) if draws else 0)

    kept: list = []
    batches = torch_batches(Numbers(), EpochSampler(8, 2, seed=0))
    assert len(list(read_ahead((batch for batch in batches), 1))) == 4
    assert capsys.readouterr().out.count("warning: the data set draws random numbers in the process that trains") == draws


@pytest.mark.parametrize(
    ("collate_fn", "sample", "part"),
    [
        (list, "sample 7", r"\[2\]\['file'\] of its batch is a lock;"),
        (
            lambda samples: {"files": [each["file"] for each in samples]},
            "sample 7",
            r"\['files'\]\[2\] of its batch is a lock;",
        ),
        (lambda samples: [0, [each["file"] for each in samples]], "sample 7", r"\[1\]\[2\] of its batch is a lock;"),
        (lambda samples: threading.Lock(), r"one of samples \d+, \d+, \d+, \d+", "the batch is a lock;"),
        (lambda samples: torch.ones(1, requires_grad=True) * 2, r"one of samples .*", "the batch is a Tensor;"),
    ],
    ids=["samples as they are", "by name", "in a list", "in its collate_fn", "a tensor that was computed"],
)
def test_what_a_loader_process_cannot_send_is_named(collate_fn, sample, part):
    class Files(Words):
        def __getitem__(self, number):
            return {"file": threading.Lock() if number == 7 else number}

    sampler = EpochSampler(20, 4, seed=3)
    sampler.start_at(1, 0)
    loader = SampleLoader(Files(), sampler, CPU, 1, collate_fn)
    batches = iter(loader)
    with pytest.raises(UserError, match=rf"{sample}: a loader process cannot send a batch \(.*\): {part}"):
        list(batches)


def test_an_error_that_a_loader_process_cannot_send_ends_the_job(monkeypatch):
    class Broken(Words):
        def __getitem__(self, number):
            raise OSError(errno.EIO, "the disk is broken", threading.Lock())

    loader = SampleLoader(Broken(), EpochSampler(20, 4, seed=3), CPU, 1)
    with pytest.raises(TrainingFailed, match=r"a loader process cannot send a batch \(.*\): give --workers 0"):
        list(loader)


def test_a_data_set_that_gives_many_samples_at_once_is_asked_once_for_each_batch():
    class Table(Words):
        asked = 0

        def __getitems__(self, numbers):
            self.asked += 1
            return [self[number] for number in numbers]

    table = Table()
    assert_same_bits([list(one) for one in loaded(1, data_set=table)], [list(one) for one in loaded(1)])
    assert table.asked == 5


# --- Working ahead -----------------------------------------------------------------------------------------------------


def working():
    return [thread for thread in threading.enumerate() if thread.name == "batches ahead"]


def counted(count, asked, fails_at=None):
    for number in range(count):
        asked.append(number)
        if number == fails_at:
            raise OSError("the disk is gone")
        yield number


def test_ahead_gives_the_same_in_order_and_leaves_no_thread():
    assert list(read_ahead(counted(50, []), 3)) == list(range(50))
    assert not working()


def test_what_is_made_ahead_is_made_by_one_thread_and_the_training_keeps_its_own():
    mine = torch.get_num_threads()
    torch.set_num_threads(2)
    later = []
    try:
        assert list(read_ahead((torch.get_num_threads() for _ in range(3)), 1)) == [1, 1, 1]
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(mine)


def test_ahead_works_no_further_ahead_than_it_may():
    asked, reached = [], threading.Event()

    def items():
        for number in counted(50, asked):
            if number == 3:
                reached.set()
            yield number

    found = read_ahead(items(), 3)
    assert next(found) == 0
    assert reached.wait(PATIENCE) and len(asked) <= 5  # one is with us, three wait, one may be on its way
    found.close()
    assert not working() and len(asked) <= 5


@pytest.mark.parametrize("place", [0, 7])
def test_what_fails_ahead_is_raised_in_its_place(place):
    found = read_ahead(counted(50, [], place), 3)
    assert [next(found) for _ in range(place)] == list(range(place))
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    assert not working()


class Numbers:
    def __iter__(self):
        for number in range(5):
            yield torch.full((2, 3, 4, 4), number, dtype=torch.uint8), torch.tensor([number, number]), torch.tensor([number, 9])


@pytest.mark.parametrize("beside", [False, True])
def test_the_ids_are_those_of_the_batch_that_was_given(beside):
    """Also where a thread has gone on to later ones."""
    loader = DeviceLoader(Numbers(), EpochSampler(10, 2, seed=0), CPU, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), dtype=torch.float16)
    loader.beside = beside
    for number, (images, labels) in enumerate(loader):
        assert loader.ids.tolist() == [number, 9] and labels.tolist() == [number, number]
        assert images.dtype == torch.float16 and torch.allclose(
            images.float(), torch.tensor((number / 255 - 0.5) / 0.25), atol=2e-3
        )
    assert loader.transfer_seconds() > 0 and loader.transfer_seconds() == 0
    assert not working()


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_batches_have_the_layout_that_was_asked_for_however_they_are_stored(layout):
    pixels = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    for stored in (torch.channels_last, torch.contiguous_format):
        batches = [(pixels.contiguous(memory_format=stored), torch.zeros(2), torch.arange(2))]
        loader = DeviceLoader(batches, EpochSampler(2, 2, seed=0), torch.device("cpu"), [0.0] * 3, [1.0] * 3, layout=layout)
        ((images, _),) = loader
        assert images.is_contiguous(memory_format=layout) and torch.equal(loader.pixels(images), pixels)


def test_seconds_are_read_and_added_under_one_lock(monkeypatch):
    """The thread that loads adds to them while the training reads them: an addition between the two lines of a read is lost."""

    class Watched(TransferClock):
        touched: list = []

        @property
        def _seconds(self):
            self.touched.append(self._events_lock.locked())
            return 0.0

        @_seconds.setter
        def _seconds(self, _):
            if hasattr(self, "_events_lock"):
                self.touched.append(self._events_lock.locked())

    clock = Watched(CPU)
    event = types.SimpleNamespace(query=lambda: True, elapsed_time=lambda _: 5)
    clock._events.append((event, event))
    clock.read()
    assert clock.touched and all(clock.touched)


class Leaves:
    """A data set that ends the process at sample 5."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        if number == 5:
            sys.exit(3)
        return torch.tensor(number)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_ends_the_process_is_an_error_that_names_the_sample(workers):
    loader = SampleLoader(Leaves(), EpochSampler(8, 4, seed=0), CPU, workers)
    with pytest.raises(SampleError, match="sample 5: SystemExit: 3"):
        list(loader)


# --- The processes that load --------------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    """Which cannot be read where that is asked for."""

    def __init__(self, broken):
        self.broken = broken

    def __getitem__(self, epoch_and_ids):
        if self.broken:
            raise ValueError("no picture")
        return torch.zeros(1)


@pytest.fixture
def circles(monkeypatch):
    """Nothing in a circle is found but by gc.collect(); torch waits a tenth of a second, not five, for a process to end."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("broken", [True, False])
def test_no_process_outlives_its_loader(circles, broken):
    """What the garbage collector finds can no longer tell them to end; they ignore SIGTERM, and Python would wait for ever."""
    loader = torch_batches(Samples(broken), InOrder(4, 1), workers=1)
    if broken:
        with pytest.raises(SampleError, match="no picture"):
            list(loader)
    else:
        assert len(list(loader)) == 4
        loader.itself = loader
        assert multiprocessing.active_children()
    del loader
    gc.collect()
    for process in multiprocessing.active_children():  # one that was killed needs a moment
        process.join(PATIENCE)
    assert not multiprocessing.active_children()


def test_a_loader_goes_on_after_a_broken_sample(circles):
    samples = Samples(True)
    loader = torch_batches(samples, InOrder(4, 1), workers=1)
    with pytest.raises(SampleError):
        list(loader)
    samples.broken = False
    assert len(list(loader)) == 4


class Dies(Samples):
    def __getitem__(self, number):
        os.kill(os.getpid(), self.broken)


@pytest.mark.parametrize("number, how", [(signal.SIGKILL, "Killed"), (signal.SIGBUS, "Bus error")])
def test_a_dead_loader_process_is_said_with_its_signal(number, how):
    """Also where torch finds the process dead before the system tells it of that, and then knows nothing of the signal."""
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid \d+\) is killed by signal: {how}\."):
        list(torch_batches(Dies(number), InOrder(4, 1), workers=1))


# --- Phases ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def now(at):
    return at([100.0], clock)


def take_a_step(told, now, waiting, computing):
    for phase, seconds in (("data", waiting), ("step", computing)):
        told.enter(phase, 0)
        now[0] += seconds


def test_the_clock_adds_up_each_phase_between_two_lines_of_the_log(now):
    told, trained = clock.Clock(), 0
    told.begin_epoch()
    for number in range(4):
        take_a_step(told, now, 0.75, 1.0)
        told.add_transfer(0.25, overlaps=False)  # of the time that was taken for waiting
        trained += 8
        assert told.count_step(8, trained) == (number == 0 or now[0] >= 100 + 1.75 + clock.LINE_SECONDS)
        if number == 0:
            assert told.lap()["images_per_s"] == pytest.approx(8 / 1.75)
    told.enter("save", 4)  # what is shown and written is no part of the speed
    now[0] += 100
    shares = {"waiting_for_data": 0.5 / 1.75, "transfer": 0.25 / 1.75, "compute": 1 / 1.75}
    assert told.lap() == pytest.approx({"images_per_s": 8 / 1.75, **shares})
    assert told.read() == pytest.approx(
        {
            "waiting_for_data": 2,
            "transfer": 1,
            "compute": 4,
            "evaluation": 0,
            "saving": 100,
            "paused": 0,
            "waiting_for_storage": 0,
            "training": 7,
        }
    )


def test_a_line_of_the_log_is_due_after_the_first_step_of_an_epoch_then_after_so_many_or_some_seconds(now):
    told = clock.Clock(line_every=3)
    due = []
    for number in range(7):
        due.append(told.count_step(8, 8 * number))
        if due[-1]:
            told.lap()
    assert due == [True, False, False, True, False, False, True]
    told.begin_epoch()
    assert told.count_step(8, 64)
    told = clock.Clock()
    assert told.count_step(8, 8) and told.lap() and not told.count_step(8, 16)
    told.enter("save", 2)
    now[0] += clock.LINE_SECONDS
    assert not told.count_step(8, 24), "of training"
    take_a_step(told, now, 0, clock.LINE_SECONDS)
    assert told.count_step(8, 32)


def test_a_transfer_beside_the_computing_takes_no_time_of_its_own(now):
    told = clock.Clock()
    take_a_step(told, now, 0.5, 1.5)
    told.add_transfer(1.0, overlaps=True)
    assert told.read()["training"] == 2 and told.lap()["transfer"] == 0.5


def test_a_profile_leaves_the_warm_up_out(now, monkeypatch):
    finished, told = [], clock.Clock()
    monkeypatch.setattr(timing.devices, "synchronize", lambda _: finished.append(now[0]))
    profile = timing.Profile(4, EpochSampler(16, 16, seed=0), torch.device("cpu"), told)
    lines = []
    for step in range(timing.WARM_UP + 4):
        take_a_step(told, now, *((50, 50) if step < timing.WARM_UP else (0.5, 1.5)))
        lines.append(profile.after_step(step + 1))
    assert lines[:-1] == [None] * (timing.WARM_UP + 3)
    expected = "Training speed was 8.0 images/s over 4 steps: 25% waiting for data, 0% transfer, 75% compute"
    assert lines[-1] == expected and len(finished) == 2  # the device has done its work at both ends


@pytest.mark.parametrize(
    "job, options, waiting, words, others",
    [
        (train_imagenet, ["--workers", "0"], 0.6, ["waited for data 60%", "--workers", "launch pack", "dali-gpu"], []),
        (train_imagenet, ["--data_backend", "packed", "--workers", "256"], 0.3, ["waited for data 30%", "dali-gpu"], ["pack,"]),
        (train_imagenet, ["--data_backend", "packed-remote"], 0.25, ["waited for data 25%", "dali-gpu"], ["pack,"]),
        (train_restore, [], 0.6, ["dali-gpu"], ["pack,"]),
        (train_imagenet, [], 0.2, None, []),
        (train_imagenet, ["--data_backend", "synthetic"], 0.9, None, []),
    ],
)
def test_advice_is_given_where_the_loader_holds_the_network_up(job, options, waiting, words, others):
    """And none that this job would refuse."""
    args = arguments.parse(job.options(), options, {})
    line = console.advice(args.input.remedies, waiting)
    assert (line is None) == (words is None)
    assert all(word in line for word in words or []) and not any(word in line for word in others)


def test_no_advice_where_nothing_can_be_done(monkeypatch):
    monkeypatch.setattr(cores, "count", lambda: 1)
    assert console.advice(arguments.parse(cifar10.parser(""), ["--workers", "1"], {}).input.remedies, 0.9) is None


def test_two_threads_may_read_the_clock():
    """The one that loads and the one that trains; without a lock both would take the same event out of the list."""
    clock, both, failed = TransferClock(CPU), threading.Barrier(2), []

    class Event:
        def query(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)  # for the other thread, which a lock keeps out
            return True

        def elapsed_time(self, _end):
            return 1000

    def read():
        try:
            clock.read()
        except IndexError as error:
            failed.append(error)

    clock._events.append((Event(), Event()))
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --- The facade, and memory ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for number in range(40):
        where = root / ("train" if number < 30 else "val") / f"class{number % 3}"
        where.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (6, 8, 3), dtype=np.uint8).repeat(9, axis=0).repeat(8, axis=1)
        Image.fromarray(pixels).save(where / f"{number}.jpg", quality=92)
    return root


def everything(loader):
    return [(loader.ids.tolist(), labels.tolist(), images.clone()) for images, labels in loader]


@pytest.mark.parametrize("use_dali", [False, True])
def test_the_facade_of_the_article(folder, tmp_path, monkeypatch, use_dali):
    monkeypatch.chdir(tmp_path)
    how = {"size": 24, "val_size": 32, "val_batch_size": 4, "workers": 1, "cuda": False, "min_crop_size": 0.5}
    data = Dataset(str(folder), 8, use_dali=use_dali, fp16=True, **how)
    assert (data.get_nb_train(), data.get_nb_val(), data.get_nb_classes()) == (30, 10, 3)
    loader = data.get_train_loader()
    first, again = everything(loader), everything(loader)
    assert len(loader) == len(first) == 4 and first[0][2].dtype == torch.float16
    assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(first, again))
    data.reset()
    assert [batch[0] for batch in everything(data.get_train_loader())] != [batch[0] for batch in first]
    data.prep_for_val()
    val = everything(data.get_val_loader())
    assert [number for ids, _, _ in val for number in ids] == list(range(10)) and len(val[-1][0]) == 2
    assert val[0][2].shape == (4, 3, 24, 24)
    data.set_train_batch_size(15)
    assert len(data.get_train_loader()) == 2
    plain = Dataset(str(folder), 8, mean=[0, 0, 0], std=[255, 255, 255], **how)
    mine = everything(plain.get_train_loader())
    assert [batch[:2] for batch in mine] == [batch[:2] for batch in first]
    std = torch.tensor(imagenet.STD).view(3, 1, 1)
    mean = torch.tensor(imagenet.MEAN).view(3, 1, 1)
    assert (first[0][2].float() * std + mean - mine[0][2]).abs().mean() < 2 / 255  # two decoders, and half precision


def test_clearing_memory_says_what_it_gave_back(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = Dataset(str(folder), 8, size=24, cuda=False, use_dali=True)
    data.clear_memory(verbose=True)
    assert "MiB given back, " in capsys.readouterr().out


EPOCHS, SETTLED = 50, 10


@pytest.fixture
def sources(folder, tmp_path, monkeypatch):
    """{backend: what its photographs are read from}, each made when it is asked for."""
    monkeypatch.chdir(tmp_path)

    def of_a_pack():
        pack.main([str(folder), str(tmp_path / "pack")])
        return packed.load(str(tmp_path / "pack"), "train")

    with contextlib.ExitStack() as stack:

        def cached():
            server = stack.enter_context(Memcached())
            return samples.through_cache(tree.load(str(folder / "train")), server.address)

        files = lambda: tree.load(str(folder / "train"))  # noqa: E731
        yield {"pytorch": files, "dali-cpu": files, "packed": of_a_pack, "kspeed": cached, "dali-kspeed": cached}


BACKENDS = ["pytorch", "dali-cpu", "packed", "kspeed", "dali-kspeed"]


@pytest.mark.parametrize("backend", in_rehearsal(BACKENDS, lambda backend: "kspeed" in backend))
def test_memory_is_flat_over_50_epochs(sources, backend):
    """The most that is resident in any of the last 25 epochs is what it was after the first ten, but for a few MiB."""
    data = labelled.Photos(sources[backend](), 64, True, seed=0)
    sampler = EpochSampler(len(data), 10, seed=0)
    loader = imagenet.loader(data, sampler, CPU, 0, backend)
    resident = []
    for epoch in range(EPOCHS):
        sampler.start_at(epoch, 0)
        assert sum(len(images) for images, _ in loader) == 30
        resident.append(resident_bytes() / 2**20)
    assert max(resident[-25:]) < max(resident[:SETTLED]) + 16, resident
    assert len(os.listdir("/proc/self/fd")) < 200


# --- A data set that fails ---------------------------------------------------------------------------------------------


class Broken:
    """A user's own: it cannot read one sample, or no two together."""

    def __init__(self, error, number=None):
        self.error, self.number = error, number

    def __len__(self):
        return 64

    def __getitem__(self, epoch_and_ids):
        _, ids = epoch_and_ids
        if self.number in ids or (self.number is None and len(ids) > 1):
            raise self.error
        return ids


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_data_set_names_the_sample_and_shows_where_it_was(workers):
    error = RuntimeError("connection reset\nby peer")  # such words are no reason to take another rank for lost
    with pytest.raises(SampleError) as failed:
        list(torch_batches(Broken(error, 17), EpochSampler(64, 16, seed=1), workers))
    assert failed.value.log_line == "sample 17: RuntimeError: connection reset\\nby peer" and not is_victim(failed.value)
    assert "raise self.error" in "".join(traceback.format_exception(failed.value))
    with pytest.raises(SampleError) as failed:
        list(torch_batches(Broken(KeyError("pair")), InOrder(64, 2), workers))
    assert failed.value.log_line == "one of samples 0, 1: KeyError: 'pair'"


def test_an_error_that_says_what_it_is_about_stays_as_it_is():
    batches = torch_batches(Broken(error := TrainingFailed("fetch the data set again"), 17), InOrder(64, 16))
    assert [batch for batch in batches if isinstance(batch, Exception)] == [error], "DeviceLoader raises it"


class Unheard(torch.utils.data.Dataset):
    """A process of its loader raises this error in a thread."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, _epoch_and_ids):
        self.fails()
        return torch.zeros(1), torch.zeros(1), torch.zeros(1)

    def fails(self):
        try:
            raise self.error
        except Exception:
            sys.excepthook(*sys.exc_info())  # as multiprocessing does in the thread that hands batches over


@pytest.mark.parametrize("error, shown", [(ConnectionResetError("reset by peer"), False), (ValueError("a mistake"), True)])
def test_a_loader_process_says_nothing_of_a_batch_that_nobody_takes(capfd, error, shown):
    list(torch_batches(Unheard(error), EpochSampler(4, 2, seed=0), workers=1))
    assert (repr(str(error))[1:-1] in capfd.readouterr().err) is shown


class Labelled:
    def __getitem__(self, place):
        return torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), torch.from_numpy(place[1])


def test_labels_and_ids_that_are_kept_need_no_open_file():
    """A run keeps those of a whole evaluation, and torch a descriptor for each tensor of a loader process."""
    sampler, kept = InOrder(60, 1), []
    loader = DeviceLoader(torch_batches(Labelled(), sampler, 1), sampler, CPU, (0.5,) * 3, (0.5,) * 3)
    for _, labels in loader:
        kept.append((labels, loader.ids))
        if len(kept) == 5:
            before = len(os.listdir("/proc/self/fd"))
    assert len(kept) == 60 and len(os.listdir("/proc/self/fd")) <= before + 10


def test_on_a_gpu_a_data_set_without_worker_processes_draws_what_it_draws_on_a_cpu(monkeypatch):
    """It is asked between two steps, which use the same generators; batches of worker processes are made during a step."""
    expected = [batch for batch, _ in loaded(epoch=0)]
    assert not SampleLoader(Words(), EpochSampler(20, 4, seed=3), CPU, 1, collate_fn=padded).beside, "a CPU has no queue"
    monkeypatch.setattr(devices, "has_streams", lambda device: True)
    alone, helped = (
        SampleLoader(Words(), EpochSampler(20, 4, seed=3), CPU, *workers, collate_fn=padded) for workers in ((), (1,))
    )
    assert helped.beside and not alone.beside
    assert_same_bits(list(alone), expected)


@pytest.mark.parametrize("how, pinned", [({}, True), ({"pin_memory": False}, False)])
def test_batches_come_from_pinned_memory_unless_it_is_not_wanted(monkeypatch, how, pinned):
    asked = []
    monkeypatch.setattr(devices, "to_device", lambda tensor, device, pin=True: asked.append(pin) or tensor)
    loader = DeviceLoader(Numbers(), EpochSampler(10, 2, seed=0), CPU, (0.5,) * 3, (0.25,) * 3, **how)
    next(iter(loader))
    assert asked == [pinned, pinned], "the images and the labels"


def test_a_batch_that_a_second_stream_has_made_is_waited_for_and_its_memory_kept_until_it_is_used(monkeypatch):
    class OnGPU(torch.Tensor):
        def record_stream(self, by):
            used.append((id(self), by))

    used, waited = [], []
    stream = types.SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(devices, "current_stream", lambda device: stream)
    images, labels = (torch.zeros(2).as_subclass(OnGPU) for _ in range(2))
    loader = DeviceLoader(Numbers(), EpochSampler(10, 2, seed=0), CPU, (0.5,) * 3, (0.25,) * 3)
    monkeypatch.setattr(loader, "_device_batches", lambda: iter([((images, labels), np.arange(2), "its event")]))
    assert len(list(loader)) == 1 and waited == ["its event"]
    assert used == [(id(images), stream), (id(labels), stream)]


def test_the_seconds_of_a_second_stream_are_those_of_its_events():
    clock, event = TransferClock(CPU), types.SimpleNamespace(query=lambda: True, elapsed_time=lambda end: 250.0)
    clock._events += [(event, event), (event, event)]
    assert (clock.read(), clock.read()) == (0.5, 0)


def test_what_makes_batches_ahead_is_closed_with_the_loop():
    closed = []

    def items():
        try:
            yield from range(50)
        finally:
            closed.append(True)

    held = items()  # else Python closes it
    found = read_ahead(held, 3)
    assert next(found) == 0
    found.close()
    assert closed
