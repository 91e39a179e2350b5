"""What a user would write instead of a job of ours with --min_nodes: for torchrun elastic, and for torchft by itself.

    torchrun --nnodes 2:4 --max-restarts 10 ... tests/benchmarks/elastic_peers.py torchrun FOLDER
    python tests/benchmarks/elastic_peers.py torchft FOLDER NODE ADDRESS LIGHTHOUSE

Both as the library's own documentation shows it: a snapshot after each epoch in a folder that all nodes share, or a Manager
around the optimizer. The network, the images and the seconds of a step are those of tests/benchmarks/elastic.py. FOLDER gets
`steps`, a line {"images", "t"} for each step that counts, and `bits`, the SHA-256 of the weights in the end.
"""

import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

from common.models import resnet18
from datasets import synthetic

SAMPLES, EPOCHS, NODES, BATCH, SHARES, SHARE_SECONDS = 1280, 12, 4, 16, 2, 0.1  # BATCH: of each of the nodes


def parts():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = synthetic.cifar_like(SAMPLES, "train")
    data = TensorDataset(torch.from_numpy(images).float() / 255, torch.from_numpy(labels))
    model = resnet18(num_classes=10, width=4)
    return data, model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def work(loss):
    loss.backward()
    time.sleep(SHARES * SHARE_SECONDS)  # the device that computes as much


class Log:
    def __init__(self, folder):
        self.folder = Path(folder)

    def step(self, images):
        with open(self.folder / "steps", "a") as file:
            file.write(json.dumps({"images": images, "t": time.time()}) + "\n")

    def end(self, model):
        weights = torch.cat([value.reshape(-1).double() for value in model.parameters()]).detach()
        (self.folder / "bits").write_text(hashlib.sha256(weights.numpy().tobytes()).hexdigest())


def with_torchrun(folder):
    from torch.utils.data import DistributedSampler

    distributed.init_process_group("gloo")
    rank, log, snapshot, begin = distributed.get_rank(), Log(folder), Path(folder) / "snapshot.pt", 0
    data, model, loss_fn, optimizer = parts()
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["epoch"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(DataLoader(data, BATCH, sampler=sampler)):
            optimizer.zero_grad()
            work(loss_fn(wrapped(images), labels))
            optimizer.step()
            if rank == 0:
                seen = (number + 1) * BATCH * distributed.get_world_size()
                log.step(epoch * SAMPLES + min(seen, SAMPLES))
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, snapshot.with_suffix(".new"))
            os.replace(snapshot.with_suffix(".new"), snapshot)
    if rank == 0:
        log.end(model)
    distributed.destroy_process_group()


def with_torchft(folder, node, address, lighthouse):
    from torchft.data import DistributedSampler
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    log = Log(folder)
    data, model, loss_fn, optimizer = parts()

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)), min_replica_size=2, replica_id=f"train_ddp_{node}",
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        timeout=datetime.timedelta(seconds=30), rank=0, world_size=1, store_addr=address, store_port=store.port,
        lighthouse_addr=lighthouse, hostname=address,
    )  # fmt: skip
    managed = OptimizerWrapper(manager, optimizer)
    sampler = DistributedSampler(data, replica_rank=node, num_replica_groups=NODES, group_rank=0, num_replicas=1)
    epoch = 0
    while manager.batches_committed() * BATCH < EPOCHS * SAMPLES:
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in DataLoader(data, BATCH, sampler=sampler):
            before = manager.batches_committed()
            managed.zero_grad()
            work(loss_fn(model(images), labels))
            gradients = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
            manager.allreduce(gradients).wait()  # its DistributedDataParallel fails with torch 2.15: it looks for Future._fut
            for parameter, mean in zip(model.parameters(), gradients.split([p.numel() for p in model.parameters()])):
                parameter.grad.copy_(mean.view_as(parameter))
            managed.step()
            if manager.batches_committed() > before and manager.participating_rank() == 0:
                log.step(manager.batches_committed() * BATCH)
            if manager.batches_committed() * BATCH >= EPOCHS * SAMPLES:
                break
    if manager.participating_rank() == 0:
        log.end(model)
    os._exit(0)  # a manager waits for lighthouses and groups that may be gone


if __name__ == "__main__":
    which, folder, *more = sys.argv[1:]
    if which == "torchrun":
        with_torchrun(folder)
    else:
        with_torchft(folder, int(more[0]), *more[1:])
