"""A script as users have it since 0.4.0. Three batches make one gradient, which is added up over the processes at the last of them."""

import contextlib

import torch
from torch.utils.data import TensorDataset

from common.start import start

job = start(__doc__, epochs=3, batch_size=8)
inputs = torch.randn(64, 4)
train_loader = job.loader(TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True)), shuffle=True)
model = job.parallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
loss_fn = torch.nn.MSELoss()
run = job.run(model, best_by="loss", best_is="lowest", optimizer=optimizer, scheduler=scheduler)
for _ in run.epochs():
    total = 0.0
    for x, y in run.steps(train_loader):
        updates = run.updates(every=3)
        with contextlib.nullcontext() if updates else model.no_sync():
            loss = loss_fn(model(x), y)
            (loss / 3).backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        run.step(loss)
    scheduler.step()
    run.end_epoch(loss=job.sum(total))
