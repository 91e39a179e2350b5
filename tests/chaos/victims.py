"""What tests.chaos.kill kills: how one start of it begins, when it is in the middle of a file, and what it has to end with.

Every start is forked from a process that has only imported torch and the like, so that the kills fall into the work.
"""

import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

from tests.tools.jobs import ROOT, environment, final_state
from tests.tools.objectstore import ObjectStore, free_port
from tests.tools.starter import become, opened
from tests.tools.stores import copied

SMALL = ["--custom_data", "true", "--max_samples", "512", "--batch_size", "32", "--width", "4", "--epochs", "3",
         "--save_steps", "2"]  # fmt: skip
START_SECONDS = 600  # after which a start that hangs is ended


def unfinished(output):
    """The files of checkpoints and weights that are being written in a job's output folder."""
    return [path for path in output.glob("**/.start-*/*.unfinished") if ".pt" in path.name]


class Job:
    """A training job: the bits of weights, optimizer, position and metrics."""

    def __init__(self, name, *options):
        self.name, self.options = name, options

    def open(self, folder):
        """Make what all starts share, in this folder."""

    def close(self):
        pass

    def lose(self, folder, draw):
        """What else is lost with a kill."""

    def words(self, folder):
        return [ROOT / "jobs" / f"{self.name}.py", *SMALL, *self.options, "--output_dir", folder / "out"]

    def environments(self):
        """Of the processes of a start."""
        return [{}]

    def run(self, folder, env, output, words=None):
        """Become one process of a start."""
        words = list(map(str, words or self.words(folder)))
        become(
            words,
            folder,
            environment(PYTHONPATH=str(ROOT), **env),
            opened(os.devnull, f"{output}.1", f"{output}.2"),
            START_SECONDS,
        )

    def unfinished(self, folder):
        """Whether a checkpoint is being written, in the subfolder of this start."""
        return bool(unfinished(folder / "out"))

    def has_saved(self, folder):
        """Whether there is something that a start could go on from."""
        return any((folder / "out" / "checkpoints").glob("*.json"))

    def endings(self, folder):
        """The words of the starts that are left to finish, one after another."""
        yield self.words(folder)

    def result(self, folder):
        """{what: digest} of everything that must not depend on how often it was killed."""
        return {name: digest(value) for name, value in final_state(folder).items()}


class Ranks(Job):
    """So many processes on so many nodes, as a platform starts one for each GPU. All are killed, or one and then the rest."""

    def __init__(self, name, *options, ranks=2, nodes=1):
        super().__init__(name, *options)
        self._ranks, self._nodes = ranks, nodes

    def environments(self):
        return self._of(self._ranks)

    def _of(self, ranks):
        on_a_node = ranks // self._nodes
        size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(on_a_node)}
        shared = {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % on_a_node)} for rank in range(ranks)]


class Changing(Ranks):
    """Another number of processes at each start."""

    def __init__(self, name, *options):
        super().__init__(name, *options)
        self._numbers = itertools.cycle([2, 1, 3])

    def environments(self):
        return self._of(next(self._numbers))


class Ray(Job):
    """The batches come from a Ray cluster, which stays while the job is killed."""

    def open(self, folder):
        from tests.tools.rayhosts import RayHosts

        (folder / "ray").mkdir()
        self._hosts = RayHosts(folder / "ray", 0)

    def close(self):
        self._hosts.close()

    def environments(self):
        return [{"RAY_ADDRESS": self._hosts.address, **self._hosts.variables}]


class Pack(Job):
    """`launch pack`: the bytes of all its files."""

    def open(self, folder):
        from tests.tools.packs import write_tree

        self._photographs = write_tree(folder / "photographs", 1000)

    def words(self, folder):
        return [ROOT / "launch" / "__main__.py", "pack", self._photographs, folder / "out", "--shard_mb", 0.05, *self.options]

    def unfinished(self, folder):
        return any((folder / "out").glob("*.unfinished"))

    def has_saved(self, folder):
        return (folder / "out").exists()

    def result(self, folder):
        files = (path for path in (folder / "out").rglob("*") if path.is_file())
        return {str(path.relative_to(folder / "out")): digest(path.read_bytes()) for path in files}


class Published(Job):
    """A run whose output is in a bucket: what is there, and that a start on an empty disk goes on from it.

    With a kill, the disk is lost in one of two cases. Not compared is what a start on an empty disk cannot make again:
    the curves and the report, and the checkpoints before the newest, of which each has to be whole.
    """

    def open(self, folder):
        import boto3  # noqa: F401 (here once for all starts)

        self._store = ObjectStore(folder / "store")
        self._client = self._store.client()
        self._client.create_bucket(Bucket="data")

    def close(self):
        self._store.stop()

    def lose(self, folder, draw):
        if draw.random() < 0.5:
            shutil.rmtree(folder / "output_dir", ignore_errors=True)

    def words(self, folder):
        return [ROOT / "jobs" / "train.py", *SMALL, *self.options, "--output_dir", f"s3://data/{folder.name}"]

    def environments(self):
        return [self._store.environment]

    def run(self, folder, env, output, words=None):
        announce_changes(folder / "changing")
        super().run(folder, env, output, words)

    def unfinished(self, folder):
        """Whether the bucket is being changed."""
        return (folder / "changing").exists()

    def has_saved(self, folder):
        return bool(self._client.list_objects_v2(Bucket="data", Prefix=f"{folder.name}/checkpoints/").get("Contents"))

    def endings(self, folder):
        yield self.words(folder)
        self._fetch(folder)
        shutil.rmtree(folder / "output_dir")
        yield [*self.words(folder), "--epochs", "3"]
        self._fetch(folder, "further")

    def _fetch(self, folder, name="out"):
        copied(self._client, f"{folder.name}/", folder / name)

    def result(self, folder):
        from common.checkpoints.checkpoint import read_verified

        found = {}
        for name in ("out", "further"):
            found.update({f"{name}, {part}": digest(value) for part, value in final_state(folder, name).items()})
            for path in (folder / name).rglob("*"):
                if path.suffix == ".pt":
                    read_verified(str(path))
                if path.suffix in (".pth", ".sha256") or path.name == "metrics.jsonl":  # others hold times
                    found[str(path.relative_to(folder))] = digest(path.read_bytes())
        uploads = self._client.list_multipart_uploads(Bucket="data", Prefix=f"{folder.name}/").get("Uploads", [])
        return {**found, "unfinished uploads": len(uploads)}


def announce_changes(flag):
    """In a start: the file `flag` is there while the bucket is being changed. Files go in parts that fit these small ones."""
    from common.storage import upload
    from common.storage.bucket import Bucket

    upload.PART, ask = 150 << 10, Bucket.ask

    def announcing(self, request, *given, **how):
        if request.startswith(("get", "list", "head")):
            return ask(self, request, *given, **how)
        flag.touch()
        try:
            return ask(self, request, *given, **how)
        finally:
            flag.unlink(missing_ok=True)

    Bucket.ask = announcing


def digest(value):
    """SHA-256 over a nest of dicts, lists, tensors and plain values."""
    result = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                result.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif hasattr(value, "numpy"):
            result.update(value.contiguous().numpy().tobytes())
        else:
            result.update(repr(value).encode())

    add(value)
    return result.hexdigest()


def write_result(victim, folder):
    """For the parent, which must not compute with tensors itself: their threads do not survive a fork."""
    Path(folder, "result").write_text(json.dumps(victim.result(folder), sort_keys=True))


VICTIMS = {
    "train": Job("train"),
    "train_ddp_amp": Ranks("train_ddp_amp", "--batch_size", "16"),
    "train_ddp, 3 processes": Ranks("train_ddp", "--batch_size", "8", "--max_samples", "192", ranks=3),
    "train_ddp_amp, 4 processes": Ranks("train_ddp_amp", "--batch_size", "8", "--max_samples", "192", ranks=4),
    "train_ddp, 2 x 2 processes": Ranks("train_ddp", "--batch_size", "8", "--max_samples", "192", ranks=4, nodes=2),
    "train_ddp_exact": Changing("train_ddp_exact", "--batch_size", "8", "--shares", "4"),
    "train_dp": Job("train_dp"),
    "train_dpex": Ray("train_dpex", "--workers", "1"),
    "pack": Pack("pack"),
    "publisher": Published("publisher", "--max_samples", "128", "--epochs", "2"),
}
