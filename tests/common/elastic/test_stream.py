"""The state that a rank is sent is read by the rules for a file, and nothing in it runs."""

import io

import pytest

from common.elastic.stream import read_stream
from common.weights import plain
from tests.common.weights.test_tensors import assert_is_read, state
from tests.tools.hostile import CANARY, HOSTILE, NUMBERS, RUNS, in_a_dict, number, text


def test_what_torch_sends_is_read():
    streaming = pytest.importorskip("torch.distributed._serialization", reason="this torch sends no state between ranks")
    value = state()
    streaming._streaming_save(value, content := io.BytesIO())
    assert_is_read(read_stream(io.BytesIO(content.getvalue())), value)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused(name):
    body = b"\x80\2" + in_a_dict(HOSTILE[name])
    sent = [("data.pkl", body), ("data/0", NUMBERS)]
    entries = b"\x80\2](" + b"".join(
        b"ctorch.distributed._serialization\n_Entry\n)\x81}(" + text(b"key") + text(key.encode()) + text(b"length")
        + number(len(content)) + b"ub" for key, content in sent
    ) + b"e."  # fmt: skip
    with pytest.raises(Exception):  # noqa: B017 (of any kind: the member that reads it ends)
        read_stream(io.BytesIO(entries + body + NUMBERS))


def test_the_list_of_what_is_sent_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (b"cos\nsystem\n(" + RUNS + b"tR.", b"ctorch.distributed._serialization\n_Entry\n(" + RUNS + b"tR."):
        with pytest.raises(plain.Refused):
            read_stream(io.BytesIO(b"\x80\2" + value))
    assert not (tmp_path / CANARY).exists()
