"""A checkpoint is whole and its own, or it is named as damaged before a byte of it is parsed."""

import argparse
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess

import numpy as np
import pytest
import torch
import torchvision

from common.checkpoints import checkpoint
from common.checkpoints.parts import SavedParts
from common.checkpoints.position import Position
from common.checkpoints.pretrained import about_weights, fit, load_weights, read_weights
from common.checkpoints.saver import Saving
from common.errors import TrainingFailed, UserError
from common.weights.files import evaluated_weights, write_weights


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


def test_both_files_of_one_checkpoint_under_another_number_are_refused(folder):
    for suffix in (".pt", ".json"):
        shutil.copy(folder / f"000000000200{suffix}", folder / f"000000000900{suffix}")
    said = []
    assert checkpoint.newest(str(folder), said.append)[1]["samples_seen"] == 300
    assert len(said) == 1 and "000000000900.pt is damaged: it is that after 200 samples" in said[0]


def nested(about):
    return b"[" * 200_000 + b"]" * 200_000


def no_archive(about):
    return json.dumps({**about, "sha256": hashlib.sha256(b"junk").hexdigest(), "size": 4}, indent=1).encode()


def a_list(about):
    return b"[]"


@pytest.mark.parametrize("manifest", [nested, no_archive, a_list])
@pytest.mark.parametrize("ending", ["", ".unfinished"])
def test_a_hostile_manifest_leads_to_the_checkpoint_before(folder, manifest, ending):
    (folder / "000000000300.pt").write_bytes(b"junk")
    (folder / f"000000000300.json{ending}").write_bytes(manifest(about(300)))
    said = []
    for _ in range(2):
        assert checkpoint.newest(str(folder), said.append)[1]["samples_seen"] == 200
        checkpoint.sweep(str(folder))
    assert len(said) == 2 and all("000000000300.pt is " in line and "\n" not in line for line in said)


@pytest.mark.parametrize("value", [5, [], {"a": 1}, {"about": 1}, {"about": {"samples_seen": 300}}, b"no archive"])
def test_whole_files_of_another_form_are_damaged(folder, value):
    content = value if isinstance(value, bytes) else bytes(checkpoint.encode(value))
    (folder / "000000000300.pt").write_bytes(content)
    manifest = {**about(300), "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / "000000000300.json").write_bytes(json.dumps(manifest, indent=1).encode())
    said = []
    assert checkpoint.newest(str(folder), said.append)[1]["samples_seen"] == 200 and len(said) == 1


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
    with pytest.raises(
        UserError, match=r"all 3 checkpoints .* are damaged; start afresh in another output folder, or here with --resume never"
    ):
        checkpoint.newest(str(folder), lambda _: None)


def test_nothing_but_tensors_and_plain_types_is_loaded(tmp_path):
    """A stranger's file with a matching manifest: it is refused, and runs nothing."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "000000000001"
    checkpoint.write(str(tmp_path), state(), about(1))
    content = checkpoint.encode({"model": Trap(), "about": about(1)})
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    path.with_suffix(".pt").write_bytes(content)
    path.with_suffix(".json").write_bytes(json.dumps(manifest, indent=1).encode())
    with pytest.raises(UserError, match="something other than tensors"):
        checkpoint.read(f"{path}.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("samples", [torch.ones(2), torch.tensor(1), [[]], {"a": torch.ones(1)}])
def test_a_manifest_with_a_tensor_in_it_is_no_manifest(tmp_path, samples):
    checkpoint.write(str(tmp_path), state(), about(1))
    content = checkpoint.encode({"model": {}, "about": {**about(2), "samples_seen": samples}})
    manifest = {**about(2), "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "000000000002.pt").write_bytes(content)
    (tmp_path / "000000000002.json").write_bytes(json.dumps(manifest, indent=1).encode())
    said = []
    assert checkpoint.newest(str(tmp_path), said.append)[2].endswith("000000000001.pt")
    assert "its manifest was changed; trying the one before it" in said[0]


@pytest.mark.parametrize(
    "part", [{1, 2}, {1.5: 2}, {(1,): 2}, 1j, torch.ones(2).to_sparse(), torch.float32, np.float64(1), b"x"]
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, part):
    with pytest.raises(UserError, match=r"a checkpoint cannot hold the state of part: it holds a "):
        checkpoint.write(str(tmp_path), {**state(), "part": {"inside": [part]}}, about(1))
    assert not os.listdir(tmp_path)


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


@pytest.mark.parametrize("pt, newest", [("000000000300-2.pt", 300), ("000000000300.pt", 300), ("elsewhere", 200)])
def test_of_a_copied_bucket_a_start_goes_on_from_what_is_whole(folder, pt, newest):
    """Whose names lose the number of their start, also after a kill between the two files, or without one of them."""
    os.replace(folder / "000000000300.json", folder / "000000000300-2.json")
    os.replace(folder / "000000000300.pt", folder / pt)
    checkpoint.sweep(str(folder))
    assert checkpoint.newest(str(folder))[1]["samples_seen"] == newest


def test_a_manifest_has_the_rate_of_the_optimizer_and_0_where_none_has_this_name():
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.25)
    for name, rate in (("optimizer", 0.25), ("generator", 0.0)):
        parts = SavedParts(network, print)
        parts.add({name: optimizer})
        assert parts.learning_rate() == rate


@pytest.mark.parametrize("kept", [None, 100])
def test_of_a_copied_bucket_what_is_not_whole_replaces_nothing(folder, tmp_path, kept):
    """`kept`: so many bytes of the tensors came along."""
    (theirs := tmp_path / "theirs").mkdir()
    checkpoint.write(str(theirs), state(5.0), about(300))
    os.replace(theirs / "000000000300.json", folder / "000000000300-2.json")
    if kept:
        (folder / "000000000300-2.pt").write_bytes((theirs / "000000000300.pt").read_bytes()[:kept])
    checkpoint.sweep(str(folder))
    assert checkpoint.newest(str(folder))[0]["model"]["weight"][0] == 300


def test_the_last_and_the_best_are_kept(folder):
    for epoch in range(1, 12):
        write_weights(str(folder / f"epoch_{epoch}.pth"), {})
    checkpoint.prune(str(folder), str(folder), keep=1, about={"samples_seen": 300, "best": {"samples_seen": 100, "epoch": 2}})
    assert checkpoint.numbers(str(folder)) == [100, 300]
    assert {path.name for path in folder.glob("epoch_*")} == {
        f"epoch_{epoch}.pth{suffix}" for epoch in (2, 11) for suffix in ("", ".sha256")
    }
    checkpoint.write(str(folder), state(), about(200))  # the run went back behind 300
    checkpoint.prune(str(folder), str(folder), keep=1, about={"samples_seen": 200, "best": None})
    assert checkpoint.numbers(str(folder)) == [200, 300], "which is damaged, or may be gone on from"
    checkpoint.prune(str(folder), str(folder), keep=1, about={"samples_seen": 200, "best": None}, damaged={300})
    assert checkpoint.numbers(str(folder)) == [200]


# --- Weights -------------------------------------------------------------------------------------------------------------


def flipped(content, position):
    bad = bytearray(content)
    bad[position // 8] ^= 1 << position % 8
    return bytes(bad)


@pytest.fixture
def network(tmp_path):
    """A network, and its weights as a run leaves them."""
    torch.manual_seed(0)
    network = torch.nn.Linear(20, 10)
    write_weights(str(tmp_path / "epoch_3.pth"), network.state_dict())
    return network


@pytest.mark.parametrize("name", ["epoch_3.pth", "epoch_3.pth.sha256"])
def test_300_flipped_bits_of_weights_or_of_their_digest_are_all_refused(network, tmp_path, name, capsys):
    draw, victim = random.Random(1), tmp_path / name
    good = victim.read_bytes()
    for _ in range(300):
        position = draw.randrange(len(good) * 8 if name.endswith("pth") else 64 * 8)
        victim.write_bytes(flipped(good, position))
        with pytest.raises(UserError, match=r"epoch_3\.pth is damaged: .*epoch_3\.pth\.sha256"):
            load_weights(network, str(tmp_path / "epoch_3.pth"))
    victim.write_bytes(good)
    assert load_weights(network, str(tmp_path / "epoch_3.pth")) == [] and not capsys.readouterr().out


def test_the_usual_program_checks_weights(network, tmp_path):
    assert subprocess.run(["sha256sum", "-c", "epoch_3.pth.sha256"], cwd=tmp_path).returncode == 0


def test_weights_of_others_are_loaded_and_the_log_says_that_nothing_vouches_for_them(network, tmp_path, capsys):
    torch.save(network.state_dict(), path := tmp_path / "foreign.pth")
    assert load_weights(network, str(path)) == []
    assert capsys.readouterr().out == f"{path} is unverified: there is no {path}.sha256\n"


@pytest.mark.parametrize("arch, zipped", [("resnet18", True), ("densenet121", False)])
def test_files_of_torchvision_are_taken_as_they_come_and_compared_with_the_digest_in_their_name(tmp_path, capsys, arch, zipped):
    """Older ones are no archives, and those of DenseNet have the keys of torchvision 0.2."""
    digest = ""
    while not digest or digest.isdigit():  # which may be a date
        theirs, ours = (torchvision.models.get_model(arch, weights=None, num_classes=3) for _ in range(2))
        state = {
            re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", name): tensor
            for name, tensor in theirs.state_dict().items()
        }
        state = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
        torch.save(state, tmp_path / "plain.pth", _use_new_zipfile_serialization=zipped)
        content = (tmp_path / "plain.pth").read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:8]
    path = tmp_path / f"{arch}-{digest}.pth"
    path.write_bytes(content)
    assert load_weights(ours, str(path)) == [] and not capsys.readouterr().out
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters()))
    path.rename(dated := tmp_path / "flowers-20240131.pth")
    if zipped:
        assert load_weights(ours, str(dated)) == []
    else:
        with pytest.raises(UserError, match=r"in the form before torch 1\.6, in which no damage is noticed: save it again"):
            load_weights(ours, str(dated))
        (tmp_path / f"{dated}.sha256").write_text(hashlib.sha256(content).hexdigest())
        assert load_weights(ours, str(dated)) == []
    assert ("unverified" in capsys.readouterr().out) == zipped or not zipped
    path.write_bytes(content[:-1])
    with pytest.raises(
        UserError, match=r"is damaged, or not the file of that name: its SHA-256 does not begin with [0-9a-f]{8}"
    ):
        load_weights(ours, str(path))


@pytest.mark.parametrize("what", ["a pipe", "an endless file", "a file of 4 GB"])
def test_what_is_no_file_of_weights_is_not_read_to_its_end(tmp_path, what):
    path, memory = tmp_path / "weights.pth", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "an endless file":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 4 << 30)
    with pytest.raises(
        UserError, match=r"cannot be read: it is not a regular file|holds no weights: it is no archive of torch\.save"
    ):
        read_weights(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (100 << 10)


def test_a_checkpoint_taken_for_its_weights_is_verified(network, tmp_path, capsys):
    checkpoint.write(str(tmp_path), {"model": network.state_dict()}, about(7))
    path = tmp_path / "000000000007.pt"
    assert load_weights(network, str(path)) == [] and not capsys.readouterr().out
    path.write_bytes(flipped(path.read_bytes(), 4000))
    with pytest.raises(UserError, match="is damaged"):
        load_weights(network, str(path))


@pytest.mark.parametrize("wrappers", ["module.", "_orig_mod.", "module._orig_mod.", ""])
@pytest.mark.parametrize("own", ["", "module."])  # what the network itself calls one of its modules
def test_the_prefixes_of_wrappers_are_taken_off_and_no_names_of_the_network(wrappers, own):
    network = torch.nn.Module()
    network.module = torch.nn.Linear(2, 1)
    if not own:
        network = network.module
    state = {f"{wrappers}{name}": tensor + 1 for name, tensor in network.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert fit(network, state, "its file", new_head=False) == []
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in network.state_dict().items())
    averaged = {"model": before, "ema": {**{f"module.{name}": tensor for name, tensor in before.items()}, "n_averaged": 3}}
    assert evaluated_weights(averaged).keys() == before.keys()


def test_a_snapshot_is_safe_from_the_next_step():
    weight = torch.zeros(3)
    copy = checkpoint.snapshot({"a": [weight, 1]})
    weight.add_(1)
    assert copy["a"][0].tolist() == [0, 0, 0]


def test_a_failed_save_is_raised_at_the_next_call():
    args = argparse.Namespace(output_dir="/dev/full", checkpoint_dir="/dev/full", output_url="", checkpoints=True)
    saving = Saving(args, [], print)
    saving.save(state, vars(Position(samples_seen=64)))
    with pytest.raises(TrainingFailed, match=r"a checkpoint could not be written: .*/dev/full.*; no checkpoint yet"):
        saving.wait()
    saving.wait()


@pytest.mark.parametrize(
    "resume, overwrite, at, left",
    [
        (".", False, 300, [100, 200, 300]),  # the output folder: its newest
        ("checkpoints/000000000300.pt", False, 300, [100, 200, 300]),
        ("checkpoints/000000000200.pt", False, None, [100, 200, 300]),
        ("checkpoints/000000000200.pt", True, 200, [100, 200]),
    ],
)
def test_a_start_goes_back_to_an_older_checkpoint_of_its_own_where_later_ones_may_go(tmp_path, resume, overwrite, at, left):
    (folder := tmp_path / "checkpoints").mkdir()
    for number in (100, 200, 300):
        checkpoint.write(str(folder), state(), {**about(number), "run": "1", "identity": {}})
    args = argparse.Namespace(
        output_dir=str(tmp_path), checkpoint_dir=str(folder), tensorboard_dir=str(tmp_path), output_url=None,
        resume=str(tmp_path / resume), overwrite=overwrite, world=argparse.Namespace(restart_count=0),
    )  # fmt: skip
    refused = pytest.raises(UserError, match="later checkpoints in its folder: give --overwrite true to delete those")
    with contextlib.nullcontext() if at else refused:
        assert Saving(args, [], print).find()[1]["samples_seen"] == at
    assert checkpoint.numbers(str(folder)) == left


def test_the_checkpoint_that_a_start_has_gone_on_from_is_kept_as_any_other(tmp_path):
    (folder := tmp_path / "checkpoints").mkdir()
    for number in (100, 200):
        checkpoint.write(str(folder), state(), {**about(number), "run": "1", "identity": {}, "best": None})
    args = argparse.Namespace(
        output_dir=str(tmp_path), checkpoint_dir=str(folder), tensorboard_dir=str(tmp_path), output_url=None,
        resume="auto", overwrite=False, keep=2, checkpoints=True, world=argparse.Namespace(restart_count=0),
    )  # fmt: skip
    saving = Saving(args, [], print)
    assert saving.find()[1]["samples_seen"] == 200
    saving.save(state, {**vars(Position(total_steps=3)), **about(300), "best": None})
    saving.wait()
    assert checkpoint.numbers(str(folder)) == [200, 300]


def test_of_the_file_beside_weights_only_what_a_run_would_write_is_taken(tmp_path):
    """Another program's may have this name, and the same fields for something else."""
    ours = {"classes": ["猫", "dog"], "image_size": 64, "mean": [-0.5, 0.0, 0.5], "std": [0.2, 0.3, 1.0], "crop_pct": 1.0}
    write_weights(str(tmp_path / "epoch_2.pth"), {}, ours)
    assert about_weights(str(tmp_path / "epoch_2.pth")) == ours
    assert "猫" in (tmp_path / "epoch_2.json").read_text(), "people read it, too"
    theirs = {"author": "x", "classes": 10, "image_size": "large", "mean": 0.5, "crop_pct": True}
    for deviation in (-1.0, 0.0):
        (tmp_path / "epoch_3.json").write_text(json.dumps({"arch": "resnet18", **theirs, "std": [0.2, 0.3, deviation]}))
        assert about_weights(str(tmp_path / "epoch_3.pth")) == {"arch": "resnet18"}
