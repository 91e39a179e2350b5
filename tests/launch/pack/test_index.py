"""Shards of WebDataset and tables of parquet as they lie: the samples are those of the folder, or they are refused in a line."""

import io
import itertools
import json
import random
import shutil
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.storage.listing import SPARE
from datasets.packs import arrival, packed
from datasets.photos import splits, tree
from launch.pack import command
from tests.tools.hostile import mutated
from tests.tools.jobs import NETWORK, assert_same_bits, final_state, run_job, wait_for
from tests.tools.packages import python_package
from tests.tools.packs import elsewhere, encoded, fetchers, passing, reached, run  # noqa: F401 (fixtures)

CLASSES = ["daisy", "rose", "tulip"]
LABELS = {  # {how the class is said: (part of a sample, key)}
    "number": lambda n, name: ({"cls": str(n)}, f"{n}{name}"),
    "name": lambda n, name: ({"cls": CLASSES[n]}, f"{n}{name}"),
    "json": lambda n, name: ({"json": {"label": n, "caption": "of a flower"}}, f"{n}{name}"),
    "folder": lambda n, name: ({}, f"{CLASSES[n]}/{name}"),
}


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    root = tmp_path_factory.mktemp("flowers")
    for split, count in (("train", 8), ("val", 3)):
        for (n, name), number in itertools.product(enumerate(CLASSES), range(count)):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            form = {2: "PNG", 5: "WEBP"}.get(number, "JPEG")
            (root / split / name / f"{number:03d}.{form.lower()}").write_bytes(encoded(10 * n + number + len(split), form))
    return root


@pytest.fixture
def webdataset(monkeypatch):
    for requirement in ("webdataset==0.2.111", "braceexpand==0.1.7"):
        monkeypatch.syspath_prepend(python_package(requirement))
    return pytest.importorskip("webdataset")


def write_shards(webdataset, flowers, folder, said, names=("flowers-train-%02d.tar", "flowers-validation-%02d.tar")):
    folder.mkdir()
    draw = random.Random(0)
    for split, name in zip(splits.SPLITS, names):
        files = [(n, path) for n, label in enumerate(CLASSES) for path in sorted((flowers / split / label).iterdir())]
        draw.shuffle(files)
        with webdataset.ShardWriter(str(folder / name), maxcount=5, verbose=0) as writer:
            for n, path in files:
                more, key = LABELS[said](n, path.stem)
                writer.write({"__key__": key, path.suffix[1:]: path.read_bytes(), **more, "txt": "more"})
    if said in ("number", "json"):
        (folder / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


def assert_same_samples(part, files):
    assert (part.classes, part.left_out, len(part)) == (files.classes, files.left_out, len(files))
    for name in ("labels", "widths", "heights", "special"):
        assert np.array_equal(getattr(part, name), getattr(files, name)), name
    assert [part.read(number) for number in range(len(part))] == [files.read(number) for number in range(len(files))]


@pytest.mark.parametrize("said", LABELS)
def test_shards_of_webdataset_have_the_samples_of_the_folder(webdataset, flowers, tmp_path, said):
    shards = write_shards(webdataset, flowers, tmp_path / "shards", said)
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    assert "24 for train, 9 for val, 3 classes, in 7 shards" in run("--index", shards).stdout
    for split in splits.SPLITS:
        assert_same_samples(packed.load(str(shards), split), tree.load(str(flowers / split), str(tmp_path)))
    assert {path.name for path in shards.iterdir()} - before.keys() == {"train-index.npz", "val-index.npz"}
    assert all((shards / name).read_bytes() == content for name, content in before.items())
    assert "33 images in 7 shards are as they were packed" in run("--verify", shards).stdout
    assert "has an index: give --overwrite true" in run("--index", shards, check=2).stderr
    run("--index", shards, "--overwrite", "true")


def test_where_no_name_says_val_a_fifth_is_held_out_and_comes_from_the_same_shards(
    webdataset, flowers, store, reached, tmp_path, monkeypatch
):
    flat = shutil.copytree(flowers / "train", tmp_path / "flat")
    shards = write_shards(webdataset, flowers, tmp_path / "shards", "folder", names=("flowers-%02d.tar", "late-%02d.tar"))
    for path in shards.glob("late*"):
        path.unlink()
    for path in shards.iterdir():
        store.client().upload_file(str(path), "data", f"flowers/{path.name}")
    store.client().upload_file(str(path), "data", f"flowers/below/{path.name}")  # of another folder, as on a disk
    run("--index", "s3://data/flowers")
    there = {item["Key"] for item in store.client().list_objects(Bucket="data", Prefix="flowers/")["Contents"]}
    assert there - {f"flowers/below/{path.name}"} == {
        f"flowers/{name}" for name in ("train-index.npz", "val-index.npz", *(path.name for path in shards.iterdir()))
    }
    expected = splits.hold_out(tree.load(str(flat), str(tmp_path)), 0)
    parts = arrival.begin("s3://data/flowers", splits.SPLITS, "input_dir", starts_fetcher=True)
    for part, files in zip(parts, expected):
        assert part.names == files.names and {shard["name"] for shard in part.shards} <= {
            path.name for path in shards.iterdir()
        }
        assert_same_samples(part, files)
    assert passing("s3://data/flowers", "val").read(1) == expected[1].read(1)


def tar_of(*members):
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w") as archive:
        for name, content_of, *more in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content_of), *(more or [tarfile.REGTYPE])
            archive.addfile(info, io.BytesIO(content_of))
    return content.getvalue()


PICTURE = encoded(1)
GOOD = [(f"{label}/{n}.jpg", encoded(n)) for label in CLASSES for n in range(4)]
REFUSED = {
    "absolute": (tar_of(*GOOD, ("/rose/9.jpg", PICTURE)), "'/rose/9.jpg' in it is no name of a file below a folder"),
    "parent": (tar_of(*GOOD, ("../rose/9.jpg", PICTURE)), "is no name of a file below"),
    "parent, unwanted": (tar_of(*GOOD, ("rose/../../9.txt", b"")), "is no name of a file below"),
    "link": (tar_of(*GOOD, ("rose/9.jpg", b"", tarfile.SYMTYPE)), "'rose/9.jpg' in it is not a plain file"),
    "hard link": (tar_of(*GOOD, ("rose/9.jpg", b"", tarfile.LNKTYPE)), "is not a plain file"),
    "device": (tar_of(*GOOD, ("rose/9.jpg", b"", tarfile.CHRTYPE)), "is not a plain file"),
    "twice": (tar_of(*GOOD, GOOD[0]), "daisy/0 has two of picture"),
    "two pictures": (tar_of(*GOOD, ("daisy/0.png", PICTURE)), "daisy/0 has two of picture"),
    "ten thousand of one key": (tar_of(*[("rose/1.jpg", b"")] * 10_000), "rose/1 has two of picture"),
    "two labels": (tar_of(*GOOD, ("daisy/0.cls", b"1"), ("daisy/0.cls", b"1")), "daisy/0 has two of cls"),
    "a long label": (tar_of(*GOOD, ("daisy/0.cls", bytes(2 << 20))), "daisy/0.cls is too long for a label"),
    "no number": (tar_of(*GOOD, ("daisy/0.json", b'{"label": [1]}')), "label in daisy/0.json is neither a number nor a name"),
    "many classes": (tar_of(("0.jpg", PICTURE), ("0.cls", b"999999999")), "has class 999999999 (a.tar:0.jpg), and a number is a place among the classes"),
    "no class": (tar_of(("0.jpg", PICTURE)), "has no picture with a class"),
    "no picture": (tar_of(("0.txt", b"x")), "has no picture with a class"),
    "cut off": (tar_of(*GOOD)[:5000], "cannot be read: it is cut off"),
    "cut off between two": (tar_of(*GOOD)[: tar_of(*GOOD).index(b"rose/2.jpg")], "cannot be read: it is cut off"),
    "a damaged header": (tar_of(*GOOD).replace(b"rose/2.jpg", b"rose/3.jpg"), "cannot be read: bad checksum"),
    "more after it": (tar_of(*GOOD) + b"more", "it goes on after its end"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_shard_of_pictures_is_refused_in_a_line(tmp_path, why):
    content, said = REFUSED[why]
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.tar").write_bytes(content)
    (line,) = run("--index", tmp_path / "shards", check=2).stderr.splitlines()
    assert said in line and line.startswith("error: ") and line.isprintable() and len(line) < 400
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["a.tar"]


def test_of_500_damaged_shards_each_is_refused_in_a_line_or_its_samples_are_where_the_index_says(tmp_path):
    good, draw, refused = tar_of(*GOOD[::3]), random.Random(3), 0
    path = tmp_path / "shards" / "a.tar"
    path.parent.mkdir()
    for _ in range(500):
        path.write_bytes(mutated(good, draw))
        if draw.random() < 0.5:  # in a header, of which a shard has few bytes
            content = bytearray(good)
            content[512 * draw.randrange(len(good) // 512) + draw.randrange(160)] = draw.randrange(256)
            path.write_bytes(bytes(content))
        try:
            command.index.index(str(path.parent), options())
        except UserError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 400
            continue
        content = path.read_bytes()
        for part in (packed.load(str(path.parent), split) for split in splits.SPLITS):
            for number in range(len(part)):
                begin, length = int(part.offset[number]), int(part.length[number])
                assert (
                    part.read(number) == content[begin : begin + length]
                    and zlib.crc32(part.read(number)) == part.checksum[number]
                )
    assert 100 < refused < 450


def options():
    return command.argparse.Namespace(overwrite=True, classes=None, workers=1, seed=0)


def test_what_lies_in_a_folder_of_shards_is_named(tmp_path):
    good = tar_of(*GOOD)
    for files, said in (
        ({}, "shards has no .tar"),
        (
            {"a_train": good, "b_val": good, "c": good},
            "has c.tar, and none for training: give files that all have train or val",
        ),
        ({"b_val": good}, "has b-val.tar, and none for training"),
    ):
        assert said in run("--index", write_tars(tmp_path / "shards", **files), check=2).stderr
    assert "none does not exist" in run("--index", tmp_path / "none", check=2).stderr


def write_tars(folder, **files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name.replace('_', '-')}.tar").write_bytes(content)
    return folder


def test_what_is_left_out_is_counted(tmp_path):
    shard = tar_of(
        *GOOD, ("rose/7.tif", encoded(7, "TIFF")), ("rose/8.cls", b"rose"), ("rose/9.mask.png", PICTURE), ("tulip/9.jpg", b"none"),
        ("tulip/10.json", b'{"label": -1}'), ("about/all.json", b"{}"), ("tulip/a.b.jpg", PICTURE), ("10.jpg", PICTURE), ("10.cls", b"-1"),
    )  # fmt: skip
    said = run("--index", write_tars(tmp_path / "shards", a=shard)).stdout
    assert "left out, without a picture KEY.jpg, or of another kind: 5, the first rose/8" in said
    assert (
        "left out, not an image: 1, the first tulip/9.jpg" in said and "left out, without a label: 1, the first 10.jpg" in said
    )
    train, val = (packed.load(str(tmp_path / "shards"), split) for split in splits.SPLITS)
    assert train.classes == CLASSES
    assert "rose/7.tif" in [*train.names, *val.names] and len(train) + len(val) == 13


def test_keys_that_begin_anew_in_each_shard_are_different_samples(tmp_path):
    one, other = (tar_of(*((f"{n}.jpg", encoded(n + seed)) for n in range(4)), *((f"{n}.cls", b"%d" % (n % 2)) for n in range(4)))
                  for seed in (0, 20))  # fmt: skip
    folder = write_tars(tmp_path / "shards", a_train=one, b_train=other, c_val=one)
    assert "8 for train, 4 for val" in run("--index", folder).stdout
    part = packed.load(str(folder), "train")
    assert part.names == [
        "0.jpg",
        "2.jpg",
        "b-train/0.jpg",
        "b-train/2.jpg",
        "1.jpg",
        "3.jpg",
        "b-train/1.jpg",
        "b-train/3.jpg",
    ]
    assert [part.read(number) for number in range(8)] == [encoded(n) for n in (0, 2, 20, 22, 1, 3, 21, 23)]


def test_names_of_classes_are_those_of_the_file_or_the_file_is_refused(tmp_path):
    folder, names = write_tars(tmp_path / "shards", a=tar_of(*GOOD)), tmp_path / "names"
    for content, said in (
        ("daisy\nrose\n", "has class tulip (a.tar:tulip/0.jpg), and 2 names of classes: give --classes FILE"),
        ("daisy\n\nrose\ntulip", "has an empty name of a class"),
        ("rose\nrose\ntulip", "or a name twice"),
        ("雏菊".encode("gb18030"), "has no names of classes"),
    ):
        names.write_bytes(content if isinstance(content, bytes) else content.encode())
        (line,) = run("--index", folder, "--classes", names, check=2).stderr.splitlines()
        assert said in line
    names.write_text("tulip\nrose\ndaisy\n")
    run("--index", folder, "--classes", names)
    part = packed.load(str(folder), "train")
    assert part.classes == ["tulip", "rose", "daisy"] and [part.classes[label] for label in part.labels] == [
        name.split("/")[0] for name in part.names
    ]


def test_a_link_to_a_shard_that_is_gone_is_an_error(tmp_path):
    folder = write_tars(tmp_path / "shards", a=tar_of(*GOOD))
    (folder / "b.tar").symlink_to("/gone")
    assert "b.tar cannot be read (No such file or directory)" in run("--index", folder, check=2).stderr


def test_verify_compares_with_a_folder_that_has_these_names_and_no_other(webdataset, flowers, tmp_path):
    shards = write_shards(webdataset, flowers, tmp_path / "shards", "folder")
    run("--index", shards)
    assert f"and are the pictures of {flowers}" in run(flowers, "--verify", shards).stdout
    numbered = write_shards(webdataset, flowers, tmp_path / "numbered", "number")
    run("--index", numbered)
    assert f"was not packed from {flowers}, which has other names" in run(flowers, "--verify", numbered, check=2).stderr


def test_what_lies_between_two_samples_comes_in_parts(store, reached, tmp_path):
    film = random.Random(0).randbytes(10 << 20)
    folder = write_tars(tmp_path / "shards", a=tar_of(*GOOD[:6], ("film.mp4", film), *GOOD[6:], ("b.mp4", film)))
    run("--index", folder)
    for path in folder.iterdir():
        store.client().upload_file(str(path), "data", f"films/{path.name}")
    part, _ = arrival.begin("s3://data/films", splits.SPLITS, "input_dir", starts_fetcher=True)
    assert [part.read(number) for number in range(len(part))] == [dict(GOOD)[name] for name in part.names]
    shard = Path("input_dir/s3/data/films/a.tar")
    wait_for(shard.exists, None, "the whole shard")
    assert shard.read_bytes() == (folder / "a.tar").read_bytes()


# --- Parquet -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def parquet(monkeypatch):
    monkeypatch.syspath_prepend(python_package("pyarrow==21.0.0"))
    return pytest.importorskip("pyarrow.parquet")


def write_tables(parquet, flowers, folder, names=True):
    """As datasets writes them: files of some groups of rows, and the names of the classes with the columns."""
    import pyarrow

    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        rows = [
            {"image": {"bytes": path.read_bytes(), "path": path.name}, "label": n}
            for n, label in enumerate(CLASSES)
            for path in sorted((flowers / split / label).iterdir())
        ]
        rows.insert(3, {"image": {"bytes": encoded(99), "path": None}, "label": -1})
        table = pyarrow.Table.from_pylist(rows)
        features = {"image": {"_type": "Image"}, "label": {"names": CLASSES, "_type": "ClassLabel"}}
        words = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
        table = table.replace_schema_metadata(words)
        for number, part in enumerate((table.slice(0, 11), table.slice(11))):
            if len(part):
                parquet.write_table(part, folder / f"{name}-{number:05d}-of-00002.parquet", row_group_size=4)
    return folder


def test_tables_of_parquet_have_the_samples_of_the_folder(parquet, flowers, tmp_path):
    write_tables(parquet, flowers, tmp_path / "hub" / "data")
    words = (tmp_path / "hub", tmp_path / "pack", "--shard_mb", 0.05)
    said = run(*words).stdout
    assert "left out, without a label: 1" in said and "24 for train, 9 for val, 3 classes" in said
    for split in splits.SPLITS:
        part = packed.load(str(tmp_path / "pack"), split)
        assert part.left_out.pop("without a label") == ["00000003.jpg"]
        assert_same_samples(part, tree.load(str(flowers / split), str(tmp_path)))
    shards = sorted((tmp_path / "pack").glob("*.tar"))
    assert len(shards) > 3
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in shards}
    shards[1].unlink()  # as after a kill
    (tmp_path / "pack" / "train-000002.tar.unfinished").write_bytes(b"half")
    (tmp_path / "pack" / "train-index.npz").unlink()
    run(*words)
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted((tmp_path / "pack").glob("*.tar*"))}
    assert {name: content for name, (_, content) in after.items()} == {name: content for name, (_, content) in before.items()}
    assert [name for name in after if after[name][0] != before[name][0]] == [shards[1].name]
    assert "has a pack of other photographs or settings" in run(*words[:2], check=2).stderr


def test_a_second_start_needs_room_for_what_is_missing_alone_and_no_pack_keeps_samples_of_another(
    parquet, flowers, tmp_path, monkeypatch
):
    tables, folder = write_tables(parquet, flowers, tmp_path / "tables"), tmp_path / "pack"
    run(tables, folder)
    for path in tables.iterdir():
        path.touch()  # as where a platform copies it anew
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, SPARE + 1))
    run(tables, folder)
    monkeypatch.undo()
    for path in tables.glob("validation*"):
        path.unlink()
    assert "has a pack of other photographs or settings" in run(tables, folder, check=2).stderr
    (folder / "other-train.tar").write_bytes(tar_of(*GOOD))
    run(tables, folder, "--overwrite", "true")
    parts = [packed.load(str(folder), split) for split in splits.SPLITS]
    assert sum(map(len, parts)) == 24 and {shard["name"] for part in parts for shard in part.shards} == {"train-000000.tar"}
    assert "24 images in 2 shards are as they were packed" in run("--verify", folder).stdout


def test_a_table_whose_labels_alone_have_changed_is_another_one(parquet, flowers, tmp_path):
    import pyarrow

    tables, folder = write_tables(parquet, flowers, tmp_path / "tables"), tmp_path / "pack"
    run(tables, folder)
    (first, *_) = sorted(tables.glob("train*"))
    table = parquet.read_table(first)
    rows = [{**row, "label": {0: 1, 1: 0}.get(row["label"], row["label"])} for row in table.to_pylist()]
    size = first.stat().st_size
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), first, row_group_size=4)
    assert first.stat().st_size == size
    assert "has a pack of other photographs or settings" in run(tables, folder, check=2).stderr
    run(tables, folder, "--overwrite", "true")
    run(tables, tmp_path / "anew")
    for split in splits.SPLITS:
        assert_same_samples(packed.load(str(folder), split), packed.load(str(tmp_path / "anew"), split))


def test_a_table_beside_photographs_is_not_taken_for_them(parquet, flowers, tmp_path):
    import pyarrow

    root = shutil.copytree(flowers / "train", tmp_path / "root")
    parquet.write_table(pyarrow.table({"name": ["x"]}), root / "metadata.parquet")
    assert "has 24 images" in run(root, tmp_path / "pack").stdout


def test_rows_without_bytes_are_counted_and_other_names_of_classes_refused(parquet, flowers, tmp_path):
    import pyarrow

    tables = write_tables(parquet, flowers, tmp_path / "tables")
    (first, *_) = sorted(tables.glob("train*"))
    table = parquet.read_table(first)
    rows = table.to_pylist()
    rows[0]["image"]["bytes"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), first)
    assert "left out, empty: 1, the first 00000000.img" in run(tables, tmp_path / "pack").stdout
    metadata = {"huggingface": table.schema.metadata[b"huggingface"].decode().replace("tulip", "violet")}
    parquet.write_table(table.replace_schema_metadata(metadata), first)
    assert "names other classes than" in run(tables, tmp_path / "other", check=2).stderr


def test_other_tables_are_refused_in_a_line(parquet, flowers, tmp_path, monkeypatch):
    import pyarrow

    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"img": [b"x"], "label": ["rose"]}), path)
    said = run(path, tmp_path / "pack", check=2).stderr
    parquet.write_table(pyarrow.table({"image": ["a.jpg"], "label": [1]}), tmp_path / "train-strings.parquet")
    text = run(tmp_path / "train-strings.parquet", tmp_path / "pack", check=2).stderr
    assert "needs columns image, of bytes, and label, a number: it has image (string), label (int64)" in text
    assert "needs columns image, of bytes, and label, a number: it has img (binary), label (string)" in said
    tables = write_tables(parquet, flowers, tmp_path / "tables", names=False)
    assert "--form 256 is for pictures in folders" in run(tables, tmp_path / "pack", "--form", 256, check=2).stderr
    (tmp_path / "names").write_text("daisy\nrose\n")
    assert "tables has class 2 (" in run(tables, tmp_path / "pack", "--classes", tmp_path / "names", check=2).stderr
    whole = (tables / "train-00000-of-00002.parquet").read_bytes()
    (tables / "train-00000-of-00002.parquet").write_bytes(whole[: len(whole) // 2])
    (line,) = run(tables, tmp_path / "other", check=2).stderr.splitlines()
    assert "train-00000-of-00002.parquet cannot be read: " in line
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "needs pyarrow: pip install .[parquet]" in run(tables, tmp_path / "other", check=2).stderr


# --- Training ----------------------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_shards_in_a_bucket_goes_on_to_the_bits_of_the_folder(webdataset, flowers, store, tmp_path, ranks):
    shards = write_shards(webdataset, flowers, tmp_path / "shards", "number")
    store.client().create_bucket(Bucket=f"shards-{ranks}")
    for path in shards.iterdir():
        store.client().upload_file(str(path), f"shards-{ranks}", f"wds/{path.name}")
    words = [*NETWORK, "--image_size", 32, "--epochs", 2, "--total_batch", 8, "--workers", 1]
    (tmp_path / "folder").mkdir()
    (tmp_path / "bucket").mkdir()
    ways = ["--nproc_per_node", ranks]
    run_job("train_imagenet", tmp_path / "folder", *words, *ways, "--data_url", flowers)
    url = f"s3://shards-{ranks}/wds"
    indexed = ["--data_url", url, "--data_backend", "packed"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        run("--index", url)
    run_job("train_imagenet", tmp_path / "bucket", *words, *ways, *indexed, "--max_steps", 4, env=store.environment)
    run_job("train_imagenet", tmp_path / "bucket", *words, *ways, *indexed, env=store.environment)
    assert_same_bits(final_state(tmp_path / "folder"), final_state(tmp_path / "bucket"))
