"""Plain training scripts, as somebody writes them who has never seen this project, and the lines that make each of them a job."""

VECTORS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(600, 12)
y = (x[:, 0] * x[:, 1] > 0).long()
train_data = TensorDataset(x[:500], y[:500])
test_data = TensorDataset(x[500:], y[500:])
train_loader = DataLoader(train_data, batch_size=20, shuffle=True)
test_loader = DataLoader(test_data, batch_size=50)
net = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()
for epoch in range(3):
    net.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            correct += (net(inputs).argmax(1) == targets).sum().item()
    print(f"epoch {epoch}: accuracy {correct / len(test_data):.3f}")
"""
VECTORS_AS_A_JOB = [
    ("torch.manual_seed(1)\n", "from common.start import start\n\njob = start(__doc__, epochs=3, batch_size=20)\n"),
    ("DataLoader(train_data, batch_size=20, shuffle=True)", "job.loader(train_data, shuffle=True)"),
    ("DataLoader(test_data, batch_size=50)", "job.loader(test_data, batch_size=50)"),
    ("optimizer = torch", "net = job.parallel(net)\noptimizer = torch"),
    ("for epoch in range(3):", "run = job.run(net, optimizer=optimizer)\nfor epoch in run.epochs():"),
    ("in train_loader:", "in run.steps(train_loader):"),
    ("        optimizer.step()\n", "        optimizer.step()\n        run.step(loss)\n"),
    ('    print(f"epoch {epoch}: accuracy {correct / len(test_data):.3f}")', "    run.end_epoch(accuracy=job.mean(correct, len(test_data)))"),
]  # fmt: skip

TOKENS = '''
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

class Sentences(Dataset):
    """Rows of tokens of many lengths; the label is whether token 7 is in it."""

    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.rows = [[draw.randrange(1, 40) for _ in range(draw.randrange(4, 12))] for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i]), float(7 in self.rows[i])

def collate(batch):
    rows, labels = zip(*batch)
    return pad_sequence(rows, batch_first=True), torch.tensor(labels)

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.encode = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, tokens):
        return self.out(self.encode(self.embed(tokens), src_key_padding_mask=tokens == 0).mean(1)).squeeze(1)

train_set = Sentences(240, 1)
val_set = Sentences(60, 2)
train_loader = DataLoader(train_set, batch_size=12, shuffle=True, collate_fn=collate)
val_loader = DataLoader(val_set, batch_size=30, collate_fn=collate)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
loss_fn = nn.BCEWithLogitsLoss()
for epoch in range(2):
    model.train()
    for step, (tokens, labels) in enumerate(train_loader):
        loss = loss_fn(model(tokens), labels)
        (loss / 4).backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        val_loss = sum(loss_fn(model(tokens), labels).item() * len(labels) for tokens, labels in val_loader) / len(val_set)
    print(val_loss)
'''
TOKENS_AS_A_JOB = [
    ("from torch.utils.data import DataLoader, Dataset\n", "from torch.utils.data import DataLoader, Dataset\nfrom common.start import start\n"),
    ("train_set = Sent", "job = start(__doc__, epochs=2, batch_size=12)\ntrain_set = Sent"),
    ("DataLoader(train_set, batch_size=12, shuffle=True, collate_fn=collate)", "job.loader(train_set, shuffle=True, collate_fn=collate)"),
    ("DataLoader(val_set, batch_size=30, collate_fn=collate)", "job.loader(val_set, batch_size=30, collate_fn=collate)"),
    ("model = Classifier()", "model = job.parallel(Classifier())"),
    ("for epoch in range(2):", 'run = job.run(model, best_by="loss", best_is="lowest", optimizer=optimizer)\nfor epoch in run.epochs():'),
    ("for step, (tokens, labels) in enumerate(train_loader):", "for tokens, labels in run.steps(train_loader):"),
    ("if (step + 1) % 4 == 0:", "if run.updates(every=4):"),
    ("            optimizer.zero_grad()\n", "            optimizer.zero_grad()\n        run.step(loss)\n"),
    ("    print(val_loss)", "    run.end_epoch(loss=job.sum(val_loss))"),
]  # fmt: skip

GAN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
real_data = TensorDataset(torch.randn(300, 2) * 0.5 + torch.tensor([1.0, -1.0]))
loader = DataLoader(real_data, batch_size=15, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=0.001, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.001, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for (real,) in loader:
        noise = torch.randn(len(real), 4).to(real.device)
        fake = generator(noise)
        judged = discriminator(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(real.device)
        loss_d = bce(judged, truth)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = bce(discriminator(fake), truth[: len(real)])
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
    print(f"{epoch}: {loss_d.item():.3f} {loss_g.item():.3f}")
"""
GAN_AS_A_JOB = [
    ("torch.manual_seed(0)\n", "from common.start import start\n\njob = start(__doc__, epochs=2, batch_size=15)\n"),
    ("DataLoader(real_data, batch_size=15, shuffle=True)", "job.loader(real_data, shuffle=True)"),
    ("generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))", "generator = job.parallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))"),
    ("discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))", "discriminator = job.parallel(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))"),
    ("for epoch in range(2):", 'run = job.run(generator, best_by="loss_g", best_is="lowest", discriminator=discriminator, opt_g=opt_g, opt_d=opt_d)\nfor epoch in run.epochs():'),
    ("in loader:", "in run.steps(loader):"),
    ("        opt_g.step()\n", "        opt_g.step()\n        run.step(loss_g)\n"),
    ('    print(f"{epoch}: {loss_d.item():.3f} {loss_g.item():.3f}")', "    run.end_epoch(loss_g=job.sum(loss_g.item()))"),
]  # fmt: skip

AUTOENCODER = """
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, random_split

torch.manual_seed(3)
digits = torch.rand(400, 1, 8, 8).round()
train_set, test_set = random_split(digits, [320, 80])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
test_loader = DataLoader(test_set, batch_size=40)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 64),
    nn.Unflatten(1, (1, 8, 8)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for epoch in range(2):
    model.train()
    for images in train_loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(images), images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    ema.eval()
    error = 0.0
    with torch.no_grad():
        for images in test_loader:
            error += (ema(images).sigmoid() - images).abs().mean((1, 2, 3)).sum().item()
    print(epoch, error / len(test_set))
"""
AUTOENCODER_AS_A_JOB = [
    ("torch.manual_seed(3)\n", "from common.start import start\n\njob = start(__doc__, epochs=2, batch_size=16)\n"),
    ("DataLoader(train_set, batch_size=16, shuffle=True)", "job.loader(train_set, shuffle=True)"),
    ("DataLoader(test_set, batch_size=40)", "job.loader(test_set, batch_size=40)"),
    ("optimizer = torch.optim.Adam(", "model = job.parallel(model)\noptimizer = torch.optim.Adam("),
    ("for epoch in range(2):", 'run = job.run(model, best_by="error", best_is="lowest", optimizer=optimizer, ema=ema)\nfor epoch in run.epochs():'),
    ("in train_loader:", "in run.steps(train_loader):"),
    ("        ema.update_parameters(model)\n", "        ema.update_parameters(model)\n        run.step(loss)\n"),
    ("    print(epoch, error / len(test_set))", "    run.end_epoch(error=job.mean(error, len(test_set)))"),
]  # fmt: skip

PLATEAU = """
import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

torch.manual_seed(0)
rng = np.random.default_rng(0)
table = rng.normal(size=(500, 6)).astype("float32")
prices = (table @ rng.normal(size=6) + rng.normal(scale=0.1, size=500)).astype("float32")
pairs = list(zip(table, prices))
train_loader = torch.utils.data.DataLoader(pairs[:400], batch_size=16, shuffle=True)
val_loader = torch.utils.data.DataLoader(pairs[400:], batch_size=100)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(4):
    for row, price in train_loader:
        loss = torch.nn.functional.mse_loss(model(row)[:, 0], price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        mse = sum(((model(row)[:, 0] - price) ** 2).sum().item() for row, price in val_loader) / 100
    scheduler.step(mse)
    print(epoch, mse)
"""
PLATEAU_AS_A_JOB = [
    ("torch.manual_seed(0)\n", "from common.start import start\n\njob = start(__doc__, epochs=4, batch_size=16)\n"),
    ("torch.utils.data.DataLoader(pairs[:400], batch_size=16, shuffle=True)", "job.loader(pairs[:400], shuffle=True)"),
    ("torch.utils.data.DataLoader(pairs[400:], batch_size=100)", "job.loader(pairs[400:], batch_size=100)"),
    ("model = torch.nn.Linear(6, 1)", "model = job.parallel(torch.nn.Linear(6, 1))"),
    ("for epoch in range(4):", 'run = job.run(model, best_by="mse", best_is="lowest", optimizer=optimizer, scheduler=scheduler)\nfor epoch in run.epochs():'),
    ("in train_loader:", "in run.steps(train_loader):"),
    ("        optimizer.step()\n", "        optimizer.step()\n        run.step(loss)\n"),
    ("    scheduler.step(mse)\n", "    mse = job.sum(mse)\n    scheduler.step(mse)\n"),
    ("    print(epoch, mse)", "    run.end_epoch(mse=mse)"),
]  # fmt: skip

IMAGES = """
import torch
import torchvision
from torchvision import transforms

torch.manual_seed(0)
augment = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomCrop(16, 2), transforms.ToTensor()])
train_set = torchvision.datasets.FakeData(96, (3, 16, 16), 3, augment)
test_set = torchvision.datasets.FakeData(30, (3, 16, 16), 3, transforms.ToTensor())
train_loader = torch.utils.data.DataLoader(train_set, batch_size=8, shuffle=True, num_workers=1)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=10)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torchvision.models.mobilenet_v3_small(num_classes=3, width_mult=0.25).to(device)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=2 * len(train_loader))
for epoch in range(2):
    model.train()
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            right += (model(images.to(device)).argmax(1).cpu() == labels.cpu()).sum().item()
    print("accuracy", right / len(test_set))
"""
IMAGES_AS_A_JOB = [
    ("torch.manual_seed(0)\n", "from common.start import start\n\njob = start(__doc__, epochs=2, batch_size=8)\n"),
    ("torch.utils.data.DataLoader(train_set, batch_size=8, shuffle=True, num_workers=1)", "job.loader(train_set, shuffle=True, workers=1)"),
    ("torch.utils.data.DataLoader(test_set, batch_size=10)", "job.loader(test_set, batch_size=10)"),
    ("criterion = ", "model = job.parallel(model)\ncriterion = "),
    ("for epoch in range(2):", "run = job.run(model, optimizer=optimizer, scheduler=scheduler)\nfor epoch in run.epochs():"),
    ("in train_loader:", "in run.steps(train_loader):"),
    ("        scheduler.step()\n", "        scheduler.step()\n        run.step(loss)\n"),
    ('    print("accuracy", right / len(test_set))', "    run.end_epoch(accuracy=job.mean(right, len(test_set)))"),
]  # fmt: skip

SCRIPTS = {
    "vectors": (VECTORS, VECTORS_AS_A_JOB),
    "tokens": (TOKENS, TOKENS_AS_A_JOB),
    "gan": (GAN, GAN_AS_A_JOB),
    "autoencoder": (AUTOENCODER, AUTOENCODER_AS_A_JOB),
    "plateau": (PLATEAU, PLATEAU_AS_A_JOB),
    "images": (IMAGES, IMAGES_AS_A_JOB),
}


def replaced(text, changes):
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


def as_a_job(name):
    return replaced(*SCRIPTS[name])
