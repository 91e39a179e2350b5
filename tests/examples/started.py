"""Fit a network to tensors of my own."""

import torch
from torch.utils.data import TensorDataset, random_split

from common.start import start

job = start(__doc__, epochs=20, batch_size=64)
inputs = torch.randn(2000, 8)
targets = inputs.sin().sum(dim=1, keepdim=True)
train_set, val_set = random_split(TensorDataset(inputs, targets), [1600, 400])
train_loader = job.loader(train_set, shuffle=True)
val_loader = job.loader(val_set, batch_size=400)
model = job.parallel(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
loss_fn = torch.nn.MSELoss()
run = job.run(model, best_by="loss", best_is="lowest", optimizer=optimizer, scheduler=scheduler)
for _ in run.epochs():
    model.train()
    for x, y in run.steps(train_loader):
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.step(loss)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        val_loss = sum(loss_fn(model(x), y).item() * len(x) for x, y in val_loader) / len(val_set)
    run.end_epoch(loss=job.sum(val_loss))
