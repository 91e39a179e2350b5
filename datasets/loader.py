"""Batches of (images, labels) on the device, ready for the network, from any data set that is asked for whole batches.

The images stay uint8 until they are on the device; there the whole batch is augmented and normalised.
"""

import signal

import torch


class DeviceLoader:
    """`batches` gives (uint8 images, labels, ids) in the sampler's order; `ids` are those of the batch that was last given."""

    def __init__(self, batches, sampler, device, mean, std, augment=None):
        self.sampler, self.device = sampler, device
        self._batches, self._augment = batches, augment
        self.ids = None
        mean, std = (torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (mean, std))
        self._scale, self._shift = 1 / (255 * std), -mean / std

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        epoch = self.sampler.epoch
        for images, labels, ids in self._batches:
            images = images.to(self.device, non_blocking=True)
            if self._augment:
                images = self._augment(images, ids, epoch=epoch)
            self.ids = ids
            yield images.to(torch.float32).mul_(self._scale).add_(self._shift), labels.to(self.device, non_blocking=True)


def torch_batches(data_set, sampler, device, workers=0):
    """Through torch's DataLoader; `data_set[epoch, ids]` gives a whole batch."""
    return torch.utils.data.DataLoader(
        data_set,
        sampler=_WithEpoch(sampler),
        batch_size=None,  # the sampler gives whole batches of ids
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_parent,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own, so that starting an epoch draws nothing from the global one
    )


class _WithEpoch:
    """The sampler's batches, each with its epoch: a worker process lives longer than one."""

    def __init__(self, sampler):
        self._sampler = sampler

    def __len__(self):
        return len(self._sampler)

    def __iter__(self):
        return ((self._sampler.epoch, ids) for ids in self._sampler)


def _leave_signals_to_the_parent(_worker):
    """A platform stops a job with a signal to every process; the loader must live until the job has saved."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
