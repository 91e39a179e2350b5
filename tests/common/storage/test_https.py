"""A file from a web server: broken off, resumed, damaged, answered wrongly, or from an address that is none."""

import gzip
import hashlib
import http.server
import os
import re
import threading

import pytest

from common import progress, storage
from common.address import FETCHING
from common.alive import patience
from common.errors import UserError, is_system_error
from common.storage import https
from datasets import cifar10, cifar10_files
from tests.tools.cifar import archive, arguments  # noqa: F401 (a fixture)

GZIPPED = gzip.compress(bytes(range(256)) * 40)


class Server(http.server.ThreadingHTTPServer):
    """Serves one body; `cut` answers break off after so many bytes, and every request's Range is written down."""

    def __init__(self, body, cuts=(), ranges=True, headers=None, tls=None, at=("127.0.0.1", 0)):
        self.body, self.cuts, self.ranges, self.asked, self.headers = body, list(cuts), ranges, [], headers or {}
        self.errors = []  # what it answers before all else
        super().__init__(at, _Handler)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_port}/cifar-10-python.tar.gz"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        if server.errors:
            self.send_error(server.errors.pop(0))
            return
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
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(rest[: server.cuts.pop(0)] if server.cuts else rest)
        self.close_connection = True

    def do_HEAD(self):
        if "Last-Modified" not in self.server.headers:
            self.send_error(403)
            return
        self.send_response(200)
        for name, value in {"Content-Length": str(len(self.server.body)), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()

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


@pytest.mark.parametrize(
    "body, changed, again",
    [
        (b"old file", "Thu, 01 Jan 2026 00:00:00 GMT", 0),
        (b"new file", "Fri, 01 Jan 2999 00:00:00 GMT", 1),
        (b"a longer file", "Thu, 01 Jan 2026 00:00:00 GMT", 1),
        (b"a longer file", "when it suits me", 1),
        (b"a longer file", None, 0),  # a server that answers no such question
    ],
)
def test_a_file_that_was_replaced_on_the_server_is_fetched_again(serve, tmp_path, body, changed, again):
    server = serve(b"old file")
    url = server.url.replace("cifar-10-python.tar.gz", "data.bin")
    path = tmp_path / "data" / "data.bin"
    storage.fetch(url, str(path.parent))
    server.body = body
    server.headers = {"Last-Modified": changed} if changed else {}
    storage.fetch(url, str(path.parent))
    assert path.read_bytes() == (body if again else b"old file") and len(server.asked) == 1 + again


def test_a_file_of_an_unknown_length_is_verified_by_its_digest(serve, tmp_path):
    server = serve(BODY, headers={"Content-Length": None})
    https.download(server.url, str(tmp_path / "file"), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY and len(server.asked) == 1


def test_what_an_earlier_start_has_fetched_is_no_speed_of_this_one(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    part = tmp_path / FETCHING / "file.part"
    part.parent.mkdir()
    part.write_bytes(BODY[:5_000_000])
    https.download(serve(BODY).url, str(tmp_path / "file"), DIGEST)
    assert "cifar-10-python.tar.gz: 4 of 9 MiB, 0.0 MiB/s" in capsys.readouterr().out


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed(serve, tmp_path, ranges):
    server = serve(BODY, cuts=[3_000_000, 1_000_000], ranges=ranges)
    https.download(server.url, str(tmp_path / "file"), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY
    assert len(server.asked) == 3 and server.asked[1].startswith("bytes=")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(serve, tmp_path, monkeypatch, code):
    monkeypatch.setattr(patience.Patience, "pause", lambda *_: None)
    server = serve(GZIPPED)
    server.errors.append(code)
    https.download(server.url, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == GZIPPED and len(server.asked) == 2


def test_a_server_that_refuses_even_the_whole_is_one_line(serve, tmp_path):
    server = serve(b"")  # it answers 416
    with pytest.raises(UserError, match=r"answered 416 Requested Range Not Satisfiable; fetch it to \S+file, or put it into"):
        https.download(server.url, str(tmp_path / "file"))
    assert len(server.asked) == 1


def test_a_full_disk_is_no_failure_of_the_network(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(https.files, "create", lambda _: open("/dev/full", "wb", buffering=0))  # noqa: SIM115 (it is closed there)
    server = serve(GZIPPED)
    with pytest.raises(OSError, match=r"No space left on device: '\S+file\.part'") as failed:
        https.download(server.url, str(tmp_path / "file"))
    assert is_system_error(failed.value) and len(server.asked) == 1


@pytest.mark.parametrize("no_proxy, proxy", [("", "proxy:3128"), ("example.com", None)])
def test_a_proxy_is_named_without_its_password_and_only_where_it_is_used(monkeypatch, no_proxy, proxy):
    monkeypatch.setenv("https_proxy", "http://user:password@proxy:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert https._proxy("https://example.com/x") == proxy


def test_a_download_goes_on_as_long_as_every_attempt_brings_some_of_it(serve, tmp_path, monkeypatch, at):
    """However often it breaks off: the seconds of --patience are those without a byte, not those of the whole download."""
    server, now = serve(BODY, cuts=[2_000_000] * 4), at([1000.0], https, patience)

    def pause(*_):
        now[0] += 0.6 * patience.DEFAULT

    monkeypatch.setattr(patience.Patience, "pause", pause)
    https.download(server.url, str(tmp_path / "file"), DIGEST)
    assert (tmp_path / "file").read_bytes() == BODY and len(server.asked) == 5


def test_how_much_has_come_is_told_to_those_who_wait(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "TELL_SECONDS", 0)
    told = []
    https.download(serve(BODY).url, str(tmp_path / "file"), DIGEST, lambda _text, number: told.append(number))
    assert told[-1] == len(BODY) and told == sorted(told)


REPLACED = {"Last-Modified": "Fri, 01 Jan 2999 00:00:00 GMT"}
BEGUN = {
    "the first part": (BODY[:9_000_000], {}, DIGEST, ["bytes=9000000-"]),
    "all of it": (BODY, {}, None, [f"bytes={len(BODY)}-"]),
    "a longer file": (b"of another" * len(BODY), {}, None, [f"bytes={10 * len(BODY)}-", None]),
    "a part of the file that was there before": (bytes(9_000_000), REPLACED, None, ["bytes=9000000-", None]),
    "a part, and another one comes": (BODY[:7], {"Content-Range": "bytes 5-9/10"}, None, ["bytes=7-", None]),
}


@pytest.mark.parametrize("what", BEGUN)
def test_what_an_earlier_start_has_begun_is_gone_on_with_if_it_is_of_this_file(serve, tmp_path, what):
    """Without a digest nothing else would tell."""
    begun, headers, digest, asked = BEGUN[what]
    server = serve(BODY, headers=headers)
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "file.part").write_bytes(begun)
    https.download(server.url, str(tmp_path / "file"), digest)
    assert (tmp_path / "file").read_bytes() == BODY and server.asked == asked


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
    monkeypatch.setenv(patience.VARIABLE, "0.3")
    body, headers, words = WRONG_ANSWERS[name]
    server = serve(body, ranges=False, headers=headers)
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        https.download(server.url, str(tmp_path / "x.tar.gz"))
    assert "\n" not in str(refused.value) and not (tmp_path / "x.tar.gz").exists()


@pytest.mark.parametrize("url", ["http://example.com/x", "file:///etc/passwd", "ftp://h/x"])
def test_only_https_is_fetched(tmp_path, url):
    with pytest.raises(UserError, match="not an https:// address"):
        https.download(url, str(tmp_path / "x"), DIGEST)


def test_nothing_given_downloads_once_for_all_processes(serve, tmp_path, monkeypatch, archive):
    server = serve(archive.read_bytes())
    monkeypatch.setattr(cifar10_files, "URL", server.url)
    monkeypatch.setattr(cifar10_files, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.chdir(tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(cifar10.load(arguments(None, tmp_path))[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [20] * 4 and server.asked == [None]
