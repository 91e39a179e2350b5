"""Steps of a small network in float16 whose gradients overflow until the scale has fallen far enough, on any device."""

import torch

from common.checkpoints import restore
from common.run import Scaler


def overflowing(device, scale, steps=12):
    """(the scale before and after each step, whether the weights moved in it, the scaler)"""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = Scaler(device, init_scale=scale)
    restore.create_momentum_buffers(optimizer)  # as a run does it
    scales, moved = [scaler.get_scale()], [False]
    for _ in range(steps):
        before = model.weight.detach().clone()
        with torch.autocast(device, torch.float16):
            loss = model(torch.full((8, 64), 30.0, device=device)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, model.weight))
    return scales, moved, scaler
