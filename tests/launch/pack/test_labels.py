"""The class of a picture, as shards and tables say it: every form of a number is the same class, and what is unclear is refused."""

import json

import pytest

from datasets.packs import packed
from datasets.photos import splits
from launch.pack import labels
from tests.launch.pack.test_index import encoded, parquet, run, tar_of, write_tars  # noqa: F401 (a fixture)

READ = {  # {what is said: the label}
    1: 1, "1": 1, " 1\n": 1, "1.0": 1, "1.": 1, "+1": 1, "001": 1, 0: 0, "-0": 0, "0" * 40 + "7": 7,
    -1: -1, "-1": -1, "-1.0": -1,
    "rose": "rose", " rose\n": "rose", "n01440764": "n01440764", "1e3": "1e3", "1,5": "1,5", "١": "١",
    None: None, "": None, " \n": None,
}  # fmt: skip
NOT_READ = {
    1.5: "is 1.5, which is no whole number", "1.50": "is 1.50, which is no whole number", float("nan"): "is nan, which is no",
    float("inf"): "is inf, which is no whole number", 1e300: "has 301 digits, too many", 1e16: "has 17 digits, too many",
    -2: "is -2: classes are counted from 0", "-2.0": "is -2: classes are counted from 0", -(10**9) + 1: "is -999999999: classes",
    "1234567890": "has 10 digits, too many", 10**30: "has 31 digits, too many", "-" + "9" * 9999: "has 9999 digits, too many",
    True: "is neither a number nor a name", (1,): "is neither a number nor a name", b"1": "is neither a number nor a name",
}  # fmt: skip


@pytest.mark.parametrize(("said", "label"), [*READ.items(), (1.0, 1), (-1.0, -1)])
def test_a_number_is_a_number_and_a_text_that_is_none_is_a_name(said, label):
    found = labels.parse(said, "7.cls")
    assert found == label and type(found) is type(label)


@pytest.mark.parametrize("said", NOT_READ, ids=lambda said: str(said)[:20])
def test_what_is_no_label_is_refused(said):
    with pytest.raises(labels.Unclear, match=r"^the label in 7\.cls ") as error:
        labels.parse(said, "7.cls")
    assert NOT_READ[said] in str(error.value)


def shard(said):
    """Return a shard. `said`: for each sample, {the ending of a file: its content, or None for a picture alone}."""
    members = []
    for number, files in enumerate(said):
        key = files.get("key", str(number))
        members.append((f"{key}.jpg", encoded(number)))
        members += [(f"{key}.{ending}", content) for ending, content in files.items() if ending != "key"]
    return tar_of(*members)


def of(folder):
    """Return {name of a picture: name of its class}."""
    parts = [packed.load(str(folder), split) for split in splits.SPLITS]
    return {part.names[n]: part.classes[part.labels[n]] for part in parts for n in range(len(part))}


NUMBERS = {
    "cls": [{"cls": b"%d" % (n % 3)} for n in range(6)],
    "json": [{"json": b'{"label": %d}' % (n % 3)} for n in range(6)],
    "text in json": [{"json": b'{"label": "%d"}' % (n % 3)} for n in range(6)],
}


@pytest.mark.parametrize("form", NUMBERS)
@pytest.mark.parametrize("names", ["123", "201", "012"])
@pytest.mark.parametrize("where", ["beside", "--classes"])
def test_a_number_is_a_line_of_the_file_of_names_even_if_the_names_are_numbers(tmp_path, form, names, where):
    folder = write_tars(tmp_path / "shards", a=shard(NUMBERS[form]))
    beside = folder / "classnames.txt" if where == "beside" else tmp_path / "names"
    beside.write_text("\n".join(names))
    run("--index", folder, *(() if where == "beside" else ("--classes", beside)))
    assert of(folder) == {f"{n}.jpg": names[n % 3] for n in range(6)}


def test_folders_are_named_and_not_numbered(tmp_path):
    folder = write_tars(tmp_path / "shards", a=shard([{"key": f"{n % 3 + 1}/{n}"} for n in range(6)]))
    run("--index", folder)
    assert of(folder) == {f"{n % 3 + 1}/{n}.jpg": str(n % 3 + 1) for n in range(6)}
    (folder / "classnames.txt").write_text("3\n2\n1\n")
    run("--index", folder, "--overwrite", "true")
    assert of(folder) == {f"{n % 3 + 1}/{n}.jpg": str(n % 3 + 1) for n in range(6)}
    (folder / "classnames.txt").write_text("a\nb\nc\n")
    said = run("--index", folder, "--overwrite", "true", check=2).stderr
    assert "has class 1 (a.tar:1/0.jpg), and 3 names of classes" in said


ONE_CLASS = {  # six pictures, of which the last two say class 1 in another way
    "a byte order mark": [{"cls": b"\xef\xbb\xbf1"}, {"json": b'\xef\xbb\xbf{"label": 1}'}],
    "a fraction of zero": [{"cls": b"1.0"}, {"json": b'{"label": 1}'}],
    "text": [{"cls": b"1\r\n"}, {"json": b'{"label": "1.0"}'}],
    "both": [{"cls": b"1", "json": b'{"label": 1.0}'}, {"cls": b"", "json": b'{"label": 1}'}],
    "a name in json": [{"cls": b"1", "json": b'{"label": "rose"}'}, {"cls": b"1"}],
    "one without a label": [{"cls": b"1", "json": b'{"caption": "a rose"}'}, {"cls": b"1", "json": b"[]"}],
}


@pytest.mark.parametrize("how", ONE_CLASS)
def test_one_class_stays_one_in_whatever_form_it_is_said(tmp_path, how):
    folder = write_tars(tmp_path / "shards", a=shard([*NUMBERS["cls"][:4], *ONE_CLASS[how]]))
    assert "3 classes" in run("--index", folder).stdout
    assert of(folder) == {f"{n}.jpg": str({4: 1, 5: 1}.get(n, n % 3)) for n in range(6)}


@pytest.mark.parametrize("said", [b"-1", b"-1.0", b"\xef\xbb\xbf-1\n", b""])
def test_minus_one_is_no_class_in_any_form(tmp_path, said):
    folder = write_tars(tmp_path / "shards", a=shard([*NUMBERS["cls"], {"cls": said}]))
    assert "left out, without a label: 1, the first 6.jpg" in run("--index", folder).stdout
    assert {*of(folder).values()} == {"0", "1", "2"}


@pytest.mark.parametrize("says", [{"cls": b""}, {"json": b'{"label": -1}'}])
def test_a_picture_that_says_it_has_no_label_has_not_the_class_of_its_folder(tmp_path, says):
    folder = write_tars(tmp_path / "shards", a=shard([*({"key": f"{n % 2}/{n}"} for n in range(6)), {"key": "1/6", **says}]))
    assert "left out, without a label: 1, the first 1/6.jpg" in run("--index", folder).stdout


def test_blanks_around_a_name_of_a_class_do_not_count(tmp_path):
    folder = write_tars(tmp_path / "shards", a=shard(NUMBERS["cls"]))
    (folder / "classnames.txt").write_bytes(b"\xef\xbb\xbfdaisy \r\n rose\r\ntulip\r\n\r\n")
    run("--index", folder)
    assert {*of(folder).values()} == {"daisy", "rose", "tulip"}


UNCLEAR = {
    "a number and a name": (
        [{"cls": b"0"}, {"cls": b"rose"}],
        "has numbers and names of classes: 0 of a.tar:0.jpg and rose of a.tar:7.jpg",
    ),
    "a number and a folder of the same name": (
        [{"cls": b"0"}, {"key": "0/7"}],
        "has numbers and names of classes: 0 of a.tar:0.jpg and 0 of a.tar:0/7.jpg",
    ),
    "cls and json": ([{"cls": b"0", "json": b'{"label": 1}'}], "6 has the label 0 in .cls and 1 in .json"),
    "names in both": ([{"cls": b"a", "json": b'{"label": "b"}'}], "6 has the label a in .cls and b in .json"),
    "minus one in json": ([{"cls": b"0", "json": b'{"label": -1}'}], "6 has the label 0 in .cls and -1 in .json"),
    "below minus one": ([{"cls": b"-2"}], "the label in 6.cls is -2: classes are counted from 0"),
    "below minus one in json": ([{"json": b'{"label": -7.0}'}], "the label in 6.json is -7: classes are counted from 0"),
    "ten digits": ([{"cls": b"1234567890"}], "the label in 6.cls has 10 digits"),
    "a fraction": ([{"cls": b"0.5"}], "the label in 6.cls is 0.5, which is no whole number"),
}


@pytest.mark.parametrize("why", UNCLEAR)
@pytest.mark.parametrize("names", [(), ("0", "1", "2")])
def test_what_is_unclear_is_refused_in_a_line(tmp_path, why, names):
    more, said = UNCLEAR[why]
    folder = write_tars(tmp_path / "shards", a=shard([*NUMBERS["cls"], *more]))
    if names:
        (folder / "classnames.txt").write_text("\n".join(names))
    (line,) = run("--index", folder, check=2).stderr.splitlines()
    assert said in line and len(line) < 400 and line.isprintable() and "fetch it again" not in line
    assert not [*folder.glob("*.npz")]


# --- Parquet -----------------------------------------------------------------------------------------------------------


def write_table(parquet, path, numbers, metadata):
    """Write a table with a picture for each of `numbers`. `metadata`: JSON, or a list of the names of the classes."""
    import pyarrow

    path.parent.mkdir(exist_ok=True)
    rows = [{"image": {"bytes": encoded(n), "path": None}, "label": label} for n, label in enumerate(numbers)]
    if isinstance(metadata, list):
        metadata = json.dumps({"info": {"features": {"label": {"names": metadata, "_type": "ClassLabel"}}}})
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(table, path)


@pytest.mark.parametrize("names", ["123", "201"])
def test_a_number_of_a_table_is_a_place_in_its_names(parquet, tmp_path, names):
    write_table(parquet, tmp_path / "tables" / "train.parquet", [0, 1, 2, 0, 1, 2], [*names])
    run(tmp_path / "tables", tmp_path / "pack")
    assert of(tmp_path / "pack") == {f"{n:08d}.jpg": names[n % 3] for n in range(6)}


def test_tables_in_a_folder_and_in_its_folder_data_are_not_taken_for_one_data_set(parquet, tmp_path):
    for folder in (tmp_path / "tables", tmp_path / "tables" / "data"):
        write_table(parquet, folder / "train.parquet", [0], ["a"])
    said = run(tmp_path / "tables", tmp_path / "pack", check=2).stderr
    assert "and its folder data both have files of parquet: give one of them" in said


@pytest.mark.parametrize("first", [0, 1])
def test_tables_that_name_classes_and_tables_that_name_none_are_refused_in_any_order(parquet, tmp_path, first):
    for number in range(2):
        names = ["c", "b", "a"] if number == first else []
        write_table(parquet, tmp_path / "tables" / f"train-{number}.parquet", [0, 1, 2, 0], names)
    assert "names other classes than" in run(tmp_path / "tables", tmp_path / "pack", check=2).stderr


BAD_TABLES = {
    "two names alike": ([0, 1, 0, 1], ["rose", "rose"], "has an empty name of a class, or a name twice"),
    "an empty name": ([0, 1, 0, 1], ["rose", ""], "has an empty name of a class, or a name twice"),
    "below minus one": ([0, -2, 0, 1], ["rose", "tulip"], "is -2: classes are counted from 0"),
    "without a name": ([0, 1, 2, 0], ["rose", "tulip"], "has class 2 "),
}


@pytest.mark.parametrize("why", BAD_TABLES)
def test_a_table_whose_labels_are_unclear_is_refused_before_a_shard_is_written(parquet, tmp_path, why):
    numbers, names, said = BAD_TABLES[why]
    write_table(parquet, tmp_path / "tables" / "train.parquet", numbers, names)
    (line,) = run(tmp_path / "tables", tmp_path / "pack", check=2).stderr.splitlines()
    assert said in line
    assert not [*(tmp_path / "pack").glob("*.tar")]


def test_a_table_for_testing_is_left_out_whatever_it_names(parquet, tmp_path):
    for name, names in (("train", ["a", "b", "c"]), ("validation", ["a", "b", "c"]), ("test", [])):
        write_table(parquet, tmp_path / "tables" / f"{name}.parquet", [0, 1, 2, 0], names)
    assert "left out, for testing: 1 file" in run(tmp_path / "tables", tmp_path / "pack").stdout
    assert of(tmp_path / "pack")["00000001.jpg"] == "b"


def test_names_in_a_file_replace_those_of_the_tables(parquet, tmp_path):
    write_table(parquet, tmp_path / "tables" / "train.parquet", [0, 1, 0, 1], ["rose", "rose"])
    (tmp_path / "names").write_text("tulip\nrose\n")
    run(tmp_path / "tables", tmp_path / "pack", "--classes", tmp_path / "names")
    assert {*of(tmp_path / "pack").values()} == {"tulip", "rose"}


def test_a_table_without_a_class_is_called_so(parquet, tmp_path):
    write_table(parquet, tmp_path / "tables" / "train.parquet", [-1, None], [])
    assert "tables has no picture with a class\n" in run(tmp_path / "tables", tmp_path / "pack", check=2).stderr


@pytest.mark.parametrize("metadata", ["[" * 100_000 + "]" * 100_000, '{"info": {"features": {"label": {"names": "abc"}}}}'])
def test_a_table_with_odd_metadata_names_no_classes(parquet, tmp_path, metadata):
    write_table(parquet, tmp_path / "tables" / "train.parquet", [0, 1, 2, 0], metadata)
    run(tmp_path / "tables", tmp_path / "pack")
    assert {*of(tmp_path / "pack").values()} == {"0", "1", "2"}
