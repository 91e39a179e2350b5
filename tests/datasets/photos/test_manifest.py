"""Manifests of ModelArts, iTAG and Ground Truth: the samples of the folder, the pictures wherever they lie, an answer to every line."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from datasets.packs import packed
from datasets.photos import manifest, tree
from launch.pack import command as pack
from tests.datasets.photos.test_own_pictures import loaded
from tests.tools import pictures
from tests.tools.jobs import NETWORK, PATIENCE, assert_same_bits, final_state, run_job
from tests.tools.packages import python_program
from tests.tools.packs import settings

MINDSPORE = "mindspore==2.10.0"


def modelarts(source, label, usage=None):
    named = (
        {"annotation": [{"name": label, "type": "modelarts/image_classification", "annotated-by": "human"}]} if label else {}
    )
    return {"source": source, "id": "01", **named, **({"usage": usage} if usage else {})}


def itag(source, label, usage=None):
    said = [{"questionId": "1", "data": label, "markTitle": "single-choice", "type": "survey/value"}]
    return {"data": {"source": source}, "label-1432993193909231616": {"results": said if label else []}}


def ground_truth(source, label, usage=None):
    said = {"class-name": label, "type": "groundtruth/image-classification"} if label else {"failure-reason": "no worker"}
    return {"source-ref": source, "sport": 0, "sport-metadata": {**said, "job-name": "sport"}}


FORMS = {"modelarts": modelarts, "itag": itag, "ground_truth": ground_truth}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """Twenty pictures of each of three classes, and (path below the folder, class) of each, in no order."""
    monkeypatch.chdir(tmp_path)
    pictures.make("shapes", "own", 60)
    names = sorted((str(path.relative_to("own")), path.parent.name) for path in Path("own").glob("*/*"))
    random.Random(0).shuffle(names)
    return tmp_path / "own", names


def samples(trees):
    return [(one.names, one.classes, one.labels.tolist(), one.widths.tolist()) for one in trees]


@pytest.mark.parametrize(
    ("form", "place"),
    [
        *((form, "s3://bucket/own/{}") for form in FORMS),
        ("modelarts", "{}"),
        ("itag", "/data/x/own/{}"),
        ("ground_truth", "s3://own/{}"),
    ],
)
def test_it_gives_the_samples_of_the_folder_that_it_lies_in(shapes, form, place):
    folder, names = shapes
    wanted = samples(loaded(folder))
    write(folder / "V001.manifest", [FORMS[form](place.format(name), label) for name, label in names])
    assert samples(loaded(folder / "V001.manifest")) == wanted


def test_a_folder_with_one_is_labelled_by_it_unless_it_has_train_and_val(shapes):
    """As ModelArts downloads an input: its job is told of the folder alone."""
    folder, names = shapes
    write(folder / "V001.manifest", [modelarts(name, "round" if label == "circle" else "edged") for name, label in names])
    train, val = loaded(folder)
    assert train.classes == ["edged", "round"] and len(train) + len(val) == 60
    write(folder / "V002.manifest", [])
    with pytest.raises(UserError, match=r"own has 2 manifests: give one, such as V002\.manifest in it"):
        loaded(folder)
    for split in ("train", "val"):
        shutil.copytree(folder, folder / split, ignore=shutil.ignore_patterns("train", "val"))
    assert loaded(folder)[0].classes == list(pictures.SHAPES)


def test_it_may_lie_above_them_and_all_may_be_in_one_folder(shapes):
    folder, names = shapes
    (folder.parent / "flat").mkdir()
    rows = []
    for number, (name, label) in enumerate(names):
        shutil.copy(folder / name, folder.parent / "flat" / f"{number}.jpg")
        rows.append(modelarts(f"s3://bucket/of/flat/{number}.jpg", label))
    train, val = loaded(write(folder.parent / "V001.manifest", rows))
    assert sorted(train.names + val.names) == sorted(f"{number}.jpg" for number in range(60))
    assert train.folder == str(folder.parent / "flat") and np.bincount(val.labels).tolist() == [4, 4, 4]
    for part in (train, val):
        for name, label in zip(part.names, part.labels):
            assert names[int(name[:-4])][1] == part.classes[label]


def test_usage_divides_and_what_is_left_out_is_counted(shapes, capsys):
    folder, names = shapes
    usage = {name: "EVAL" if number % 4 == 0 else "TRAIN" for number, (name, _) in enumerate(sorted(names))}
    rows = [modelarts(f"s3://bucket/own/{name}", label, usage[name]) for name, label in names]
    rows += [modelarts(f"s3://bucket/own/new/{number}.jpg", None) for number in range(3)]
    rows += [
        modelarts("s3://bucket/own/new/3.jpg", "circle", "INFERENCE"),
        modelarts("s3://bucket/own/square/gone.jpg", "square", "TRAIN"),
    ]
    (folder / "circle" / "0001.jpg").write_bytes(b"")
    parts = loaded(write(folder / "V001.manifest", rows))
    said = capsys.readouterr().out
    assert (
        f"labels of {folder}/V001.manifest: {folder}: 44 images of 3 classes; left out, empty: 1 (the first is circle/0001.jpg)"
        in said
    )
    assert (
        "; left out, neither for TRAIN nor for EVAL: 1" in said
        and "left out, not there: 1 (the first is square/gone.jpg)" in said
    )
    assert "left out, without a label: 3 (the first is bucket/own/new/0.jpg)" in said
    (folder / "circle" / "0001.jpg").unlink()
    for name in usage:
        if (folder / name).exists():
            to = folder.parent / "divided" / ("val" if usage[name] == "EVAL" else "train") / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, to)
    assert samples(parts) == samples(loaded(folder.parent / "divided"))
    shutil.copy(folder / "square" / "0000.jpg", folder / "square" / "gone.jpg")
    assert sum(map(len, loaded(folder / "V001.manifest"))) == 60, "it is looked for again, and the other is gone"


def test_a_picture_that_was_changed_is_judged_again(shapes):
    folder, names = shapes
    path = write(folder / "V001.manifest", [itag(name, label) for name, label in names])
    before = sum(map(len, loaded(path)))
    pictures.make("digits", "more", 10)
    (folder.parent / "more" / "0" / "0000.jpg").rename(folder / "circle" / "0003.jpg")
    after = {name: size for part in loaded(path) for name, size in zip(part.names, zip(part.widths, part.heights))}
    (alone,) = [size for name, size in zip(tree.load("own").names, zip(tree.load("own").widths, tree.load("own").heights))
                if name == "circle/0003.jpg"]  # fmt: skip
    assert before == len(after) == 60 and after["circle/0003.jpg"] == alone


BOX = {"source": "s3://b/a.jpg", "annotation": [{"type": "modelarts/object_detection", "annotation-loc": "s3://b/a.xml"}]}
POLYGON = {
    "data": {"source": "oss://b/a.jpg"},
    "label-1": {"results": [{"type": "image", "data": [{"type": "image/polygon"}]}]},
}
SEVERAL = {"data": {"source": "oss://b/a.jpg"}, "label-1": {"results": [{"type": "survey/multivalue", "data": ["a", "b"]}]}}
MULTILABEL = {"source-ref": "s3://b/a.jpg", "x": [0, 1], "x-metadata": {"type": "groundtruth/image-classification-multilabel"}}
TWO = modelarts("s3://b/a.jpg", "cat")
TWO["annotation"] = [*TWO["annotation"], *modelarts("", "dog")["annotation"]]
KINDS = "is not what is trained here, which is one class for each picture"
ANSWERS = {
    "boxes": ([BOX], f"line 1: modelarts/object_detection {KINDS}"),
    "polygons": ([itag("oss://b/b.jpg", "cat"), POLYGON], f"line 2: image {KINDS}"),
    "several": ([SEVERAL], f"line 1: survey/multivalue {KINDS}"),
    "multilabel": ([MULTILABEL], f"line 1: groundtruth/image-classification-multilabel {KINDS}"),
    "two": ([TWO], "line 1: b/a.jpg is cat and dog: leave one of them"),
    "two lines": ([modelarts("obs://b/a.jpg", "cat"), modelarts("s3://b/a.jpg", "dog")], "line 2: b/a.jpg is cat and dog: leave one"),
    "both sides": ([modelarts("b/a.jpg", "cat", usage) for usage in ("TRAIN", "EVAL")], "line 2: b/a.jpg is cat and cat for EVAL: leave"),
    "outside": ([modelarts("s3://b/../a.jpg", "cat")], "line 1: obs://b/../a.jpg cannot be the name of a file below a folder"),
    "above": ([ground_truth("../../etc/passwd", "cat")], "line 1: ../../etc/passwd cannot be the name of a file below a folder"),
    "text": ([modelarts("content://I love machine learning", "cat")], "line 1: content://I love machine learning is neither in a bucket"),
    "nothing": ([modelarts("a.jpg", None), modelarts("b.jpg", "cat", "TEST")], "no picture with a label (without a label: 1, neither for TRAIN"),
    "one class": ([modelarts(f"own/{name}.jpg", "cat") for name in "ab"], "has one class, cat: label pictures of another one, too"),
    "elsewhere": ([modelarts(f"/data/{name}.jpg", name) for name in "ab"], "and the others are not in its folder: put it into the one"),
    "buckets": ([itag(f"oss://{name}/{name}.jpg", name) for name in "ab"], "names pictures in several buckets: copy them into one"),
    "stores": ([itag("oss://b/x.jpg", "cat"), itag("obs://b/y.jpg", "dog")], "names pictures in obs:// and oss://: copy them into one"),
    "half a character": ([modelarts("a.jpg", "\ud800")], "line 1 is no line of a manifest of ModelArts, iTAG or Ground Truth"),
    "another file": ([{"file_name": "a.jpg", "label": 1}], "line 1 is no line of a manifest of ModelArts, iTAG or Ground Truth"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_what_cannot_be_trained_on_is_an_answer_in_one_line(tmp_path, case):
    rows, answer = ANSWERS[case]
    (tmp_path / "own").mkdir()
    shutil.copy(__file__, tmp_path / "own" / "a.jpg")
    path = write(tmp_path / "V001.manifest", rows)
    with pytest.raises(UserError) as error:
        manifest.load(str(path), str(tmp_path))
    assert str(error.value).startswith(str(path)) and answer in str(error.value) and "\n" not in str(error.value)


DAMAGED = {
    "half a line": (b'{"source": "a.jpg"', "line 3 is no line of a manifest"),
    "endless": (b'{"source": "' + b"a" * (1 << 20) + b'"}', "line 3 has more than 1 MiB"),
    "no text": (b"\xff\xfe\x00", "line 3 is no line of a manifest"),
    "deep": (b"[" * 100_000, "line 3 is no line of a manifest"),
    "no object": (b"7", "line 3 is no line of a manifest"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_line_is_named_by_its_number(tmp_path, case):
    damage, answer = DAMAGED[case]
    path = write(tmp_path / "V001.manifest", [modelarts("a.jpg", "cat")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n" + damage)  # editors may write such a mark at the beginning
    with pytest.raises(UserError, match=answer):
        manifest.load(str(path), str(tmp_path))


def test_no_manifest_is_an_answer(tmp_path):
    with pytest.raises(
        UserError, match=r"none.manifest cannot be read \(No such file or directory\): give the path of a .manifest"
    ):
        manifest.load(str(tmp_path / "none.manifest"), str(tmp_path))


def test_a_later_stage_of_itag_corrects_the_one_before(shapes):
    folder, names = shapes
    rows = [itag(f"oss://bucket.oss-cn-hangzhou.aliyuncs.com/own/{name}", "square") for name, _ in names]
    for row, (_, label) in zip(rows, names):
        row["label-1432993193909231616-check"] = itag("", label)["label-1432993193909231616"]
        row["label-1432993193909231616-verify"] = {"results": []}
    wanted = samples(loaded(folder))
    assert samples(loaded(write(folder / "V001.manifest", rows))) == wanted


def mutated(content, draw):
    """A line is gone or there twice, or a byte is another, or some bytes are gone or there twice."""
    lines = content.split(b"\n")
    kind = draw.randrange(6)
    if kind < 2:
        at = draw.randrange(len(lines))
        lines[at : at + 1] = [lines[at]] * 2 * kind
        return b"\n".join(lines)
    content = bytearray(content)
    at, length = draw.randrange(len(content)), draw.randrange(200)
    if kind < 4:
        content[at : at + length] = content[at : at + length] * 2 * (kind - 2)
    else:
        content[at] = draw.randrange(256) if kind == 4 else draw.choice(b'{}[]",:\\/.\n\0')
    return bytes(content)


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.rehearsal)])
def test_mutated_manifests_are_refused_or_read(shapes, number):
    folder, names = shapes
    draw, path = random.Random(number), folder / "V001.manifest"
    counts = {"read": 0, "refused": 0}
    known = set(dict(names))
    for _ in range(number):
        form = draw.choice(list(FORMS.values()))
        rows = [json.dumps(form(f"s3://bucket/own/{name}", label)).encode() for name, label in names[:6]]
        path.write_bytes(mutated(b"\n".join(rows), draw))
        try:
            (whole,), _ = manifest.load(str(path), "input_dir")
        except UserError as error:
            assert "\n" not in str(error)
            counts["refused"] += 1
        else:
            assert all(whole.path(one).startswith(f"{folder}/") for one in range(len(whole)))
            counts["read"] += bool(set(whole.names) <= known)
    assert min(counts.values()) > number / 10, counts


@pytest.fixture
def in_bucket(shapes, store, request):
    """(folder, its pictures, address of a bucket that has them, another picture, and a manifest of all but the other)"""
    folder, names = shapes
    client, bucket = store.client(), f"labelled-{request.node.name.replace('_', '-')[:40]}"
    client.create_bucket(Bucket=bucket)
    for name, _ in names:
        client.upload_file(str(folder / name), bucket, f"in/own/{name}")
    client.put_object(Bucket=bucket, Key="in/own/circle/other.jpg", Body=b"not in the manifest")
    client.put_object(Bucket=bucket, Key="in/own//a", Body=b"what could not be fetched")
    rows = "".join(json.dumps(modelarts(f"s3://{bucket}/in/own/{name}", label)) + "\n" for name, label in names)
    client.put_object(Bucket=bucket, Key="out/V001.manifest", Body=rows.encode())
    return folder, names, bucket, client


def test_the_pictures_of_a_manifest_in_a_bucket_are_fetched_and_no_others(in_bucket, store, monkeypatch):
    folder, names, bucket, client = in_bucket
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    address = f"s3://{bucket}/out/V001.manifest"
    wanted = samples(loaded(folder))
    assert samples(loaded(address)) == wanted
    fetched = folder.parent / "input_dir" / "s3" / bucket / "in" / "own"
    assert sorted(str(path.relative_to(fetched)) for path in fetched.glob("*/*.jpg")) == sorted(name for name, _ in names)
    write(folder.parent / "here.manifest", [itag(f"s3://{bucket}/in/own/{name}", label) for name, label in names[:30]])
    assert sum(map(len, loaded(folder.parent / "here.manifest"))) == 30, "only it lies here"
    assert len(list(fetched.glob("*/*.jpg"))) == 60, "what another manifest fetched stays"
    client.delete_object(Bucket=bucket, Key=f"in/own/{names[0][0]}")
    assert sum(map(len, loaded(address))) == 59 and not (fetched / names[0][0]).exists()
    shutil.copytree(folder, folder.parent / "copy")
    client.put_object(Bucket=bucket, Key="in/own/V002.manifest",
                      Body="".join(json.dumps(modelarts(name, label)) + "\n" for name, label in names[1:]).encode())  # fmt: skip
    assert sum(map(len, loaded(f"s3://{bucket}/in/own/V002.manifest"))) == 59, "paths are below the folder of the manifest"


def test_a_pack_of_a_manifest_is_that_of_the_folder(shapes, capsys):
    folder, names = shapes
    path = write(folder.parent / "labels" / "V001.manifest", [modelarts(f"own/{name}", label) for name, label in names])
    shutil.copytree(folder, path.parent / "own")
    for root, out in ((folder, "one"), (path, "two")):
        pack.pack(str(root), out, settings())
    files = [{path.name: path.read_bytes() for path in (folder.parent / out).glob("*.tar")} for out in ("one", "two")]
    assert files[0] == files[1] and files[0]
    write(path.parent / "V001.manifest", [modelarts(f"own/{name}", label) for name, label in names])
    pack.pack(str(path.parent), str(path.parent / "pack"), settings())  # below the folder whose pictures a manifest names
    assert {file.name: file.read_bytes() for file in (path.parent / "pack").glob("*.tar")} == files[0]
    assert samples([packed.load("one", "val")]) == samples([packed.load("two", "val")])
    assert pack.main([str(path), "--verify", "two"]) == 0
    assert "and are the pictures of" in capsys.readouterr().out


@pytest.mark.rehearsal
def test_the_weights_are_those_of_the_folder(in_bucket, store, tmp_path):
    folder, names, bucket, _ = in_bucket
    words = [*NETWORK, "--image_size", 32, "--workers", 0, "--epochs", 2]
    (tmp_path / "folder").mkdir()
    run_job("train_imagenet", tmp_path / "folder", *words, "--data_url", folder)
    wanted = final_state(tmp_path / "folder")
    pack.pack(str(write(folder / "V001.manifest", [modelarts(name, label) for name, label in names])), "pack", settings())
    forms = {
        form: ["--data_url", write(folder / f"{form}.manifest", [FORMS[form](name, label) for name, label in names])]
        for form in FORMS
    }
    forms["bucket"] = ["--data_url", f"s3://{bucket}/out/V001.manifest"]
    forms["pack"] = ["--data_url", tmp_path / "pack", "--data_backend", "packed"]
    for name, more in forms.items():
        (tmp_path / name).mkdir(exist_ok=True)
        run_job("train_imagenet", tmp_path / name, *words, *more, env=store.environment)
        assert_same_bits(final_state(tmp_path / name), wanted)


READ = """
import json, sys
import mindspore.dataset as data
found = data.ManifestDataset(sys.argv[1], usage="train", shuffle=False)
print(json.dumps([found.get_class_indexing(), [(len(image), int(label)) for image, label in found.create_tuple_iterator(output_numpy=True)]]))
"""


@pytest.mark.rehearsal
def test_mindspore_reads_the_same(shapes, tmp_path):
    folder, names = shapes
    path = write(folder / "V001.manifest", [modelarts(str(folder / name), label, "TRAIN") for name, label in names])
    words = [python_program("python", MINDSPORE), "-c", READ, path]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True, timeout=PATIENCE)
    classes, read = json.loads(done.stdout.splitlines()[-1])
    (whole,), _ = manifest.load(str(path), str(tmp_path / "input_dir"))
    assert classes == {name: number for number, name in enumerate(whole.classes)}
    ours = sorted((len(whole.read(number)), int(label)) for number, label in enumerate(whole.labels))
    assert sorted(map(tuple, read)) == ours and len(ours) == 60
