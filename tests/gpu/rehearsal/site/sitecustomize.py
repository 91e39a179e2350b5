"""What the stand-in needs in every Python process of a rehearsed run, also in those that the run starts; see ../__init__.py.

With REHEARSAL_COSTS=FILE and REHEARSAL_STEPS=FIRST:LAST, what a step cost between those two is written to FILE.RANK.
"""

import importlib.util
import os
import sys


class AfterImport:
    """Calls functions with modules that have just been imported: most processes never import torch, and shall not have to."""

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path=None, target=None):
        if name not in self.actions:
            return None
        action = self.actions.pop(name)  # or this would ask itself
        spec = importlib.util.find_spec(name)
        self.actions[name] = action  # whoever asks may only want to know whether there is such a module
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if self.actions.pop(name, None):
                action(module)

        spec.loader.exec_module = exec_module
        return spec


def replace_convolutions(torch):
    """Without cuDNN torch would compute them image by image. Here each is what it is on a GPU: a launch, and one for each gradient."""
    torch.backends.cudnn.enabled = False
    library = torch.library.Library("aten", "IMPL")

    def convolution(images, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
        pairs = zip(images.shape[2:], weight.shape[2:], padding, dilation, stride, output_padding)
        if transposed:
            sizes = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, p, d, s, o in pairs]
        else:
            sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s, _ in pairs]
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        form = layout(images, weight)
        made = torch.empty((len(images), channels, *sizes), dtype=images.dtype, device=images.device, memory_format=form)
        return made.fill_(0)

    def layout(images, weight, backend=None):
        last = [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, weight)]
        return torch.channels_last if any(last) else torch.contiguous_format

    def backward(grad, images, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted):
        bias = torch.empty(weight.shape[:1], dtype=weight.dtype, device=weight.device) if wanted[2] else None
        made = [torch.empty_like(images) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, bias]
        return tuple(None if tensor is None else tensor.fill_(0) for tensor in made)

    torch._C._conv_determine_backend_memory_format = layout  # what --compile believes of a convolution
    library.impl("convolution", convolution, "CUDA")
    library.impl("convolution_backward", backward, "CUDA")
    torch._rehearsal = library  # the replacements end with it
    if "REHEARSAL_COSTS" in os.environ:
        count_steps_of_optimizers()


def believe_every_loss(losses):
    look = losses.UncheckedLosses.first_bad
    losses.UncheckedLosses.first_bad = lambda self: look(self) and None


def count_everything_as_right(scores):
    import torch

    ask = scores.Scores.confusion.func
    scores.Scores.confusion = property(lambda self: torch.eye(len(ask(self)), dtype=torch.int64))


def keep_arrays_on_the_cpu(arrays):
    make = arrays.ArrayBatches.__init__

    def on_the_cpu(self, data_set, sampler, device, *rest):
        import torch

        make(self, data_set, sampler, torch.device("cpu"), *rest)

    arrays.ArrayBatches.__init__ = on_the_cpu


def decode_on_the_cpu(batches):
    make = batches.PipelineBatches.__init__

    def on_the_cpu(self, data_set, sampler, device, workers=0, decode_on_gpu=False):
        make(self, data_set, sampler, device, workers)

    batches.PipelineBatches.__init__ = on_the_cpu


def count_steps(run):
    """A step of a job ends with run.step(loss)."""
    make, step = run.Run.__init__, run.Run.step

    def made(self, *options, **more):
        COSTS.by_optimizer = False
        make(self, *options, **more)

    def counted(self, loss):
        step(self, loss)
        COSTS.step(self.peers.rank)

    run.Run.__init__, run.Run.step = made, counted
    run.Run._log_line = lambda self, loss: None  # comes every five seconds, whatever a step costs


class Costs:
    """Of the steps after FIRST, up to LAST."""

    def __init__(self):
        self.first, self.last = map(int, os.environ["REHEARSAL_STEPS"].split(":"))
        self.done, self.by_optimizer, self.waits = 0, True, {}

    def step(self, rank):
        self.done += 1
        if self.done == self.first:
            self.begin()
        if self.done == self.last:
            self.write(rank)

    def begin(self):
        import atexit
        import ctypes
        import time

        self.library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.told = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self.waited)
        self.library.rehearsal_on_waiting(self.told)
        atexit.register(self.library.rehearsal_on_waiting, None)  # threads go on while Python ends
        self.library.rehearsal_forget()
        self.began = time.thread_time()

    def waited(self, function):
        """Who in the project made the host wait."""
        import threading
        import traceback

        frames = [
            frame
            for frame in traceback.extract_stack()
            if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
        ]
        ours = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames if frame.filename != __file__]
        place = f"{threading.current_thread().name}: {' < '.join(reversed(ours[-3:]))}"
        self.waits[place] = self.waits.get(place, 0) + 1

    def write(self, rank):
        import ctypes
        import json
        import time

        milliseconds = 1000 * (time.thread_time() - self.began)
        text = ctypes.create_string_buffer(1 << 16)
        self.library.rehearsal_counts(text, len(text))
        self.library.rehearsal_on_waiting(None)
        counts = dict(line.rsplit("=", 1) for line in text.value.decode().splitlines())
        facts = {"steps": self.last - self.first, "milliseconds": milliseconds, "waits": self.waits}
        facts["counts"] = {name: int(number) for name, number in counts.items()}
        with open(f"{os.environ['REHEARSAL_COSTS']}.{rank}", "w") as file:
            json.dump(facts, file)


def count_steps_of_optimizers():
    """Where a job has no Run: its steps end with those of its optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: COSTS.by_optimizer and COSTS.step(0))


ACTIONS = {
    "torch": replace_convolutions,
    # Memory holds what it held before, so no result means anything: it is read, as on a GPU, and not looked at.
    "common.run.losses": believe_every_loss,
    "common.run.scores": count_everything_as_right,
    # DALI brings a runtime of its own.
    "datasets.dali.arrays": keep_arrays_on_the_cpu,
    "datasets.dali.batches": decode_on_the_cpu,
}
if "REHEARSAL_COSTS" in os.environ:
    COSTS = Costs()
    ACTIONS["common.run.run"] = count_steps
sys.meta_path.insert(0, AfterImport(ACTIONS))
