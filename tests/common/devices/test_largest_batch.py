"""--find_max_batch true: sizes are tried by steps of the job itself, and one line says which to take."""

import contextlib
import types

import pytest
import torch

from common import arguments
from common.devices import largest_batch, portions
from common.devices.diagnosis import out_of_memory_message
from common.devices.largest_batch import FITS, NO_MEMORY, TOO_FEW_SAMPLES, largest, with_margin
from common.errors import TooFewSamples, UserError
from datasets.dali.batches import is_fault_of_picture
from tests.tools.jobs import TINY, module_of, run_job

FULL = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")
CPU = torch.device("cpu")


@pytest.mark.parametrize("first", [1, 2, 128, 5000])
@pytest.mark.parametrize("most", [1, 2, 3, 37, 700, 4096])
def test_the_largest_that_fits_is_found_in_few_tries(first, most):
    tried = []

    def try_size(size):
        tried.append(size)
        return FITS if size <= most else NO_MEMORY

    size, next_code = largest(first, try_size)
    assert most - max(1, most // 8) <= size <= most and next_code == NO_MEMORY
    assert len(tried) == len(set(tried)) <= 18 and size in tried


def test_where_none_fits_or_the_data_end_that_is_known():
    assert largest(64, lambda size: NO_MEMORY) == (0, NO_MEMORY)
    assert largest(64, lambda size: FITS if size <= 200 else TOO_FEW_SAMPLES) == (pytest.approx(195, abs=6), TOO_FEW_SAMPLES)


def test_a_part_is_left_free():
    assert [with_margin(size) for size in (1, 2, 9, 16, 100, 512)] == [1, 2, 8, 8, 88, 480]


def test_on_a_cpu_one_line_says_that_it_is_for_gpus(tmp_path):
    done = run_job("train", tmp_path, *TINY, "--find_max_batch", "true", check=2)
    (line,) = done.stderr.splitlines()
    assert line == "error: --find_max_batch true looks at the memory of a GPU, and this job computes on a CPU"
    assert not done.stdout and not (tmp_path / "out").exists()


@pytest.mark.parametrize("other, code", [("--doctor", 1), ("--evaluate", 2)])
def test_what_takes_no_steps_is_refused(tmp_path, other, code):
    done = run_job("train_imagenet", tmp_path, "--custom_data", "true", "--find_max_batch", "true", other, "true", check=code)
    assert f"takes steps of the training, and {other} none" in done.stdout + done.stderr and not (tmp_path / "out").exists()


def trial_of(monkeypatch, *words):
    """The arguments of a process that tries a size, and what listens there."""
    monkeypatch.setenv(largest_batch.VARIABLE, "1")
    monkeypatch.setattr(
        largest_batch.ctypes, "CDLL", lambda _: types.SimpleNamespace(prctl=lambda *_: 0)
    )  # not of this process
    listening = []
    monkeypatch.setattr(largest_batch.moments, "listen", listening.append)
    args = module_of("train_imagenet").options().parse_args([*words, "--find_max_batch", "true"])
    largest_batch.find(args)
    return args, listening[0]


def test_a_trial_is_the_job_on_one_device_with_nothing_that_ends_it_early(monkeypatch):
    words = ["--batch_size", "96", "--total_batch", "64", "--max_steps", "1", "--run_epochs", "1", "--epochs", "1"]
    args, _ = trial_of(monkeypatch, *words, "--max_restarts", "3", "--nproc_per_node", "8", "--min_nodes", "2", "--shares", "8")
    found = {
        name: vars(args)[name] for name in ("nproc_per_node", "max_restarts", "min_nodes", "shares", "max_steps", "run_epochs")
    }
    assert found == {
        "nproc_per_node": 1,
        "max_restarts": 0,
        "min_nodes": None,
        "shares": None,
        "max_steps": None,
        "run_epochs": None,
    }
    assert (args.batch_size, args.total_batch, args.epochs) == (96, 96, 3)
    for size, total, shares, expected in ((32, 64, None, 64), (1920, 2048, None, 3840), (512, 2048, 8, 4096)):
        words = ["--batch_size", size, "--total_batch", total, *(["--exact", "true", "--shares", shares] if shares else [])]
        found = trial_of(monkeypatch, *map(str, words))[0].total_batch
        assert found == expected, "all of it is on the device, in portions of just this size"


@pytest.mark.parametrize(
    "code, words, said",
    [
        (TOO_FEW_SAMPLES, {}, "a step takes more samples than the data have, even with --batch_size 1: lower --total_batch"),
        (NO_MEMORY, {}, "not even --batch_size 1 fits into the memory of this device"),
        (FITS, {"TORCHELASTIC_RUN_ID": "7"}, "start one process, without torchrun"),
    ],
)
def test_where_nothing_is_found_the_reason_is_said(monkeypatch, code, words, said):
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(largest_batch, "_try_size", lambda _: code)
    args = types.SimpleNamespace(doctor=False, evaluate=False, batch_size=128)
    with pytest.raises(UserError, match=said):
        largest_batch.find(args)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "Can't allocate 4096 bytes on device 0.",
    ],
)
def test_a_full_device_is_known_by_the_words_of_dali_and_triton_too(text):
    assert out_of_memory_message(RuntimeError(text)) and not is_fault_of_picture(RuntimeError(text))


class Ended(Exception):
    pass


def test_a_trial_ends_with_the_code_for_what_stopped_it(monkeypatch):
    def ends(code):
        raise Ended(code)

    args, trial = trial_of(monkeypatch)
    monkeypatch.setattr(largest_batch.os, "_exit", ends)
    for error, code in ((FULL, NO_MEMORY), (TooFewSamples("few"), TOO_FEW_SAMPLES)):
        with pytest.raises(Ended, match=str(code)):
            trial.failure(error)
    for error in (
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error"),
        MemoryError(),
        UserError("a bucket"),
    ):
        trial.failure(error)  # is the job's own error, and no size
    args.world = types.SimpleNamespace(world_size=2)
    with pytest.raises(UserError, match="start one process, without torchrun"):
        trial.world(args)


@pytest.mark.parametrize(
    "size, global_batch, samples, steps, ends",
    [(8, 8, 100, 2, None), (8, 8, 100, 3, SystemExit), (8, 4, 100, 1, UserError), (200, 200, 100, 1, TooFewSamples)],
)
def test_a_step_of_a_trial(monkeypatch, size, global_batch, samples, steps, ends):
    """SystemExit only for three whole steps of that size."""
    args = types.SimpleNamespace(batch_size=size)
    sampler = types.SimpleNamespace(global_batch=global_batch, num_samples=samples)
    waited = []
    monkeypatch.setattr(largest_batch, "synchronize", waited.append)
    trial = largest_batch.BatchTrial(args, sampler, torch.device("cuda"))
    with pytest.raises(ends) if ends else contextlib.nullcontext() as ended:
        trial.after_step(steps)
    if ends is SystemExit:
        assert ended.value.code == FITS and waited
    else:
        assert ends is None or type(ended.value) is ends


def test_a_job_that_ends_before_its_third_step_fits_nothing(monkeypatch, capsys):
    for code, line in ((0, "the job ended before its step 3"), (-9, "was ended by signal 9")):
        monkeypatch.setattr(largest_batch.subprocess, "run", lambda *_, code=code, **__: types.SimpleNamespace(returncode=code))
        with pytest.raises(SystemExit) as ended:
            largest_batch._try_size(128)
        assert ended.value.code == 1 and line in capsys.readouterr().out


def test_the_rate_grows_with_the_batch_up_to_what_a_recipe_allows():
    args = types.SimpleNamespace(batch_size=128, largest_growth=None)
    assert arguments.growth(args, 2048) == 16
    args.largest_growth = 8
    assert [arguments.growth(args, size) for size in (128, 2048)] == [1, 8]


# --- Smaller portions ------------------------------------------------------------------------------------------------------


def test_a_step_is_tried_with_half_of_it_until_there_is_memory():
    statistics = torch.zeros(3)
    tried, said = [], []
    before = torch.get_rng_state()

    def compute(size):
        assert torch.equal(torch.get_rng_state(), before), "the random numbers of a step are the same in each try"
        tried.append((size, statistics.tolist()))
        statistics.add_(torch.rand(()).new_ones(()))
        if size > 8:
            raise FULL
        return torch.tensor(float(size))

    loss, size = portions.halved_until_it_fits(compute, 50, CPU, [statistics], said.append)
    assert (loss.item(), size) == (6.0, 6) and [size for size, _ in tried] == [50, 25, 12, 6]
    assert all(before == [0, 0, 0] for _, before in tried) and statistics.tolist() == [1, 1, 1]
    assert said[-1].startswith("warning: CUDA out of memory. Tried to allocate 2.00 GiB: the GPU's memory is full: this start")
    assert said[-1].endswith("in portions of 6 and the same total batch, as with --batch_size 6") and len(said) == 3


def test_a_network_without_buffers_is_tried_again_too():
    """As vit_b_16."""
    tries = iter([FULL, None])

    def compute(size):
        if error := next(tries):
            raise error
        return torch.tensor(size)

    assert portions.halved_until_it_fits(compute, 8, CPU, [], lambda _: None) == (torch.tensor(4), 4)


@pytest.mark.parametrize("error, size", [(RuntimeError("shapes differ"), 8), (FULL, 1)])
def test_another_error_or_one_sample_that_does_not_fit_is_raised(error, size):
    def compute(_):
        raise error

    with pytest.raises(type(error), match=str(error)[:10]):
        portions.halved_until_it_fits(compute, size, CPU, [torch.zeros(1)], print)
