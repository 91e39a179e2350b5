"""Order, augmentation and the ways CIFAR-10 arrives: whole, missing, damaged or hostile."""

import gzip
import hashlib
import http.server
import io
import os
import pickle
import re
import struct
import tarfile
import threading
import types

import numpy as np
import pytest
import torch

from common import storage
from common.errors import UserError
from common.storage import https
from common.world.folders import FETCHING
from datasets import cifar10, crops, synthetic, untrusted
from datasets.sampler import EpochSampler, InOrder

# --- Order -------------------------------------------------------------------------------------------------------------


def batches(sampler):
    return [ids.tolist() for ids in sampler]


def test_the_order_is_a_function_of_seed_and_epoch():
    sampler = EpochSampler(100, 10, seed=3)
    sampler.start_at(epoch=2, consumed=0)
    assert np.array_equal(np.concatenate(list(sampler)), np.random.default_rng(5).permutation(100))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_global_batches_are_the_same_sets_at_every_world_size(world_size):
    """And rank r takes its r-th contiguous slice; together every sample that fills a step exactly once."""
    reference = EpochSampler(103, 20, seed=0)
    shards = []
    for rank in range(world_size):
        shard = EpochSampler(103, 20 // world_size, seed=0)
        shard.shard(rank, world_size)
        shards.append(batches(shard))
    joined = [sum(step, []) for step in zip(*shards)]
    assert joined == batches(reference)
    assert len(set(sum(joined, []))) == 100 == reference.samples_per_epoch


def test_resuming_in_mid_epoch_goes_on_with_the_next_sample_also_at_another_global_batch():
    whole, rest = EpochSampler(100, 10, seed=0), EpochSampler(100, 10, seed=0)
    rest.start_at(epoch=0, consumed=30)
    assert batches(rest) == batches(whole)[3:] and len(rest) == 7
    rest.set_global_batch(20)
    assert sum(batches(rest), []) == sum(batches(whole), [])[30:90] and rest.samples_per_epoch == 90


@pytest.mark.parametrize("count, ranks", [(n, w) for n in range(97, 104) for w in (1, 2, 3, 4)])
def test_evaluation_counts_every_sample_once(count, ranks):
    seen = []
    for rank in range(ranks):
        sampler = InOrder(count, 10)
        sampler.shard(rank, ranks)
        assert len(batches(sampler)) == len(sampler)
        seen += sum(batches(sampler), [])
    assert sorted(seen) == list(range(count))


def test_impossible_batches_are_refused_saying_what_is_possible():
    with pytest.raises(UserError, match="fewer than one global batch of 128"):
        EpochSampler(100, 128, seed=0)
    sampler = EpochSampler(1000, 10, seed=0)
    sampler.shard(0, 3)
    with pytest.raises(UserError, match=r"\[1, 2, 4, 8, 16, 32\] ranks"):
        sampler.set_global_batch(32)


# --- Augmentation ------------------------------------------------------------------------------------------------------


def pictures(count):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )


def test_a_picture_looks_the_same_in_every_batch():
    images, ids = pictures(16), torch.arange(100, 116)
    whole = crops.crop_and_flip(images, ids, seed=1, epoch=2)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    parts = [crops.crop_and_flip(images[part], ids[part], seed=1, epoch=2) for part in order.split(5)]
    assert torch.equal(torch.cat(parts), whole[order])
    assert not torch.equal(whole, crops.crop_and_flip(images, ids, seed=1, epoch=3))
    assert not torch.equal(whole, crops.crop_and_flip(images, ids, seed=2, epoch=2))


def test_every_result_is_a_crop_of_the_padded_image_flipped_or_not_and_all_162_occur_alike():
    image = pictures(1)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))[0]
    counts = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 32, left : left + 32]
            counts[crop.numpy().tobytes()], counts[crop.flip(2).contiguous().numpy().tobytes()] = 0, 0
    count = 162 * 50
    for image_out in crops.crop_and_flip(image.expand(count, -1, -1, -1), torch.arange(count), seed=0, epoch=0):
        counts[image_out.contiguous().numpy().tobytes()] += 1  # a KeyError is a picture that is no crop
    assert len(counts) == 162 and min(counts.values()) > 20 and max(counts.values()) < 90


def test_the_loader_gives_normalised_channels_last_batches_and_knows_their_ids():
    images, labels = synthetic.cifar_like(64, "train")
    data = cifar10.ImageArrays(images, labels, classes=[])
    for workers in (0, 2):
        loader = cifar10.loader(data, EpochSampler(64, 16, seed=0), torch.device("cpu"), workers=workers)
        for batch, targets in loader:
            mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (cifar10.MEAN, cifar10.STD))
            expected = (torch.from_numpy(images[loader.ids]).float() / 255 - mean) / std
            assert torch.allclose(batch, expected, atol=1e-5) and batch.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(targets, torch.from_numpy(labels[loader.ids]))
        assert len(loader) == 4


def test_synthetic_images_have_the_promised_shapes_and_are_the_same_every_time():
    args = types.SimpleNamespace(custom_data=True, max_samples=None)
    train, test = cifar10.load(args)
    assert (train.images.shape, test.images.shape) == ((5000, 3, 32, 32), (1000, 3, 32, 32))
    assert train.images.dtype == torch.uint8 and sorted(set(train.labels.tolist())) == list(range(10))
    again, _ = cifar10.load(args)
    few, _ = cifar10.load(types.SimpleNamespace(custom_data=True, max_samples=100))
    assert torch.equal(train.images[:100], few.images) and torch.equal(train.labels[:100], few.labels)
    assert torch.equal(train.images, again.images) and not torch.equal(train.images[:1000], test.images)


# --- CIFAR-10 from a folder, an archive, a server ------------------------------------------------------------------------


class Python2Pickler(pickle._Pickler):
    """Byte strings as Python 2 wrote them into the original batches."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
        self.write(head + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes
    dispatch[str] = lambda self, value: self.save_bytes(value.encode("latin1"))


def python2(value):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch(count=4, **changed):
    content = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": [i % 10 for i in range(count)],
        b"data": np.arange(count * 3072, dtype=np.uint8).reshape(count, 3072),
        b"filenames": [b"x_%d.png" % i for i in range(count)],
    }
    content.update({name.encode(): value for name, value in changed.items()})
    return {name: value for name, value in content.items() if value is not None}


def write_folder(folder, count=4):
    folder.mkdir(parents=True)
    for name in cifar10.TRAIN_FILES + cifar10.TEST_FILES:
        (folder / name).write_bytes(python2(batch(count)))
    (folder / "batches.meta").write_bytes(python2({b"label_names": [b"a"]}))
    (folder / "readme.html").write_text("")


def write_archive(path, source):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, "cifar-10-batches-py")


def arguments(folder, output):
    return types.SimpleNamespace(custom_data=False, max_samples=None, data_url=folder and str(folder), output_dir=str(output))


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_folder(folder / "cifar-10-batches-py")
    write_archive(folder / "cifar-10-python.tar.gz", folder / "cifar-10-batches-py")
    return folder / "cifar-10-python.tar.gz"


def test_a_folder_with_the_batches(archive, tmp_path):
    for root in (archive.parent, archive.parent / "cifar-10-batches-py"):
        train, test = cifar10.load(arguments(root, tmp_path))
        assert (len(train), len(test)) == (20, 4)
        assert torch.equal(test.images.reshape(4, 3072), torch.arange(4 * 3072).to(torch.uint8).view(4, 3072))
        assert test.labels.tolist() == [0, 1, 2, 3] and test.classes[3] == "cat"


def test_a_folder_with_the_archive_is_unpacked_once(archive, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    os.link(archive, data / archive.name)
    assert len(cifar10.load(arguments(data, tmp_path))[0]) == 20
    (data / archive.name).unlink()  # the second start needs it no more
    assert len(cifar10.load(arguments(data, tmp_path))[0]) == 20


def test_a_folder_with_neither_names_both(tmp_path):
    with pytest.raises(UserError, match=r"neither cifar-10-batches-py nor cifar-10-python.tar.gz.*--custom_data true"):
        cifar10.load(arguments(tmp_path, tmp_path))


def test_a_missing_batch_is_named(tmp_path):
    write_folder(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(UserError, match="lacks data_batch_3"):
        cifar10.load(arguments(tmp_path, tmp_path))


class Server(http.server.ThreadingHTTPServer):
    """Serves one body; `cut` answers break off after so many bytes, and every request's Range is written down."""

    def __init__(self, body, cuts=(), ranges=True, headers=None):
        self.body, self.cuts, self.ranges, self.asked, self.headers = body, list(cuts), ranges, [], headers or {}
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/cifar-10-python.tar.gz"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        begin = int(asked.split("=")[1].rstrip("-")) if asked and server.ranges else 0
        if begin >= len(server.body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.body)}")
            self.end_headers()
            return
        rest = server.body[begin:]
        self.send_response(206 if begin else 200)
        own = {"Content-Length": str(len(rest))}
        if begin:
            own["Content-Range"] = f"bytes {begin}-{len(server.body) - 1}/{len(server.body)}"
        for name, value in {**own, **server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(rest[: server.cuts.pop(0)] if server.cuts else rest)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*args, **kwargs):
        servers.append(Server(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


BODY = bytes(range(256)) * 40000
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed(serve, tmp_path, ranges):
    server = serve(BODY, cuts=[3_000_000, 1_000_000], ranges=ranges)
    https.download(server.url, str(tmp_path / "file"), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY
    assert len(server.asked) == 3 and server.asked[1].startswith("bytes=")
    assert os.listdir(tmp_path) == ["file"]


def test_a_later_start_fetches_only_the_rest(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "file.part").write_bytes(BODY[:9_000_000])
    https.download(server.url, str(tmp_path / "file"), DIGEST)
    assert server.asked == ["bytes=9000000-"] and (tmp_path / "file").read_bytes() == BODY


def test_what_was_begun_of_another_longer_file_is_not_taken_for_this_one(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "file.part").write_bytes(b"of another" * len(BODY))
    https.download(server.url, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == BODY and server.asked[1] is None


def test_a_whole_part_needs_only_its_name(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "file.part").write_bytes(BODY)
    https.download(server.url, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == BODY and len(server.asked) == 1


def test_a_link_at_the_name_of_a_part_is_not_followed(serve, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "file.part").symlink_to(tmp_path / "victim")
    https.download(serve(BODY).url, str(tmp_path / "file"), DIGEST)
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "file").read_bytes() == BODY


@pytest.mark.parametrize("have", [b"", BODY[:1000], BODY + b"more"])
def test_a_wrong_digest_leaves_nothing(serve, tmp_path, have):
    server = serve(BODY[:-1] + b"x")
    if have:
        (tmp_path / FETCHING).mkdir()
        (tmp_path / FETCHING / "file.part").write_bytes(have)
    with pytest.raises(UserError, match=f"expected {DIGEST}"):
        https.download(server.url, str(tmp_path / "file"), DIGEST)
    assert os.listdir(tmp_path) == []


BAD_ADDRESSES = [
    "https://h:99999/x",
    "https://h:abc/x",
    "https://[::1/x",
    "https://[zz]/x",
    "https:///x",
    "https://h/a b",
    "https://h/\n",
]


@pytest.mark.parametrize("url", BAD_ADDRESSES)
def test_an_address_that_is_none_is_one_line(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    for fetch in (lambda: https.download(url, "x"), lambda: storage.fetch(url), lambda: https.refuse_unsafe(url)):
        with pytest.raises(UserError, match="is not an https:// address") as refused:
            fetch()
        assert "\n" not in str(refused.value)
    assert not os.path.exists("x")


GZIPPED = gzip.compress(bytes(range(256)) * 40)
WRONG_ANSWERS = {
    "no number": (GZIPPED, {"Content-Length": "abc"}, "states the length 'abc'"),
    "negative": (GZIPPED, {"Content-Length": "-5"}, "states the length '-5'"),
    "underscore": (GZIPPED, {"Content-Length": "1_0"}, "states the length '1_0'"),
    "short": (GZIPPED, {"Content-Length": "99999"}, "cannot be fetched: the connection closed after"),
    "page": (b"<html>log in</html>", {"Content-Type": "text/html; charset=utf-8"}, "answered with a page"),
    "page that does not say so": (b"<html>log in</html>", {}, "is no whole archive: Not a gzipped file"),
    "flipped": (bytes(b ^ (i == len(GZIPPED) - 9) for i, b in enumerate(GZIPPED)), {}, "is no whole archive"),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_a_wrong_answer_is_one_line_and_leaves_nothing_under_the_final_name(serve, tmp_path, monkeypatch, name):
    monkeypatch.setattr(https, "ATTEMPTS", 2)
    body, headers, words = WRONG_ANSWERS[name]
    server = serve(body, ranges=False, headers=headers)
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        https.download(server.url, str(tmp_path / "x.tar.gz"))
    assert "\n" not in str(refused.value) and not (tmp_path / "x.tar.gz").exists()


def test_another_part_than_was_asked_for_is_not_appended(serve, tmp_path):
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "file.part").write_bytes(BODY[:7])
    https.download(serve(BODY, headers={"Content-Range": "bytes 5-9/10"}).url, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == BODY


@pytest.mark.parametrize("url", ["http://example.com/x", "file:///etc/passwd", "ftp://h/x"])
def test_only_https_is_fetched(tmp_path, url):
    with pytest.raises(UserError, match="not an https:// address"):
        https.download(url, str(tmp_path / "x"), DIGEST)


def test_nothing_given_downloads_once_for_all_processes(serve, tmp_path, monkeypatch, archive):
    server = serve(archive.read_bytes())
    monkeypatch.setattr(cifar10, "URL", server.url)
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.chdir(tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(cifar10.load(arguments(None, tmp_path))[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20] * 4 and server.asked == [None]


# --- Hostile archives and pickles ----------------------------------------------------------------------------------------


def member(name, content=b"x", **attributes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, content


def archive_of(*members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def good_members(without=()):
    names = [*cifar10.TRAIN_FILES, *cifar10.TEST_FILES, "batches.meta", "readme.html"]
    return [member(f"cifar-10-batches-py/{name}", python2(batch())) for name in names if name not in without]


D = "cifar-10-batches-py/"
LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE_ARCHIVES = {
    "parent": archive_of(*good_members(), member("../evil")),
    "parent with an expected name": archive_of(*good_members(), member("../../data_batch_1")),
    "absolute": archive_of(*good_members(), member("/tmp/anyrank-evil")),
    "absolute with an expected name": archive_of(*good_members(["test_batch"]), member("/test_batch")),
    "symlink": archive_of(*good_members(), member(D + "link", b"", type=LINK, linkname="/etc/passwd")),
    "symlink with an expected name": archive_of(
        *good_members(["test_batch"]), member(D + "test_batch", b"", type=LINK, linkname="/etc/passwd")
    ),
    "symlinked folder, then a file through it": archive_of(member(D[:-1], b"", type=LINK, linkname="/tmp"), *good_members()),
    "hard link": archive_of(*good_members(["test_batch"]), member(D + "test_batch", b"", type=HARD, linkname="/etc/passwd")),
    "device": archive_of(
        *good_members(["test_batch"]), member(D + "test_batch", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
    ),
    "fifo": archive_of(*good_members(["test_batch"]), member(D + "test_batch", b"", type=tarfile.FIFOTYPE)),
    "unexpected file": archive_of(*good_members(), member(D + "sitecustomize.py", b"import os")),
    "twice": archive_of(*good_members(), member(D + "test_batch", b"other")),
    "other case": archive_of(*good_members(["test_batch"]), member(D + "TEST_BATCH")),
    "deeper": archive_of(*good_members(["test_batch"]), member("a/b/test_batch")),
    "name with a line end": archive_of(*good_members(), member(D + "x\ny")),
    "missing member": archive_of(*good_members(["data_batch_2"])),
    "empty": archive_of(),
    "bomb": gzip.compress(archive_of(member(D + "test_batch", bytes(300 * 2**20)), mode="w")),
    "giant header": gzip.compress(
        tarfile.TarInfo.create_pax_global_header({"comment": "x"})[:124] + b"77777777777\0" + b" " * 376
    ),
    "sparse giant": archive_of(*good_members(["test_batch"]), member(D + "test_batch", b"", type=tarfile.GNUTYPE_SPARSE)),
    "a second archive after the first": archive_of(*good_members()) + archive_of(*good_members()) + b"more",
    "cut off in the checksum": archive_of(*good_members())[:-6],
    "truncated": archive_of(*good_members())[:-200],
    "not gzip": b"<html>404 Not Found</html>",
    "gzip of rubbish": gzip.compress(b"rubbish" * 1000),
    "flipped bit": bytes(b ^ (i == 300) for i, b in enumerate(archive_of(*good_members()))),
    "nothing": b"",
}


def test_a_flipped_bit_anywhere_in_an_archive_is_noticed(tmp_path):
    """Stored without compression, a flipped bit of a pixel leaves everything as it was but the checksum at the very end."""
    whole = gzip.compress(archive_of(*good_members(), mode="w"), compresslevel=0)
    names = [os.path.basename(info.name) for info, _ in good_members()]
    untrusted.unpack(write(tmp_path / "whole", whole), str(tmp_path / "good"), names, cifar10.MAX_UNPACKED)
    header = 10  # of gzip: a time and a system, which say nothing of the files
    for place in np.random.default_rng(0).integers(8 * header, 8 * len(whole), 300):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path = write(tmp_path / "flipped", bytes(content))
        with pytest.raises(UserError, match="cannot be unpacked"):
            untrusted.unpack(path, str(tmp_path / "data"), names, cifar10.MAX_UNPACKED)
    assert sorted(os.listdir(tmp_path)) == ["flipped", "good", "whole"]


def test_an_archive_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / cifar10.ARCHIVE)
    with pytest.raises(UserError, match="is not a regular file"):
        cifar10.load(arguments(tmp_path, tmp_path))


def write(path, content):
    path.write_bytes(content)
    return str(path)


def test_an_archive_that_is_not_the_published_one_is_named(archive, tmp_path, monkeypatch, capsys):
    for number, digest in enumerate([cifar10.SHA256, hashlib.sha256(archive.read_bytes()).hexdigest()]):
        data = tmp_path / str(number)
        data.mkdir()
        os.link(archive, data / archive.name)
        monkeypatch.setattr(cifar10, "SHA256", digest)
        cifar10.load(arguments(data, tmp_path))
    said = capsys.readouterr().out
    assert said.count("is not the published archive") == 1 and str(tmp_path / "0" / archive.name) in said


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_a_hostile_archive_writes_nothing_outside(name, tmp_path):
    data = tmp_path / "deep" / "data"
    data.mkdir(parents=True)
    (data / cifar10.ARCHIVE).write_bytes(HOSTILE_ARCHIVES[name])
    with pytest.raises(UserError, match="cannot be unpacked"):
        cifar10.load(arguments(data, tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"deep", "deep/data", f"deep/data/{cifar10.ARCHIVE}", f"deep/data/{cifar10.FOLDER}.lock"}
    assert not os.path.exists("/tmp/anyrank-evil")


RAN = []


def trap(*_):
    RAN.append(1)


class Calls:
    """Pickled as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def dumps(value, protocol=2):
    return pickle.dumps(value, protocol)


TRAP = b"ctests.test_data\ntrap\n"
HEAD = b"\x80\x02"
HOSTILE_PICKLES = {
    **{f"calls our trap, protocol {p}": dumps(Calls(trap), p) for p in range(6)},
    **{
        f"calls {f.__name__}, protocol {p}": dumps(Calls(f, "1"), p)
        for f in (os.system, eval, exec, __import__, open)
        for p in (0, 2, 4)
    },
    "the trap inside a batch": dumps(batch(labels=Calls(trap))),
    "the trap as the array": dumps(batch(data=Calls(trap))),
    "GLOBAL": HEAD + TRAP + b"(tR.",
    "INST": b"(itests.test_data\ntrap\n.",
    "OBJ": b"(" + TRAP + b"o.",
    "NEWOBJ": HEAD + TRAP + b")\x81.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x0ftests.test_data\x8c\x04trap\x93)R.",
    "extension registry": HEAD + b"\x82\x01)R.",
    "persistent id": b"Pid\n.",
    "reduce on a builtin through getattr": HEAD + b"c__builtin__\ngetattr\n.",
    "numpy's own loader": HEAD + b"cnumpy\nload\n(U\x05/etc/tR.",
    "numpy.core.multiarray.scalar": HEAD + b"cnumpy.core.multiarray\nscalar\n.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0etesting.sys.e\x93.",
    "memo bomb": HEAD + b"]r\xff\xff\xff\x7f.",
    "long": HEAD + b"\x8b\xff\xff\xff\x7f" + b"1" * 10,
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "object array": dumps(batch(data=np.array([[1, "a"]], dtype=object))),
    "float array": dumps(batch(data=np.zeros((4, 3072)))),
    "wrong shape": python2(batch(data=np.zeros((4, 3000), np.uint8))),
    "one dimension": python2(batch(data=np.zeros(3072, np.uint8))),
    "no images": python2(batch(data=np.zeros((0, 3072), np.uint8), labels=[])),
    "fewer labels": python2(batch(labels=[1])),
    "label 10": python2(batch(labels=[0, 1, 2, 10])),
    "label -1": python2(batch(labels=[0, 1, 2, -1])),
    "label of another type": python2(batch(labels=[0, 1, 2, None])),
    "no data": python2(batch(data=None)),
    "no labels": python2(batch(labels=None)),
    "a list": python2([1, 2]),
    "truncated": python2(batch())[:-100],
    "empty": b"",
    "text": b"hello",
    "html": b"<html>404</html>",
    "deep": HEAD + b"(" * 100_000,
    "array claims a giant shape": python2(batch()).replace(struct.pack("<H", 3072), struct.pack("<H", 65535)),
}


def test_there_are_60_hostile_inputs():
    assert len(HOSTILE_ARCHIVES) + len(HOSTILE_PICKLES) >= 60


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_hostile_pickle_runs_nothing(name, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(HOSTILE_PICKLES[name])
    RAN.clear()
    with pytest.raises(UserError, match="is not a CIFAR-10 batch") as refused:
        untrusted.read_batch(str(path))
    assert not RAN and "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == ["data_batch_1"]


def test_the_traps_would_have_worked(tmp_path):
    """The same bytes run in Python's own unpickler, so the tests above are not empty."""
    RAN.clear()
    for name in ("calls our trap, protocol 2", "GLOBAL", "INST", "OBJ", "STACK_GLOBAL"):
        pickle.loads(HOSTILE_PICKLES[name])
    assert len(RAN) == 5
