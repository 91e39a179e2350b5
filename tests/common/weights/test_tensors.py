"""No file can run code, whatever torch reads it: a hostile or damaged one is refused in one line, and what torch.save writes is read."""

import collections

import pytest
import torch
from torch import nn

from common.weights import plain, tensors
from tests.tools.hostile import (
    ALL,
    in_an_archive,
    in_the_old_form,
    network,
    old,
    refused_in_a_line,
    right_or_refused,
    saved,
    tensor,
)
from tests.tools.jobs import assert_same_bits


def state():
    torch.manual_seed(0)
    whole = torch.randn(5, 4)
    return {
        "plain": [
            1,
            2.5,
            None,
            True,
            False,
            "ä",
            (1,),
            (1, 2),
            (1, 2, 3),
            (1, 2, 3, 4),
            (),
            300,
            70000,
            -1,
            2**70,
            {},
            {3: []},
        ],
        "ordered": collections.OrderedDict(a=torch.tensor(3.0), b=torch.zeros(0, 3)),
        "views": [whole, whole.t(), whole[1:, ::2], whole.to(memory_format=torch.contiguous_format)],
        "parameter": nn.Parameter(torch.ones(2)),
        "types": [torch.ones(3).to(kind) for kind in plain.TYPES.values()],
        "buffers": nn.BatchNorm1d(3).state_dict(),
    }


@pytest.mark.parametrize("form", ["archive", "before 1.6"])
def test_what_torch_saves_is_read_as_torch_loads_it(form):
    value = state()
    assert_is_read(tensors.read({"archive": saved, "before 1.6": old}[form](value), verified=form != "archive"), value)


def assert_is_read(found, value):
    assert_same_bits(found, value)
    assert found["plain"] == value["plain"] and list(map(type, found["plain"])) == list(map(type, value["plain"]))
    for one, other in zip(
        [*found["views"], *found["types"], found["parameter"]], [*value["views"], *value["types"], value["parameter"]]
    ):
        assert (one.dtype, one.shape, one.stride(), one.requires_grad) == (
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        )
    assert found["views"][0].data_ptr() == found["views"][1].data_ptr() and type(found["parameter"]) is nn.Parameter


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_of_1000_damaged_files_each_is_refused_in_a_line_or_has_the_same_tensors():
    assert 500 < right_or_refused(network(), 1000) < 1000


@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:Duplicate name", "ignore:.*jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ALL)
def test_a_hostile_file_is_refused_in_one_line_and_nothing_in_it_runs(name):
    assert refused_in_a_line(ALL[name]())


def test_without_the_attack_both_forms_are_read():
    """Else what makes the attacks would be what is refused."""
    assert len(ALL) > 100
    for content in (in_an_archive(tensor()), in_the_old_form(tensor())):
        assert torch.equal(tensors.read(content, verified=True)["weight"], torch.tensor([1.0, 2, 3, 4]))
    assert torch.equal(tensors.read(in_an_archive(tensor()), verified=False)["weight"], torch.tensor([1.0, 2, 3, 4]))


def test_what_is_there_in_many_places_is_looked_at_once():
    value = []
    for _ in range(60):
        value = [value, value]
    plain.check(value)
