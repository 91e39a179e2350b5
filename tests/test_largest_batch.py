"""--find_max_batch true: sizes are tried by steps of the job itself, and one line says which to take."""

import pytest
import torch

from common.devices import portions
from common.largest_batch import NO_MEMORY, TOO_FEW_SAMPLES, largest, with_margin
from tests.jobs import TINY, run_job


@pytest.mark.parametrize("first", [1, 2, 128, 5000])
@pytest.mark.parametrize("most", [1, 2, 3, 37, 700, 4096])
def test_the_largest_that_fits_is_found_in_few_tries(first, most):
    tried = []

    def ends_with(size, fits_below):
        assert fits_below == any(one <= most for one in tried), "it is told whether a smaller one fitted"
        tried.append(size)
        return 0 if size <= most else NO_MEMORY

    size, refused = largest(first, ends_with)
    assert most - max(1, most // 8) <= size <= most and refused == NO_MEMORY
    assert len(tried) == len(set(tried)) <= 18 and size in tried


def test_where_none_fits_or_the_data_end_that_is_known():
    assert largest(64, lambda size, _: NO_MEMORY) == (0, NO_MEMORY)
    assert largest(64, lambda size, _: 0 if size <= 200 else TOO_FEW_SAMPLES) == (pytest.approx(195, abs=6), TOO_FEW_SAMPLES)


def test_a_part_is_left_free():
    assert [with_margin(size) for size in (1, 2, 9, 16, 100, 512)] == [1, 2, 8, 8, 88, 480]


def test_on_a_cpu_one_line_says_that_it_is_for_gpus(tmp_path):
    done = run_job("train", tmp_path, *TINY, "--find_max_batch", "true", check=2)
    (line,) = done.stderr.splitlines()
    assert line == "error: --find_max_batch true looks at the memory of a GPU, and this job computes on a CPU"
    assert not done.stdout and not (tmp_path / "out").exists()


# --- Smaller portions ------------------------------------------------------------------------------------------------------

FULL = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")


def test_a_step_is_tried_with_half_of_it_until_there_is_memory():
    statistics = torch.zeros(3)
    tried, said = [], []

    def compute(size):
        tried.append((size, statistics.tolist()))
        statistics.add_(1)
        if size > 8:
            raise FULL
        return torch.tensor(float(size))

    loss, size = portions.halved_until_it_fits(compute, 50, [statistics], said.append)
    assert (loss.item(), size) == (6.0, 6) and [size for size, _ in tried] == [50, 25, 12, 6]
    assert all(before == [0, 0, 0] for _, before in tried) and statistics.tolist() == [1, 1, 1]
    assert said[-1].startswith("warning: CUDA out of memory. Tried to allocate 2.00 GiB: the GPU's memory is full: this start")
    assert said[-1].endswith("in portions of 6 and the same total batch, as with --batch_size 6") and len(said) == 3


@pytest.mark.parametrize("error, size", [(RuntimeError("shapes differ"), 8), (FULL, 1)])
def test_another_error_or_one_sample_that_does_not_fit_is_raised(error, size):
    def compute(_):
        raise error

    with pytest.raises(type(error), match=str(error)[:10]):
        portions.halved_until_it_fits(compute, size, [torch.zeros(1)], print)
