"""What lies where our files belong: a folder or a file in the way is named, and a damaged note is taken for none."""

import json
import os
from pathlib import Path

import pytest

from common import storage
from common.address import local_folder
from common.errors import UserError
from common.files import read_json_dict
from common.storage import once
from common.track import follow
from datasets.packs import arrival, packed
from datasets.packs.shards import Verified
from datasets.packs.state import State
from tests.tools.jobs import wait_for
from tests.tools.packs import fetchers, is_whole, packs, publish, reached  # noqa: F401 (fixtures)

DAMAGED = {
    "number": "5",
    "list": "[1]",
    "null": "null",
    "text": '"arrived"',
    "cut off": '{"a": ',
    "deep": "[" * 100_000,
    "nothing": "",
    "bytes": b"\xff\0",
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_note_is_none(tmp_path, how):
    write(tmp_path / "note", DAMAGED[how])
    assert read_json_dict(str(tmp_path / "note")) == {}
    (tmp_path / ".fetching").mkdir()
    write(tmp_path / ".fetching" / "arrived.json", DAMAGED[how])
    assert not Verified(str(tmp_path))._identities


def test_a_note_that_is_a_folder_or_is_missing_is_none(tmp_path):
    assert read_json_dict(str(tmp_path)) == read_json_dict(str(tmp_path / "none")) == {}


@pytest.mark.parametrize("said", ["5", "[1]", "null", '{"at": 1}', '{"at": "x", "node": 1, "text": 2, "code": 3}', "[" * 3000])
def test_a_state_whose_text_is_no_failure_has_none(tmp_path, said):
    State.make(str(tmp_path / "state"), 8)
    state = State(str(tmp_path / "state"), 8)
    state._failure_text[: len(said)] = list(said.encode()[: len(state._failure_text)])
    state._failure_text[len(said) :] = ord(" ")
    assert state.failure(0) is None


def test_a_pack_whose_note_is_damaged_is_judged_anew(packs, reached, fetchers):
    folder, url = packs["raw"]
    came = Path(local_folder(url, "input_dir"))
    for damaged in (None, "5"):
        if damaged:
            fetchers[-1].kill()
            fetchers[-1].wait()
            write(came / ".fetching" / "arrived.json", damaged)
            (came / "train-index.npz").unlink()  # which the fetcher puts there when all shards are whole
        parts = arrival.begin(url, ["train", "val"], "input_dir", starts_fetcher=True)
        assert parts[0].read(0) == packed.load(str(folder), "train").read(0)
        wait_for(lambda: is_whole(came, folder), fetchers[-1], "the whole pack")
    assert {*json.loads((came / ".fetching" / "arrived.json").read_text())} == {path.name for path in folder.glob("*.tar")}


@pytest.mark.parametrize("how", DAMAGED)
def test_raw_pixels_whose_note_is_damaged_are_verified_anew(packs, tmp_path, monkeypatch, how):
    files = packed.load(str(packs["raw"][0]), "val")
    files.folder = str(tmp_path / "pack")
    os.symlink(packs["raw"][0], files.folder)
    notes = Path(files.folder, ".fetching")
    notes.mkdir(exist_ok=True)
    note = notes / f"{files.shards[0]['name']}.verified.json"
    write(note, DAMAGED[how])
    packed.verify_once(files)
    assert json.loads(note.read_text()).keys() == {shard["name"] for shard in files.shards}
    monkeypatch.setattr(packed, "sha256", lambda _: pytest.fail("read again"))
    packed.verify_once(files)


def test_damaged_lines_of_a_journal_are_left_out(tmp_path):
    (tmp_path / "speed.jsonl").write_text('5\n[1]\n{"loss": 1}\nnull\n"x"\n{"loss": 2}\n{"loss"')
    assert [*follow.rows(str(tmp_path), "speed.jsonl")] == [{"loss": 1}, {"loss": 2}]


# --- What is in the way ------------------------------------------------------------------------------------------------


def test_a_folder_where_a_shard_belongs_is_named(packs, reached):
    folder, url = packs["original"]
    (shard, *_) = sorted(path.name for path in folder.glob("*.tar"))
    path = Path(local_folder(url, "input_dir"), shard)
    path.mkdir(parents=True)
    with pytest.raises(UserError, match=f"{shard} is a folder, and a shard belongs there: move it away"):
        arrival.begin(url, ["train", "val"], "input_dir", starts_fetcher=True)


IN_THE_WAY = {
    ".fetching": ("file", "is a file, and a folder belongs there"),
    "": ("file", "is a file, and a folder belongs there"),
    ".fetching/index.jsonl": ("folder", "is a folder, and a file belongs there"),
    ".fetching/fetch.lock": ("folder", "is a folder, and a file belongs there"),
    "val-index.npz": ("folder", "cannot write to "),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_of_a_fetch_is_named(packs, reached, name):
    folder, url = packs["original"]
    came = local_folder(url, "input_dir")
    path, (kind, said) = Path(came, name), IN_THE_WAY[name]
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else path.touch()
    with pytest.raises(UserError, match=said) as error:
        storage.fetch(url, inputs="input_dir")
    assert str(path) in str(error.value) and len(str(error.value)) < 300
    path.rmdir() if kind == "folder" else path.unlink()
    storage.fetch(url, inputs="input_dir")
    assert is_whole(Path(came), folder)


def test_a_file_above_what_is_done_once_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/file is a file, and a folder belongs there: move it away"):
        once.once_per_node(str(tmp_path / "file" / "below" / "work"), lambda _: None)


def test_a_link_to_nothing_is_called_so(tmp_path):
    (tmp_path / "inputs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=f"{tmp_path}/inputs is a link to nothing, and a folder belongs there: move it away"):
        once.once_per_node(str(tmp_path / "inputs" / "work"), lambda _: None)
