"""Passwords and query strings are in no log, error, file, request or bundle; what looks like a secret is not submitted."""

import functools
import http.server
import json
import re
import subprocess
import sys
import tarfile
import threading

import pytest

from common import secrets
from common.errors import one_line
from launch import submit
from tests.tools.cifar import write_folder
from tests.tools.jobs import PATIENCE, ROOT, TINY, environment, forked, in_rehearsal, run


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/path?token=a&b=c", "https://host/path?***"),
        ("https://me:pw@host:443/path", "https://***@host:443/path"),
        ("https://me:p@s/w@host/path", "https://***@host/path"),
        ("https://me:p?w@host/path or not", "https://*** or not"),
        ("https://me:pw@host/path?mail=a@b", "https://***"),
        ("https://pat@host/path", "https://***@host/path"),
        ("https://host:443/path@2/x", "https://host:443/path@2/x"),
        ("https://host/path#access_token=x", "https://host/path#***"),
        ("cannot get https://u:p@h/x?y: refused; go", "cannot get https://***@h/x?***: refused; go"),
        ("['https://h/x?y', 'https://u:p@h/']", "['https://h/x?***', 'https://***@h/']"),
        ("https:/u:p@h/x", "https:/***@h/x"),
        ("tcp://[fe80::1]:29400 and tcp://HOST:PORT", "tcp://[fe80::1]:29400 and tcp://HOST:PORT"),
        ("HF_TOKEN=abc loss=0.5 MONKEY=x", "HF_TOKEN=*** loss=0.5 MONKEY=x"),
        ("epoch=1/2 loss=2.3, /a/path?x=y", "epoch=1/2 loss=2.3, /a/path?x=y"),
    ],
)
def test_what_is_shown_of_an_address(text, shown):
    assert secrets.mask(text) == one_line(text) == shown
    assert secrets.mask(shown) == shown


LONG = """
from common.secrets import mask, reasons
for piece in ("x", "x-", "a+", ")", "?", "x=", ":/", "http://a?", "A=b ", "@", "[", "a:"):
    for text in (piece * 100_000, "https://" + piece * 100_000, "HF_TOKEN=" + piece * 100_000):
        mask(text), list(reasons(text))
    assert mask(piece * 100_000 + " my-HF_TOKEN=canary").endswith("=***")
"""


def test_a_text_of_a_hundred_thousand_letters_is_masked_too():
    """Some took 30 s for 70,000 letters: seconds that grow with the square would be days here."""
    subprocess.run([sys.executable, "-c", LONG], cwd=ROOT, check=True, timeout=PATIENCE)


def test_what_an_error_quotes_of_an_address_is_hidden_too():
    known = secrets.secret_parts("https://me:pass%20word@host/path?sig=a%2Fbc&x=1#frag")
    assert secrets.mask("nonnumeric port: 'pass%20word@host' in /path?sig=a%2Fbc&x=1", *known) == (
        "nonnumeric port: '***@host' in /path?***"
    )
    assert secrets.mask("no signature a/bc, frag, pass word", *known) == "no signature ***, ***, ***"


SECRET = (
    "HF_TOKEN MYSQL_PWD DB_PASSWORD GIT_PAT AUTH API_KEY my-key COOKIE X-Amz-Signature awsAccessKeyId sig HUAWEICLOUD_SDK_AK"
)


@pytest.mark.parametrize("name", SECRET.split())
def test_names_of_secrets(name):
    assert secrets.is_secret(name) and secrets.is_secret(name.upper().replace("-", "_")) == (name != "awsAccessKeyId")


@pytest.mark.parametrize("name", ["PYTHONPATH", "PATH", "MONKEY", "keyboard", "AUTHOR", "max_tokens", "batch_size", "SPATIAL"])
def test_names_of_anything_else(name):
    assert not secrets.is_secret(name)


# --- Every job and every verb, with canaries ---------------------------------------------------------------------------

CANARY = "canary5d41402abc4b"
QUERY, USER = f"?X-Amz-Signature={CANARY}&e=1", f"me:{CANARY}@"


class Handler(http.server.SimpleHTTPRequestHandler):
    """A folder, and errors that quote what was asked for."""

    def log_message(self, *_):
        pass

    def send_error(self, code, message=None, explain=None):
        super().send_error(code, f"no {self.path}", explain)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of a server that has CIFAR-10's archive."""
    folder = tmp_path_factory.mktemp("site")
    write_folder(folder / "cifar-10-batches-py", 64)
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def nowhere(folder, *finished):
    """The canary is in nothing that was printed and in no file or name of a file."""
    printed = "".join(done.stdout + done.stderr for done in finished)
    assert CANARY not in printed, printed
    for path in folder.rglob("*"):
        assert CANARY not in str(path)
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    return printed


def job(folder, name, *options, check=None, **env):
    words = [ROOT / "jobs" / f"{name}.py", *TINY[2:], "--max_steps", 1, "--enable_gpu", "false", *options]
    (done,) = forked(words, folder, env)
    assert check is None or done.returncode == check, done.stdout + done.stderr
    return done


def test_a_run_from_a_signed_address(site, tmp_path):
    """Fetched, trained, saved, gone on with: the address is named without its query, everywhere."""
    data = ["--data_url", f"{site}/cifar-10-python.tar.gz{QUERY}", "--output_dir", tmp_path / "out"]
    runs = [job(tmp_path, "train", *data, check=0), job(tmp_path, "train", *data, "--max_steps", 2, check=0)]
    runs.append(job(tmp_path, "train", *data, "--doctor", "true"))
    printed = nowhere(tmp_path, *runs)
    assert f"data  {site}/cifar-10-python.tar.gz?***" in re.sub(" +", "  ", printed)
    about = json.loads(next((tmp_path / "out" / "checkpoints").glob("*.json")).read_text())
    assert about["arguments"]["data_url"] == f"{site}/cifar-10-python.tar.gz?***"


MISTAKES = [
    ["--data_url", "{site}/none" + QUERY],
    ["--data_url", "{site}/a b" + QUERY],
    ["--data_url", f"http://{USER}127.0.0.1:1/x"],
    ["--data_url", f"https://{USER}127.0.0.1:1/x{QUERY}"],
    ["--data_url", f"http://example.com/x{QUERY}"],
    ["--data_url", f"ftp://{USER}host/{'x' * 300}{QUERY}"],
    ["--data_url", f"s3://{USER}bucket/x"],
    ["--data_url", f"s3://bucket/x{QUERY}"],
    ["--output_dir", f"https://{USER}host/x{QUERY}"],
    ["--output_dir", f"s3://{USER}bucket/x", "--custom_data", "true"],
    ["--resume", f"s3://{USER}bucket/x.pt", "--custom_data", "true"],
    ["--resume", f"https://host/x.pt{QUERY}", "--custom_data", "true"],
    ["--init_method", f"tcp://{USER}host:1"],
    ["--schedule", f"https://{USER}host"],
    ["--hf_token", CANARY, f"--db_password={CANARY}", "--epochs", "none"],
]


@pytest.mark.parametrize("options", MISTAKES, ids=[" ".join(words[:2]).replace(CANARY, "X")[:60] for words in MISTAKES])
def test_a_mistake_in_an_address_is_told_without_its_secrets(options, site, tmp_path):
    words = [word.replace("{site}", site) for word in options]
    endpoint = site.replace("//", f"//{USER}")
    done = job(
        tmp_path,
        "train",
        *words,
        AWS_ENDPOINT_URL_S3=endpoint,
        AWS_REGION="x",
        AWS_CONFIG_FILE="/none",
        AWS_EC2_METADATA_DISABLED="true",
    )
    assert "error: " in nowhere(tmp_path, done)
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "name",
    [
        "train_amp",
        "train_dp",
        "train_ddp",
        "train_ddp_amp",
        "train_dali",
        "train_dpex",
        "speedrun",
        "train_imagenet",
        "train_restore",
    ],
)
def test_every_job_that_reads_a_signed_address(name, site, tmp_path):
    several = ["--nproc_per_node", 2] if "ddp" in name else ["--net", "small"] if name == "speedrun" else []
    data = [f"--data_url={site}/cifar-10-python.tar.gz{QUERY}", "--output_dir", tmp_path / "out"]
    runs = [job(tmp_path, name, *data, *several), job(tmp_path, name, *data[:1], "--output_dir", f"s3://{USER}b/x", *several)]
    assert "error: " in nowhere(tmp_path, *runs)


VERBS = [
    ["bundle", f"https://{USER}host/job.py{QUERY}"],
    ["bundle", "jobs/train.py", "-o", "{folder}/train.py"],
    ["blocks", "show", f"https://{USER}host/job.py{QUERY}"],
    ["doctor", "jobs/train.py", "--hf_token", CANARY],
    ["local", "--procs", "1", "jobs/train.py", "--", "--data_url", "{site}/none" + QUERY, "--enable_gpu", "false"],
    ["kspeed", "display", "--iplist", f"http://{USER}host:1"],
    ["pack", "{folder}", f"https://{USER}host/x{QUERY}"],
    ["pack", "{folder}", f"s3://{USER}bucket/x"],
    ["submit", "--platform", "slurm", "--hf_token", CANARY, "jobs/train.py"],
    ["submit", "--platform", "slurm", f"--api-key={CANARY}", "jobs/train.py"],
    *(
        ["submit", "--dry_run", "true", "--platform", platform, "jobs/train.py", *words]
        for platform in ("slurm", "modelarts", "pai-dlc", "sagemaker", "kubeflow", "volcano", "local")
        for words in (
            [
                "--data_url",
                f"https://{USER}host/x{QUERY}",
                "--code_url",
                f"s3://{USER}bucket/x",
                "--image",
                f"https://{USER}host/i",
            ],
            [
                "--env",
                f"HF_TOKEN={CANARY}",
                "--env",
                f"A=https://host/x{QUERY}",
                "--",
                "--api_key",
                CANARY,
                "--x",
                f"https://{USER}h",
            ],
        )
    ),
]


@pytest.mark.parametrize(
    "words",
    in_rehearsal(VERBS, lambda words: words[0] == "bundle" or {*words[:5]} & {"modelarts", "pai-dlc", "sagemaker", "volcano"}),
    ids=[" ".join(words[:5]).replace(CANARY, "X")[:60] for words in VERBS],
)
def test_no_verb_shows_a_secret_or_leaves_one(words, site, tmp_path):
    words = [word.replace("{site}", site).replace("{folder}", str(tmp_path)) for word in words]
    path = [str(ROOT / word) if word == "jobs/train.py" and words[0] != "submit" else word for word in words]
    env = environment(PYTHONPATH=str(ROOT), HOME=str(tmp_path), HF_TOKEN=CANARY, MY_URL=f"https://{USER}host")
    done = run([sys.executable, "-m", "launch", *path], cwd=tmp_path, env=env)
    nowhere(tmp_path, done)
    assert "Traceback" not in done.stderr, done.stderr


def test_a_request_is_shown_without_the_query_of_an_address(tmp_path, capsys):
    words = ["--platform", "slurm", "--dry_run", "true", "jobs/train.py", "--env", f"A=https://host/x?page={CANARY}"]
    assert submit.main(words) == 0
    printed = capsys.readouterr()
    assert "export A='https://host/x?***'" in printed.out and CANARY not in printed.out
    assert printed.err == "what is shown as *** would be sent as it was given\n"
