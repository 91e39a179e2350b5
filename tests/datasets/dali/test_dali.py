"""DALI gives the photographs of the other loaders, goes on after one that it cannot decode, and ends without memory."""

import contextlib
import re
from pathlib import Path

import pytest
import torch

from datasets.dali import batches, pipeline
from datasets.dali.batches import DaliBatches
from datasets.photos import decode, tree
from datasets.sampler import InOrder
from tests.tools.photographs import assert_close, assert_equal, images_of, many, shard  # noqa: F401 (a fixture)


@pytest.mark.parametrize("train", [True, False])
def test_dali_gives_the_same_pictures_in_the_same_order(many, train):
    def sampler(count):
        return shard(count, 7, 0, 1) if train else InOrder(count, 7)

    ours, order = images_of(many, sampler, train)
    theirs, their_order = images_of(many, sampler, train, workers=1, backend="dali-cpu")
    assert their_order == order
    assert_close(theirs, ours)


@pytest.mark.parametrize("consumed", [0, 6, 18])
def test_dali_on_a_rank_and_resumed(many, consumed):
    def sampler(count):
        made = shard(count, 3, 1, 2)
        made.start_at(2, consumed)
        return made

    ours, order = images_of(many, sampler)
    theirs, their_order = images_of(many, sampler, workers=1, backend="dali-cpu")
    assert their_order == order and len(order) == (30 - consumed) // 6 * 3
    assert_close(theirs, ours)


class Kept(tree.Tree):
    """Read by itself, and counted, as a pack or a cache is."""

    has_sample_files, reads = False, 0

    def read(self, number):
        Kept.reads += 1
        return super().read(number)


@pytest.mark.parametrize("train", [True, False])
def test_dali_decodes_what_is_in_no_file_alike(many, train, monkeypatch):
    def sampler(count):
        return shard(count, 7, 0, 1) if train else InOrder(count, 7)

    from_files, order = images_of(many, sampler, train, workers=2, backend="dali-cpu")
    plain = tree.load
    monkeypatch.setattr(tree, "load", lambda folder: Kept(**vars(plain(folder))))
    read, their_order = images_of(many, sampler, train, workers=2, backend="dali-kspeed")
    assert their_order == order and Kept.reads >= len(order)
    assert_equal(read, from_files)


@pytest.mark.parametrize("train", [True, False])
def test_dali_gives_the_same_whole_pictures(many, train):
    whole = {"area": (1.0, 1.0), "short": decode.WHOLE}
    ours, order = images_of(many, lambda count: InOrder(count, 7), train, **whole)
    theirs, their_order = images_of(many, lambda count: InOrder(count, 7), train, workers=1, backend="dali-cpu", **whole)
    assert their_order == order
    assert_close(theirs, ours)


def test_dali_goes_on_after_a_picture_that_it_cannot_decode(many, capfd):
    files = tree.load(str(many))
    number = files.names.index("class1/13.jpg")
    content = Path(files.path(number)).read_bytes()
    Path(files.path(number)).write_bytes(content[:200] + bytes(len(content) - 202) + b"\xff\xd9")
    ours, order = images_of(many, lambda count: InOrder(count, 4), train=False)
    theirs, their_order = images_of(many, lambda count: InOrder(count, 4), train=False, workers=1, backend="dali-cpu")
    assert their_order == order and torch.equal(theirs[number][0], ours[number + 1][0])
    assert_close(theirs, ours)
    assert capfd.readouterr().out.count("warning: DALI cannot make a batch of epoch 1") == 1


class Fails:
    def __init__(self, message):
        self.run = lambda: (_ for _ in ()).throw(RuntimeError(message))


@pytest.mark.parametrize(
    ("message", "of_the_machine"),
    [
        ("CUDA runtime API error cudaErrorMemoryAllocation (2): out of memory", True),
        ("nvJPEG error (5) : NVJPEG_STATUS_ALLOCATOR_FAILURE", True),
        ("std::bad_alloc", True),
        ("Unrecognized image format. Supported formats are: JPEG, PNG", False),
    ],
)
def test_dali_without_memory_ends_the_run_and_does_not_train_on_from_torch(many, message, of_the_machine, monkeypatch, capfd):
    monkeypatch.setattr(DaliBatches, "_pipeline", lambda *_: Fails(f"Critical error: encountered:\n\n{message}"))
    with pytest.raises(RuntimeError, match=re.escape(message)) if of_the_machine else contextlib.nullcontext():
        images_of(many, lambda count: InOrder(count, 4), train=False, workers=1, backend="dali-cpu")
    assert ("so torch makes it" in capfd.readouterr().out) != of_the_machine


def test_dalis_decoder_for_gpus_interpolates_colours_as_the_others_do(monkeypatch):
    from nvidia.dali import fn

    asked = []
    monkeypatch.setattr(fn.decoders, "image", lambda *_, **how: asked.append(how))
    monkeypatch.setattr(fn.decoders, "image_slice", lambda *_, **how: asked.append(how) or 1 / 0)
    pipeline.decoded(None, "mixed")
    with pytest.raises(ZeroDivisionError):
        batches._train_graph(None, None, None, None, 8, "mixed")
    assert [how["jpeg_fancy_upsampling"] for how in asked] == [True, True] and asked[0]["device"] == "mixed"
