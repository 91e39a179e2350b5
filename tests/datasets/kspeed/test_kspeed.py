"""The users of the sample cache: data sets, DALI, the vendor's own package, launch kspeed. They get the bytes of the files."""

import dataclasses
import io
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from common.errors import UserError
from datasets import imagenet, kspeed
from datasets.kspeed import samples
from datasets.photos import files as photo_files
from datasets.photos import tree
from launch import kspeed as verb
from tests.tools.jobs import ROOT, environment
from tests.tools.memcached import Memcached
from tests.tools.permissions import of_anybody
from tests.tools.samples import LOGIN, PATIENT, folder, images_below, listed, locked, patient, rewrite_unseen, server, servers  # noqa: F401 (fixtures)

# --- Data sets ----------------------------------------------------------------------------------------------------------------


def test_it_stands_in_for_imagefolder(folder, server):
    arguments = (None, 2, server.address, None, None)
    ours = kspeed.KSpeedImageFolder(str(folder / "train"), *arguments, torchvision.transforms.PILToTensor())
    theirs = torchvision.datasets.ImageFolder(str(folder / "train"), torchvision.transforms.PILToTensor())
    ours.folder.cache.deadline = PATIENT
    assert isinstance(ours, torchvision.datasets.ImageFolder) and len(ours) == len(theirs) == 16
    for name in ("classes", "class_to_idx", "samples", "imgs", "targets", "extensions", "root"):
        assert getattr(ours, name) == getattr(theirs, name)
    for data in (ours, pickle.loads(pickle.dumps(ours))):  # the first fills, the second is answered
        for (image, label), (expected, target) in zip(data, theirs):
            assert torch.equal(image, expected) and label == target
    assert ours.loader(ours.samples[0][0]).mode == "RGB"
    path = ours.samples[3][0]
    old = rewrite_unseen(path)
    assert ours.folder.getBIN(path) == old and ours.folder.size(path) == len(old)
    assert np.array_equal(ours.folder.getPIL(path), Image.open(io.BytesIO(old)).convert("RGB"))


def test_a_part_of_a_tree_has_none_of_what_was_fetched_ahead_for_the_whole(folder, server):
    files = kspeed.through_cache(tree.load(str(folder / "train"), str(folder)), server.address)
    files.cache.deadline = PATIENT
    plain = [files.read(number) for number in range(len(files))]
    files.prefetch([0, 1])
    part = files.pick(np.array([5, 0]))
    assert [part.read(0), part.read(1)] == [plain[5], plain[0]]


def test_a_folder_that_cannot_be_listed_or_has_no_image_is_named(folder):
    (folder / "train" / "cat" / "more").mkdir(mode=0)
    with of_anybody(), pytest.raises(UserError, match=r"train/cat/more cannot be read \(Permission denied\)"):
        kspeed.KSpeedImageFolder(folder / "train", iplist="127.0.0.1:1")
    (folder / "train" / "cow").mkdir()
    (folder / "train" / "cat" / "more").chmod(0o755)
    with pytest.raises(UserError, match="train has no image of cow: add some, or delete the folders"):
        kspeed.KSpeedImageFolder(folder / "train", iplist="127.0.0.1:1")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_same_batches(folder, servers, workers):
    transform = torchvision.transforms.PILToTensor()
    ours = kspeed.KSpeedImageFolder(str(folder / "train"), None, 5, listed(servers), None, None, transform)
    ours.folder.cache.deadline = PATIENT
    ours.preload()
    for path, _ in ours.samples:
        assert ours.folder.cache.has(samples.sample_key(ours.root, path, os.stat(path)))
    theirs = torchvision.datasets.ImageFolder(str(folder / "train"), transform)
    expected = list(torch.utils.data.DataLoader(theirs, 5))
    for path, _ in ours.samples:
        rewrite_unseen(path)
    for (images, labels), (one, other) in zip(torch.utils.data.DataLoader(ours, 5, num_workers=workers), expected):
        assert torch.equal(images, one) and torch.equal(labels, other)


def test_a_changed_file_is_read_again(folder, server):
    data = kspeed.KSpeedFolder(folder / "train", iplist=[server.address])
    data.cache.deadline = PATIENT
    path = str(folder / "train" / "cat" / "0.jpg")
    first = data.getBIN(path)
    Path(path).write_bytes(b"x" * len(first))
    os.utime(path, ns=(1, 1))
    assert data.getBIN(path) == b"x" * len(first)
    Path(path).write_bytes(b"longer" * len(first))
    os.utime(path, ns=(1, 1))
    assert data.getBIN(path) == b"longer" * len(first)
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        data.getBIN(path)


def test_nothing_is_kept_of_a_file_that_is_being_written(folder, server, monkeypatch):
    cache, path = patient(server), str(folder / "train" / "cat" / "0.jpg")

    def read(path):
        content = Path(path).read_bytes()
        Path(path).write_bytes(content + b"more")
        return content

    content = Path(path).read_bytes()
    monkeypatch.setattr(photo_files, "read", read)
    assert samples.read_through(cache, str(folder), path) == content
    assert cache.status()[cache.servers.addresses[0]]["curr_items"] == 0


def test_two_files_of_one_name_size_and_time_are_told_apart(folder, server):
    one, other = (kspeed.KSpeedFolder(folder / split, iplist=server.address) for split in ("train", "val"))
    for data, content in ((one, b"1"), (other, b"2")):
        data.cache.deadline = PATIENT
        path = os.path.join(data.root, "cat", "0.jpg")
        Path(path).write_bytes(content)
        os.utime(path, ns=(1, 1))
    for _ in range(2):
        assert one.getBIN(os.path.join(one.root, "cat", "0.jpg")) == b"1"
        assert other.getBIN(os.path.join(other.root, "cat", "0.jpg")) == b"2"


def test_however_the_folder_is_written_the_key_is_the_same(folder, monkeypatch):
    path = folder / "train" / "cat" / "0.jpg"
    about = os.stat(path)
    expected = samples.sample_key(str(folder / "train"), str(path), about)
    monkeypatch.chdir(folder)
    assert samples.sample_key("train", "train/cat/0.jpg", about) == expected
    assert samples.sample_key("./train/", "./train//cat/0.jpg", about) == expected
    os.symlink(folder, folder.parent / "elsewhere")
    assert samples.sample_key(str(folder.parent / "elsewhere" / "train"), str(path), about) != expected


def test_a_tree_gives_its_photographs_through_the_cache(folder, servers):
    plain = tree.load(str(folder / "train"))
    cached = samples.CachedTree(**vars(plain), cache=patient(*servers))
    assert (cached.folder, cached.names, len(cached), cached.describe()) == (
        plain.folder,
        plain.names,
        len(plain),
        plain.describe(),
    )
    expected = [plain.read(number) for number in range(len(plain))]
    assert [cached.read(number) for number in range(len(plain))] == expected
    for name in plain.names:
        rewrite_unseen(os.path.join(plain.folder, name))
    assert (
        [cached.read(number) for number in range(len(plain))]
        == expected
        != [plain.read(number) for number in range(len(plain))]
    )
    some = pickle.loads(pickle.dumps(imagenet.spread(cached, 4)))
    assert [some.read(number) for number in range(4)] == expected[::4]
    assert dataclasses.replace(cached, folder="elsewhere").cache is cached.cache
    data = kspeed.KSpeedFolder(folder / "train", iplist=listed(servers))
    data.cache.deadline = PATIENT
    assert [data.getBIN(plain.path(number)) for number in range(len(plain))] == expected, "the keys are the same"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_photo_jobs_batches_are_the_same(folder, servers, workers):
    plain = tree.load(str(folder / "train"))
    cached = samples.CachedTree(**vars(plain), cache=patient(*servers))
    ids = np.arange(10)
    for files in (plain, cached, cached):
        data = imagenet.Photos(files, 24, True, 3)
        batches = torch.utils.data.DataLoader(data, sampler=[(0, ids), (1, ids)], batch_size=None, num_workers=workers)
        decoded = [images for images, _, _ in batches]
        if files is plain:
            expected = decoded
        assert all(map(torch.equal, decoded, expected))


# --- DALI -----------------------------------------------------------------------------------------------------------------------


def epoch_of(callable_, batch_size, epoch):
    """The labels and contents that it gives in an epoch, as DALI asks for them."""
    given = []
    for number in range(10**6):
        try:
            given.append(callable_(types.SimpleNamespace(idx_in_epoch=number, iteration=number // batch_size, epoch_idx=epoch)))
        except StopIteration:
            return [(sample.tobytes(), int(label[0])) for sample, label in given]


@pytest.mark.parametrize("shards, batch_size", [(1, 4), (2, 3), (3, 2), (3, 5), (16, 1)])
def test_the_shards_of_the_callable_are_disjoint_and_all_of_an_epoch(folder, server, shards, batch_size):
    root = folder / "train"
    parts = [kspeed.KSpeedCallable(str(root), batch_size, shard, shards, server.address) for shard in range(shards)]
    files = tree.load(str(root))
    known = {files.read(number): (number, files.labels[number]) for number in range(len(files))}
    assert len(known) == 16
    orders = []
    for epoch in (0, 1, 0):
        numbers = []
        for part in parts:
            given = epoch_of(part, batch_size, epoch)
            assert len(given) == part.full_iters * batch_size == 16 // shards // batch_size * batch_size
            assert all(known[content][1] == label for content, label in given)
            numbers.append([known[content][0] for content, _ in given])
        whole = [number for part in numbers for number in part]
        assert len(set(whole)) == len(whole)
        order = np.random.default_rng(seed=42 + epoch).permutation(16)
        assert numbers == [order[16 // shards * shard :][: len(numbers[0])].tolist() for shard in range(shards)]
        orders.append(whole)
    assert orders[0] == orders[2] != orders[1]


def test_a_subclass_sets_its_reader_or_returns_it(folder):
    class Reader:
        def getBIN(self, path):
            return path.encode()

    class AsInTheDocument(kspeed.KSpeedCallable):
        def load(self):
            self.dataset = Reader()

    class Returns(kspeed.KSpeedCallable):
        def load(self):
            return Reader()

    for form in (AsInTheDocument, Returns):
        sample, _ = form(str(folder / "train"), 4, 0, 1, "127.0.0.1:1")(
            types.SimpleNamespace(idx_in_epoch=0, iteration=0, epoch_idx=0)
        )
        assert sample.tobytes().startswith(os.fsencode(folder / "train")), form
    part = kspeed.KSpeedCallable(str(folder / "train"), 4, 0, 1, "127.0.0.1:1")
    assert part.load() is part.dataset is part


def test_too_few_images_for_a_batch_are_refused(folder):
    with pytest.raises(UserError, match="16 images make no batch of 9 for each of 2 shards"):
        kspeed.KSpeedCallable(str(folder / "train"), 9, 0, 2, "127.0.0.1:1")


def test_dali_asks_it_in_spawned_workers(folder, servers):
    from nvidia.dali import fn, pipeline_def, types

    callback = kspeed.KSpeedCallable(str(folder / "train"), 4, 1, 2, listed(servers), **LOGIN)
    callback.cache.deadline = PATIENT

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, py_num_workers=1, py_start_method="spawn")
    def build():
        samples, labels = fn.external_source(
            source=callback, num_outputs=2, batch=False, parallel=True, dtype=[types.UINT8, types.INT32], device="cpu"
        )
        return samples, labels

    pipeline = build()
    pipeline.build()
    files, asked = tree.load(str(folder / "train")), set()
    for epoch in range(2):
        order = np.random.default_rng(seed=42 + epoch).permutation(16)[8:].tolist()
        for batch in (order[:4], order[4:]):
            samples, labels = pipeline.run()
            for place, number in enumerate(batch):
                assert np.array(samples.at(place)).tobytes() == files.read(number)
                assert np.array(labels.at(place)).tolist() == [files.labels[number]]
        with pytest.raises(StopIteration):
            pipeline.run()
        pipeline.reset()
        asked.update(order)
    cached = sum(told["curr_items"] for told in callback.cache.status().values())
    assert len(asked) <= cached <= 16, "the workers went through the cache"


# --- The vendor's own ---------------------------------------------------------------------------------------------------------------


def test_the_vendors_package_is_used_where_it_is(folder, tmp_path, monkeypatch):
    assert samples.vendor_folder_class() is None
    files = tree.load(str(folder / "train"))
    assert isinstance(kspeed.through_cache(files, "127.0.0.1:1"), samples.CachedTree)
    package = tmp_path / "site" / "kspeed" / "utils" / "data"
    package.mkdir(parents=True)
    for place in (package, package.parent, package.parent.parent):
        (place / "__init__.py").touch()
    (package / "kspeeddataset.py").write_text(
        "class KSpeedFolder:\n    def __init__(self, *arguments):\n        self.arguments = arguments\n"
        "    def getBIN(self, path):\n        return b'vendor ' + path.encode()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    try:
        assert samples.vendor_folder_class().__module__ == "kspeed.utils.data.kspeeddataset"
        read = kspeed.through_cache(files, "127.0.0.1:1").read(0)
        assert read == b"vendor " + os.fsencode(files.path(0)), "the jobs' photographs, too"
        part = kspeed.KSpeedCallable(str(folder / "train"), 4, 0, 1, "127.0.0.1:1", **LOGIN)
        sample, _ = part(types.SimpleNamespace(idx_in_epoch=0, iteration=0, epoch_idx=0))
        assert sample.tobytes().startswith(b"vendor " + os.fsencode(folder / "train"))
        assert part.dataset.arguments == (str(folder / "train"), None, 0, "127.0.0.1:1", *LOGIN.values())
        (package / "kspeeddataset.py").write_text("import a_part_of_the_vendors_that_is_missing\n")
        forget_vendors()
        with pytest.raises(ModuleNotFoundError, match="a_part_of_the_vendors"):
            samples.vendor_folder_class()
    finally:
        forget_vendors()


def forget_vendors():
    for name in [name for name in sys.modules if name.split(".")[0] == "kspeed"]:
        del sys.modules[name]


# --- python -m launch kspeed ------------------------------------------------------------------------------------------------------------


def run(capsys, *words):
    """(exit code, stdout, stderr)"""
    code = verb.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_a_tree_is_preloaded_loaded_displayed_and_removed(folder, servers, capsys):
    there = ["--iplist", listed(servers)]
    other = patient(*servers)
    other.set("of somebody else", b"1")
    code, out, err = run(capsys, "preload", folder, *there)
    assert (code, err) == (0, "") and out.startswith("20 images, ") and "0 were there, 20 put there" in out
    assert "20 were there, 0 put there" in run(capsys, "preload", folder, *there)[1]
    plain = kspeed.KSpeedFolder(folder / "train", iplist=listed(servers))
    paths = images_below(folder / "train")
    expected = {path: rewrite_unseen(path) for path in paths}
    plain.cache.deadline = PATIENT
    assert {path: plain.getBIN(path) for path in paths} == expected, "what was preloaded is what a job asks for"
    for path, content in expected.items():
        about = os.stat(path)
        Path(path).write_bytes(content)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))

    code, out, err = run(capsys, "display", folder, *there)
    assert (code, err) == (0, "") and len(out.splitlines()) == 4 and "20 of 20 images" in out
    for one, line in zip(servers, out.splitlines()):
        assert line.startswith(one.address) and " up " in line and "evictions 0, memcached 1." in line and "of 67.1 MB" in line

    key = samples.sample_key(str(folder / "train"), paths[0], os.stat(paths[0]))
    other.delete(key)
    assert "19 hits, 1 misses, 1 put there" in run(capsys, "load", folder, *there)[1]
    code, out, err = run(capsys, "remove", folder, *there)
    assert (code, err) == (0, "") and out.startswith("20 images deleted") and other.get("of somebody else") == b"1"
    assert "0 of 20 images" in run(capsys, "display", folder, *there)[1]


def test_load_notices_a_damaged_value_and_preload_does_not(folder, server, capsys):
    from pymemcache.client.base import Client

    run(capsys, "preload", folder / "val", "--iplist", server.address)
    path = images_below(folder / "val")[0]
    cache = patient(server)
    key = samples.sample_key(str(folder / "val"), path, os.stat(path))
    Client(server.address).set(cache.values.hashed(key)[0], b"damaged", noreply=False)
    assert "4 were there, 0 put there" in run(capsys, "preload", folder / "val", "--iplist", server.address)[1]
    assert "3 hits, 1 misses, 1 put there" in run(capsys, "load", folder / "val", "--iplist", server.address)[1]
    assert cache.get(key) == Path(path).read_bytes()


def test_what_is_too_large_or_unreadable_is_counted(folder, server, capsys):
    (folder / "val" / "cat" / "large.jpg").write_bytes(bytes(2_000_000))
    (folder / "val" / "cat" / "gone.jpg").symlink_to("nowhere")
    code, out, _ = run(capsys, "preload", folder / "val", "--iplist", server.address)
    assert code == 0 and "4 put there, 1 refused as too large (memcached -I), 1 unreadable" in out


def test_a_server_that_cannot_be_reached_is_exit_code_1(folder, servers, capsys):
    servers[0].kill()
    code, out, err = run(capsys, "preload", folder, "--iplist", listed(servers[:2]))
    assert (
        code == 1
        and "20 put there" in out
        and err == f"error: no answer from {servers[0].address}: start what is down, or leave it out of --iplist\n"
    )
    code, out, err = run(capsys, "display", "--iplist", listed(servers[:2]))
    assert code == 1 and f"{servers[0].address:24} down\n" in out and " up " in out
    code, out, err = run(capsys, "load", folder, "--iplist", servers[0].address)
    assert code == 1 and err == "error: no cache server answers: start one, or check --iplist and KSPEED_IPLIST\n"


def test_mistakes_of_the_user_are_exit_code_2(folder, capsys, monkeypatch):
    (folder / "empty").mkdir()
    for words, expected in (
        (["preload", folder], "no cache server is given"),
        (["preload", folder, "--iplist", "a:b"], "'a:b' is no cache server"),
        (["preload", folder, "--iplist", "::1"], "'::1' is no cache server"),
        (["preload", folder, "--iplist", "[::1"], "'[::1' is no cache server"),
        (["load", folder, "--iplist", "a", "--user", "admin"], "the password of the cache's user admin is missing"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 2 and err.startswith(f"error: {expected}") and err.count("\n") == 1
    with Memcached() as server:
        for root, expected in (("nowhere", "does not exist"), (folder / "empty", "holds no image")):
            code, _, err = run(capsys, "remove", root, "--iplist", server.address)
            assert code == 2 and expected in err
    for words in (["preload"], ["preload", folder, "--threads", 0]):
        with pytest.raises(SystemExit) as left:
            run(capsys, *words)
        assert left.value.code == 2


def test_it_is_a_verb_and_takes_the_password_from_the_environment(folder, locked, capsys, monkeypatch):
    env = environment(KSPEED_PASSWORD=LOGIN["password"], KSPEED_IPLIST=locked.address)
    command = [sys.executable, "-m", "launch", "kspeed", "preload", folder, "--user", "admin"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "20 put there" in done.stdout and LOGIN["password"] not in done.stdout + done.stderr
    monkeypatch.setenv("KSPEED_PASSWORD", "wrong")
    code, out, err = run(capsys, "load", folder, "--user", "admin", "--iplist", locked.address)
    assert (
        code == 1
        and "refuses the user or the password" in out
        and err == "error: no cache server answers: start one, or check --iplist and KSPEED_IPLIST\n"
    )
