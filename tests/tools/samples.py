"""What the tests of the sample cache share: photographs, servers, and a cache that is patient with a loaded machine."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets.kspeed.cache import SampleCache
from tests.tools.memcached import Memcached

LOGIN = {"user": "admin", "password": "canary-5d41402a"}
PATIENT = 10  # a deadline that a loaded machine does not miss


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """train/ and val/ with two classes each; the first names are the same in both."""
    monkeypatch.chdir(tmp_path)
    for variable in ("KSPEED_IPLIST", "KSPEED_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)
    for split, count in (("train", 8), ("val", 2)):
        for label in ("cat", "dog"):
            for number in range(count):
                where = tmp_path / "photos" / split / label
                where.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng([len(split), len(label), ord(label[0]), number]).integers(
                    0, 255, (40, 50, 3), np.uint8
                )
                Image.fromarray(pixels).save(where / f"{number}.jpg", quality=80 + number)
    return tmp_path / "photos"


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Memcached("-m", 64)) for _ in range(3)]


@pytest.fixture
def server():
    with Memcached() as one:
        yield one


def listed(servers):
    return ",".join(one.address for one in servers)


def patient(*servers, **login):
    return SampleCache(listed(servers), deadline=PATIENT, **login)


def images_below(folder):
    return sorted(str(path) for path in folder.rglob("*.jpg"))


def rewrite_unseen(path):
    """Other bytes, and the same name, size and time: who still gets the old ones got them from the cache."""
    about, old = os.stat(path), Path(path).read_bytes()
    Path(path).write_bytes(bytes(len(old)))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return old


@pytest.fixture
def locked(tmp_path):
    (tmp_path / "users").write_text("{user}:{password}\n".format(**LOGIN))
    with Memcached("-Y", tmp_path / "users") as one:
        yield one
