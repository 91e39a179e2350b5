"""airbench94 as its paper describes it ("94% on CIFAR-10 in 3.29 Seconds on a Single GPU", K. Jordan, 2024), written anew.

Whitened patches of 2 x 2, three groups of two convolutions with norms whose scale is fixed, GELU, SGD with Nesterov's momentum, flips
that alternate between the epochs, shifts of two pixels, label smoothing, Lookahead, and a vote of six views of each test image.
"""

import time

import torch
from torch import nn
from torch.nn import functional

GPU = torch.device("cuda")
EPOCHS, BATCH, RATE, DECAY, MOMENTUM, SMOOTHING = 9.9, 1024, 11.5, 0.0153, 0.85, 0.2
WIDTHS, SCALE, NORM_MOMENTUM, BIAS_SCALER, WHITEN_BIAS_EPOCHS, SHIFT = (64, 256, 256), 1 / 9, 0.6, 64.0, 3, 2
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Group(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.first, self.second = conv(before, after), conv(after, after)
        self.norms = nn.ModuleList(norm(after) for _ in range(2))

    def forward(self, images):
        images = functional.gelu(self.norms[0](functional.max_pool2d(self.first(images), 2)))
        return functional.gelu(self.norms[1](self.second(images)))


def conv(before, after):
    made = nn.Conv2d(before, after, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight[:before])
    return made


def norm(width):
    made = nn.BatchNorm2d(width, eps=1e-12, momentum=1 - NORM_MOMENTUM)
    made.weight.requires_grad = False
    return made


class Network(nn.Module):
    def __init__(self, images):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.groups = nn.Sequential(*(Group(a, b) for a, b in zip((24, *WIDTHS), WIDTHS)))
        self.head = nn.Linear(WIDTHS[-1], 10, bias=False)
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).float()
        values, vectors = torch.linalg.eigh((patches.T @ patches / len(patches)).cpu())
        directions = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2).to(images.device)
        self.whiten.weight.data = torch.cat([directions, -directions])
        self.whiten.weight.requires_grad = False

    def forward(self, images):
        features = self.groups(functional.gelu(self.whiten(images)))
        return self.head(functional.max_pool2d(features, 3).flatten(1)) * SCALE


def train(images, labels, seed):
    """(network, seconds) on uint8 images and labels that are on the GPU."""
    torch.manual_seed(seed)
    began = started()
    images = normalised(images)
    steps_of_an_epoch = len(images) // BATCH
    total = max(2, int(EPOCHS * steps_of_an_epoch))
    model = Network(images[:5000]).to(GPU).to(memory_format=torch.channels_last).half()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    scale = 1024 * (1 + 1 / (1 - MOMENTUM))  # the paper's rate and decay are those of 1,024 samples, without momentum's factor
    rate, decay = RATE / scale, DECAY * BATCH / scale
    groups = [
        {"params": parameters, "lr": rate * factor, "weight_decay": decay / (rate * factor)}
        for parameters, factor in zip(trained(model), (1.0, BIAS_SCALER))
    ]
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)
    highest = [group["lr"] for group in optimizer.param_groups]
    slow = {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}
    flipped = torch.rand(len(images), device=GPU) < 0.5
    done, epoch = 0, 0
    while done < total:
        pictures = moved(images, flipped ^ (epoch % 2 == 1))
        order = torch.randperm(len(images), device=GPU)
        model.whiten.bias.requires_grad = epoch < WHITEN_BIAS_EPOCHS
        for chosen in order[: steps_of_an_epoch * BATCH].split(BATCH):
            share = done / total
            for group, top in zip(optimizer.param_groups, highest):
                group["lr"] = top * (0.2 + 0.8 * share / 0.23 if share < 0.23 else 0.07 + 0.93 * (1 - share) / 0.77)
            loss = functional.cross_entropy(model(pictures[chosen]), labels[chosen], label_smoothing=SMOOTHING, reduction="sum")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            done += 1
            if done % 5 == 0 or done == total:
                look_ahead(model, slow, 1.0 if done == total else 0.95**5 * (done / total) ** 3)
            if done == total:
                break
        epoch += 1
    return model.eval(), started() - began


def trained(model):
    """(weights, biases)"""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [one for one in parameters if one.ndim > 1], [one for one in parameters if one.ndim == 1]


@torch.no_grad()
def look_ahead(model, slow, decay):
    for name, value in model.state_dict().items():
        if name in slow:
            slow[name].lerp_(value, 1 - decay)
            value.copy_(slow[name])


def moved(images, flipped):
    """Mirrored where asked, and shifted by up to two pixels."""
    images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
    padded = functional.pad(images, (SHIFT,) * 4, "reflect")
    shifts = torch.randint(0, 2 * SHIFT + 1, (2, len(images)), device=GPU)
    rows, columns = (shift[:, None] + torch.arange(32, device=GPU) for shift in shifts)
    number = torch.arange(len(images), device=GPU)[:, None, None]
    found = padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return found.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model, images, labels):
    """Of six views: as it is, and moved one pixel up and to the left, or down and to the right; each mirrored, too."""
    right = 0
    for pictures, answers in zip(normalised(images).split(2000), labels.split(2000)):
        padded = functional.pad(pictures, (1,) * 4, "reflect")
        views = [(pictures, 0.5), (padded[:, :, :32, :32], 0.25), (padded[:, :, 2:34, 2:34], 0.25)]
        votes = sum(0.5 * share * (model(view) + model(view.flip(-1))) for view, share in views)
        right += (votes.argmax(1) == answers).sum().item()
    return right / len(labels)


def normalised(images):
    mean, std = (torch.tensor(value, device=GPU).view(1, 3, 1, 1) for value in (MEAN, STD))
    return ((images.float() / 255 - mean) / std).half().to(memory_format=torch.channels_last)


def started():
    torch.cuda.synchronize()
    return time.perf_counter()
