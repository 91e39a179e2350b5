"""A checkpoint is whole and its own, or it is named as damaged before a byte of it is parsed."""

import contextlib
import errno
import functools
import itertools
import json
import os
import random

import pytest
import torch

from common.errors import TrainingFailed, UserError
from common.run import checkpoint
from common.run.saver import Writer


def state(value=0.0):
    return {"model": {"weight": torch.full((50,), value)}, "optimizer": {"state": {0: {"momentum": torch.ones(50)}}}}


def about(number):
    return {"samples_seen": number, "epoch": 0, "arguments": {"lr": 1e-05, "name": "é"}}


@pytest.fixture
def folder(tmp_path):
    for number in (100, 200, 300):
        checkpoint.write(str(tmp_path), state(float(number)), about(number))
    return tmp_path


def test_the_newest_is_found_by_number_not_by_name_or_age(folder):
    checkpoint.write(str(folder), state(1000.0), about(1000))
    os.utime(folder / "000000000100.pt")
    found, words, path = checkpoint.newest(str(folder))
    assert words == about(1000) and path.endswith("000000001000.pt") and found["model"]["weight"][0] == 1000


def test_200_bit_flips_are_all_detected_and_the_one_before_is_used(folder):
    draw, newest = random.Random(1), folder / "000000000300.pt"
    for number in range(200):
        victim = newest if number % 4 else newest.with_suffix(".json")
        good = victim.read_bytes()
        position = draw.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        victim.write_bytes(bad)
        said = []
        assert checkpoint.newest(str(folder), said.append)[1]["samples_seen"] == 200, (victim, position)
        assert len(said) == 1 and str(newest) in said[0] and "damaged" in said[0]
        victim.write_bytes(good)
    assert checkpoint.newest(str(folder))[1]["samples_seen"] == 300


@pytest.mark.parametrize("suffix", [".pt", ".json"])
@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_file_is_detected(folder, suffix, length):
    victim = folder / f"000000000300{suffix}"
    victim.write_bytes(victim.read_bytes()[:length])
    assert checkpoint.newest(str(folder), lambda _: None)[1]["samples_seen"] == 200


def test_a_swapped_file_is_detected(folder):
    os.replace(folder / "000000000200.pt", folder / "000000000300.pt")
    os.replace(folder / "000000000200.json", folder / "000000000300.json")
    (folder / "000000000300.json").write_text((folder / "000000000300.json").read_text().replace("200", "300", 1))
    assert checkpoint.newest(str(folder), lambda _: None)[1]["samples_seen"] == 100


def test_half_a_save_is_no_checkpoint_and_is_swept(folder):
    (folder / "000000000400.pt").write_bytes(b"x")  # no manifest: the save did not get that far
    (folder / "000000000400.json.unfinished").write_bytes(b"{")
    said = []
    assert checkpoint.newest(str(folder), said.append)[1]["samples_seen"] == 300 and not said
    checkpoint.sweep(str(folder))
    assert not list(folder.glob("*.unfinished"))


def test_when_all_are_damaged_nothing_is_overwritten_in_silence(folder):
    for path in folder.glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"all 3 checkpoints .* are damaged; start afresh with --resume never"):
        checkpoint.newest(str(folder), lambda _: None)


def test_nothing_but_tensors_and_plain_types_is_loaded(tmp_path):
    """A stranger's file with a matching manifest: it is refused by weights_only, and runs nothing."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "000000000001"
    checkpoint.write(str(tmp_path), state(), about(1))
    content = checkpoint.encode({"model": Trap(), "about": about(1)})
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest.update(size=len(content), sha256=__import__("hashlib").sha256(content).hexdigest())
    path.with_suffix(".pt").write_bytes(content)
    path.with_suffix(".json").write_bytes(json.dumps(manifest, indent=1).encode())
    with pytest.raises(UserError, match="something other than tensors"):
        checkpoint.read(f"{path}.pt")
    assert not (tmp_path / "ran").exists()


CHANGES = ("fsync", "replace", "unlink")  # what a save asks of the disk, besides writing


def disturbed(folder, number, way):
    """Save 300 again, and at change `number` of the disk be killed or told that it is full; whether it came that far."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            done = itertools.count()

            def change(original, *paths):
                if next(done) == number:
                    if way == "killed":
                        os._exit(9)
                    raise OSError(errno.ENOSPC, "No space left on device")
                return original(*paths)

            for name in CHANGES:
                setattr(os, name, functools.partial(change, getattr(os, name)))
            checkpoint.write(str(folder), state(5.0), about(300))
            os._exit(9 if next(done) > number else 0)
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("way", ["killed", "full"])
@pytest.mark.parametrize("swept", [False, True])
def test_a_good_checkpoint_is_there_at_every_moment_while_its_number_is_saved_again(tmp_path, way, swept):
    """Before its successor is whole it is the old one, then the new one; for the next start, and for who only reads."""
    values = []
    for number in range(20):
        (folder := tmp_path / str(number)).mkdir()
        checkpoint.write(str(folder), state(300.0), about(300))
        came_so_far = disturbed(folder, number, way)
        if swept:
            checkpoint.sweep(str(folder))
            assert sorted(path.name for path in folder.iterdir()) == ["000000000300.json", "000000000300.pt"]
        values.append(checkpoint.newest(str(folder), pytest.fail)[0]["model"]["weight"][0].item())
        if not came_so_far:
            break
    assert number > 3 and values == sorted(values, reverse=True) and set(values) == {300.0, 5.0} and not came_so_far


def test_a_save_that_was_killed_before_its_manifest_had_its_name_is_completed(folder):
    os.replace(folder / "000000000300.json", folder / "000000000300.json.unfinished")
    assert checkpoint.newest(str(folder))[1]["samples_seen"] == 200
    checkpoint.sweep(str(folder))
    assert checkpoint.newest(str(folder))[1]["samples_seen"] == 300


def test_the_last_and_the_best_are_kept(folder):
    for epoch in range(1, 12):
        (folder / f"epoch_{epoch}.pth").write_bytes(b"")
    checkpoint.prune(str(folder), str(folder), keep=1, about={"samples_seen": 300, "best": {"samples_seen": 100, "epoch": 2}})
    assert checkpoint.numbers(str(folder)) == [100, 300]
    assert {path.name for path in folder.glob("epoch_*")} == {"epoch_2.pth", "epoch_11.pth"}
    checkpoint.write(str(folder), state(), about(200))  # the run went back behind a damaged 300
    checkpoint.prune(str(folder), str(folder), keep=1, about={"samples_seen": 200, "best": None})
    assert checkpoint.numbers(str(folder)) == [200]


@pytest.mark.parametrize("key", ["module.conv.weight", "_orig_mod.conv.weight", "module._orig_mod.conv.weight", "conv.weight"])
def test_keys_never_carry_a_wrapper(key):
    assert list(checkpoint.plain_keys({key: 1})) == ["conv.weight"]


def test_a_snapshot_is_safe_from_the_next_step():
    weight = torch.zeros(3)
    copy = checkpoint.snapshot({"a": [weight, 1]})
    weight.add_(1)
    assert copy["a"][0].tolist() == [0, 0, 0]


def test_a_failed_save_is_raised_at_the_next_call():
    writer = Writer()
    writer.submit(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(TrainingFailed, match="No space left"):
        writer.wait()
    writer.wait()
