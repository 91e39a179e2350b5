"""What is kept of a loader's batches stays as it was given: a whole batch or a part, in a thread, in a fork, without the loader."""

import gc
import json
import os
import resource
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from datasets.dpex import DpexDataLoader
from datasets.loader import torch_batches
from datasets.sampler import InOrder
from tests.tools.jobs import PATIENCE, ROOT, environment, run

SIZE, WORKERS = 1000, 2
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # that may be open: torch's loader needs one for each tensor that is kept


class Numbered(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if isinstance(number, tuple):  # of torch_batches: a whole batch of ours
            return default_collate([self[int(one)] for one in number[1]])
        return torch.full((SIZE,), float(number)), number


BEFORE = []  # in a worker: the last batches, and a fork that has one


def collate_and_look_back(samples):
    """In a worker: the batch before this one is still what it was, here and in a process that was forked then."""
    for batch, numbers, child, go in BEFORE:
        os.write(go, b"!")
        os.close(go)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and intact(batch, numbers)
    BEFORE.clear()
    batch, numbers = default_collate(samples)
    if numbers[0] % 300 == 0:
        BEFORE.append((batch, numbers.tolist(), *forked(batch, numbers.tolist())))
    return batch, numbers


def intact(batch, numbers):
    return batch.shape[0] == len(numbers) and all((row == number).all() for row, number in zip(batch.numpy(), numbers))


def forked(batch, numbers):
    """(a process that looks at its copy once something is written to the descriptor, the descriptor)"""
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(0 if intact(batch, numbers) else 1)
    os.close(wait)
    return child, go


LOADERS = {
    "alone": lambda data: DataLoader(data, 2),
    "torch": lambda data: DataLoader(data, 2, num_workers=WORKERS, collate_fn=collate_and_look_back),
    "jobs": lambda data: torch_batches(data, InOrder(len(data), 2), WORKERS),
    "dpex here": lambda data: DpexDataLoader(
        data, distribute_mode=False, batch_size=2, num_workers=WORKERS, collate_fn=collate_and_look_back
    ),
    "dpex": lambda data: DpexDataLoader(
        data, distribute_mode=True, head_address="local", batch_size=2, num_workers=WORKERS, collate_fn=collate_and_look_back
    ),
}


def main(name, count):
    """Keep something of each batch, look at all of it without the loader, and print how much memory it takes."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    torch.set_num_threads(1)
    loader, kept, children = LOADERS[name](Numbered(2 * int(count))), [], []
    before, threads = pages(), []
    for number, (batch, numbers) in enumerate(loader):
        whole = [2 * number, 2 * number + 1]
        assert numbers.tolist() == whole
        ways = [(batch, whole), (batch[1:], whole[1:]), (batch[:, 7:9], whole), (batch.view(2, 10, -1)[0], whole[:1] * 10)]
        kept.append(ways[number % 4])
        if number % (int(count) // 10) == 0:
            children.append(forked(batch, whole))
        if number % (int(count) // 10) == 1:
            threads.append(threading.Thread(target=looks_until_the_end, args=(batch, whole), daemon=True))
            threads[-1].start()
    del loader, batch, numbers
    gc.collect()
    THE_END.set()
    for thread in threads:
        thread.join()
    for child, go in children:
        os.write(go, b"!")
        os.close(go)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(kept) == int(count) and len(threads) == 10 and not WRONG and all(intact(*one) for one in kept)
    print(json.dumps({"mib": (pages() - before) / 2**20}))


THE_END, WRONG = threading.Event(), []


def looks_until_the_end(batch, numbers):
    while not THE_END.wait(0.05):
        if not intact(batch, numbers):
            WRONG.append(numbers)
    if not intact(batch, numbers):
        WRONG.append(numbers)


def pages():
    """Bytes that this process has in memory, alone or shared."""
    with open("/proc/self/status") as file:
        sizes = dict(line.split(":", 1) for line in file)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def measured(name, count):
    script = f"from tests.datasets.test_kept_batches import main; main({name!r}, {count})"
    env = environment(PYTHONPATH=str(ROOT), RAY_ADDRESS="local")
    done = run([sys.executable, "-c", script], cwd=ROOT, env=env, timeout=10 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["mib"]


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "dpex"])
def test_300_batches_that_are_kept_stay_as_they_are(name):
    measured(name, 300)


@pytest.mark.rehearsal
def test_20000_batches_that_are_kept_take_no_more_memory_than_torchs():
    """Or as many as torch's loader can have open."""
    as_many = min(20_000, FILES - 500)
    torchs = measured("torch", as_many) / as_many
    for name, count in (("alone", 20_000), ("jobs", as_many), ("dpex here", as_many), ("dpex", 20_000)):
        found = measured(name, count) / count
        print(f"{name}, {count} batches: {2**20 * found:.0f} bytes each, torch's {2**20 * torchs:.0f} of {as_many}")
        assert found < 1.2 * torchs
