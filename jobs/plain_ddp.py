"""Train a ResNet on CIFAR-10 with every GPU of every node: what distributed training needs, on one page, with torch alone.

    python jobs/plain_ddp.py --custom_data true                                   made-up images, on this machine
    torchrun --nproc_per_node 8 jobs/plain_ddp.py --data_url /data/cifar10        a folder that holds CIFAR-10's, or its archive
    python -m launch blocks revert jobs/plain_ddp.py -o one.py                    the job of one device

A restart goes on after the last whole epoch. The other jobs go on within one, to the same bits, and save when they are stopped;
they name who failed or hangs, use buckets, leave curves and a report, and know platforms that do not count nodes by --rank.
"""

import argparse
import os
import sys
import tarfile
from pickle import Unpickler, UnpicklingError

import torch
from torch import nn

BATCH = 512  # images of a step, of all processes together
WIDTH = 64  # channels of the network's first layers
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
FILES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def main():
    args = options()
    on_gpu = torch.cuda.is_available() if args.enable_gpu is None else args.enable_gpu == "true"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("error: --enable_gpu true, and torch sees no GPU: choose a flavor that has one, or --enable_gpu false")
    device = torch.device("cuda" if on_gpu else "cpu")
    rank = 0  # the number of this process; with several, the blocks below set it
    ranks = 1
    ### DDP: a platform starts this file once on each node; it becomes torchrun, which starts it once for each GPU ###
    if "LOCAL_RANK" not in os.environ:
        nodes = ["--nnodes", args.world_size, "--node_rank", args.rank, "--rdzv_endpoint", args.init_method.rpartition("/")[2]]
        processes = os.environ.get("NPROC_PER_NODE") or (torch.cuda.device_count() if on_gpu else 1)
        words = [*(nodes if args.world_size > 1 else ["--standalone", "--nnodes", 1]), "--nproc_per_node", processes, *sys.argv]
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *map(str, words)])
    ### end DDP ###
    ### DDP: below, all processes run the same lines; they meet here, and each takes a GPU of its own ###
    __import__("torch.distributed.nn.functional")  # DDP imports it: after the meeting, it would keep the group beyond its end
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    ### end DDP ###
    train_images, train_labels, test_images, test_labels = (part.to(device) for part in load(args))
    torch.manual_seed(0)
    network = SmallResNet().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    # Every tensor that a restart needs: not copies, but what the network and the optimizer compute with.
    state = {"epochs_done": torch.zeros((), dtype=torch.int64, device=device), **network.state_dict()}
    for name, weight in network.named_parameters():
        state[f"momentum of {name}"] = torch.zeros_like(weight)
        optimizer.state[weight]["momentum_buffer"] = state[f"momentum of {name}"]
    checkpoint = os.path.join(args.output_dir, "made_up.pth" if args.custom_data == "true" else "plain_ddp.pth")
    if rank == 0 and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        assert saved.keys() == state.keys(), f"{checkpoint} is of another network: remove it, or give another --output_dir"
        for name, value in saved.items():
            state[name].copy_(value)
    model = network
    ### DDP: all go on from what process 0 has read or made; from here on, backward() averages the gradients of all ###
    for tensor in state.values():
        torch.distributed.broadcast(tensor, 0)
    model = nn.parallel.DistributedDataParallel(network)
    ### end DDP ###
    begin = int(state["epochs_done"])
    if rank == 0:
        print(f"{ranks} x {device.type}: {len(train_images)} images, {begin} of {args.epochs} epochs are done", flush=True)
    for epoch in range(begin, args.epochs):
        generator = torch.Generator().manual_seed(epoch)  # the order and the crops depend on the epoch alone, in every process
        order = torch.randperm(len(train_images), generator=generator)
        losses = torch.zeros(len(order) // BATCH, device=device)
        optimizer.param_groups[0]["lr"] = args.lr * min((epoch + 1) / 5, 1 - epoch / args.epochs)
        for step in range(len(losses)):
            ids = order[step * BATCH : (step + 1) * BATCH]
            draws = torch.rand(BATCH, 3, generator=generator)
            ### DDP: each process takes its part of the step's images ###
            ids = ids[rank::ranks]
            draws = draws[rank::ranks]
            ### end DDP ###
            ids = ids.to(device)
            images = crop_and_flip(train_images[ids], draws.to(device))
            loss = nn.functional.cross_entropy(model(images), train_labels[ids], reduction="sum") * ranks / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
        with torch.no_grad():  # without eval mode: GroupNorm has none of its own
            guesses = [network(part).argmax(dim=1) for part in test_images[rank::ranks].split(500)]
        right = (torch.cat(guesses) == test_labels[rank::ranks]).sum()
        ### DDP: all call this, as each has seen its own images: the mean of the losses, the sum of the right answers ###
        torch.distributed.all_reduce(losses)
        losses /= ranks
        torch.distributed.all_reduce(right)
        ### end DDP ###
        state["epochs_done"] += 1
        scores = f"train_loss={losses.mean():.4f} accuracy={right / len(test_images):.4f}"
        if rank == 0:
            print(f"epoch={epoch + 1} first_loss={losses[0]:.4f} {scores}", flush=True)
            os.makedirs(args.output_dir, exist_ok=True)
            torch.save(state, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)  # a kill before this line leaves the checkpoint of before
    ### DDP: all have their results, so nobody is cut off ###
    torch.distributed.destroy_process_group()
    ### end DDP ###


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--init_method", default=f"{os.getenv('MASTER_ADDR')}:{os.getenv('MASTER_PORT')}", help="tcp://HOST:PORT of node 0")
    add("--rank", type=int, default=os.getenv("RANK", "0"), help="the number of this node")
    add("--world_size", type=int, default=os.getenv("WORLD_SIZE", "1"), help="how many nodes there are")
    add("--data_url", default="input_dir", help=f"a folder with {FOLDER} or {ARCHIVE}")
    add("--custom_data", choices=["true", "false"], default="false", help="true: made-up images, whose accuracy means nothing")
    add("--output_dir", "--train_url", default="output_dir/plain_ddp", help="where the checkpoint lies")
    add("--enable_gpu", choices=["true", "false"], help="unset: the GPU if there is one")
    add("--lr", type=float, default=0.1, help="learning rate: it rises towards this in 5 epochs, then falls")
    add("--epochs", type=int, default=30)
    args, unknown = parser.parse_known_args()
    if args.world_size > 1 and not args.init_method.rpartition(":")[2].isdigit():
        sys.exit(f"error: --init_method {args.init_method} is not the address of node 0, tcp://HOST:PORT")
    if args.custom_data == "false" and not any(os.path.exists(os.path.join(args.data_url, name)) for name in (FOLDER, ARCHIVE)):
        sys.exit(f"error: --data_url {args.data_url} has neither {FOLDER} nor {ARCHIVE}: give another, or --custom_data true")
    if unknown:
        print("ignored:", *unknown, flush=True)
    return args


class Arrays(Unpickler):
    """Reads CIFAR-10's files: arrays, and nothing that could run code."""

    def find_class(self, module, name):
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        raise UnpicklingError(f"{module}.{name} does not belong into a file of CIFAR-10")


def load(args):
    """Return training images, their labels, test images and labels: uint8 (N, 3, 32, 32) and int64."""
    if args.custom_data == "true":
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(6000) % 10
        squares = torch.randint(0, 128, (10, 3, 4, 4), dtype=torch.uint8, generator=generator)[labels]
        images = squares.repeat_interleave(8, 2).repeat_interleave(8, 3)
        images += torch.randint(0, 128, (6000, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return images[:5000], labels[:5000], images[5000:], labels[5000:]
    folder = os.path.join(args.data_url, FOLDER)
    if os.path.exists(folder):
        files = [open(os.path.join(folder, name), "rb") for name in FILES]
    else:
        archive = tarfile.open(os.path.join(args.data_url, ARCHIVE))
        files = [archive.extractfile(f"{FOLDER}/{name}") for name in FILES]
    batches = [Arrays(file, encoding="bytes").load() for file in files if file]
    images = [torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32) for batch in batches]
    labels = [torch.tensor(batch[b"labels"]) for batch in batches]
    return torch.cat(images[:-1]), torch.cat(labels[:-1]), images[-1], labels[-1]


def crop_and_flip(images, draws):
    """Return 32 x 32 pixels of each image, padded by 4 on each side, from a corner that is drawn, and mirrored or not."""
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    offsets = torch.arange(32, device=images.device)
    rows = (9 * draws[:, :1]).to(torch.int64) + offsets
    columns = (9 * draws[:, 1:2]).to(torch.int64) + torch.where(draws[:, 2:] < 0.5, offsets.flip(0), offsets)
    index = torch.arange(len(images), device=images.device)
    return padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class Residual(nn.Module):
    """GroupNorm looks at one image, and not at a batch: so several processes compute what one would."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class SmallResNet(nn.Sequential):
    def __init__(self):
        blocks = [Residual(WIDTH, WIDTH, 1), Residual(WIDTH, 2 * WIDTH, 2), Residual(2 * WIDTH, 4 * WIDTH, 2)]
        super().__init__(nn.Conv2d(3, WIDTH, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * WIDTH, 10))

    def forward(self, images):
        return super().forward(images.float() / 64 - 2)


if __name__ == "__main__":
    main()
