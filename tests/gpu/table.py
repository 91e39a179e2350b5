"""The rows of `make gpu`, the most important first, and the seconds that each may take; slices of them that take up to ten minutes."""

from dataclasses import dataclass

from tests.gpu import machine, runs, speed, why
from tests.gpu.rows import Measure


@dataclass(frozen=True)
class Entry:
    measure: Measure
    seconds: int


ROWS = {
    "machine": Entry(machine.the_doctor_sees_what_the_driver_says, 120),
    "jobs": Entry(runs.every_job_runs_and_no_step_waits, 400),
    "batches": Entry(machine.batches_are_those_of_the_cpu, 60),
    "step": Entry(machine.a_step_is_that_of_the_cpu, 90),
    "graph": Entry(machine.a_graph_of_a_step_has_its_bits, 60),
    "buffers": Entry(machine.buffers_are_not_read_after_they_were_given_back, 120),
    "kills": Entry(runs.killed_runs_end_with_the_same_bits, 300),
    "overflow": Entry(runs.overflowing_gradients_skip_steps, 90),
    "two ranks": Entry(runs.two_ranks_of_which_one_is_lost, 180),
    "exact": Entry(runs.exact_shares_have_the_same_bits_on_one_and_two_ranks, 120),
    "devices": Entry(runs.a_checkpoint_goes_on_on_the_other_device, 150),
    "trace": Entry(runs.a_trace_of_the_gpu, 90),
    "quality": Entry(machine.quality_is_that_of_the_cpu, 60),
    "compile": Entry(runs.compiled_jobs_learn_the_same_and_are_compiled_once, 400),
    "cifar speed": Entry(speed.training_on_cifar, 400),
    "resnet50 speed": Entry(speed.resnet50_on_noise, 400),
    "other libraries": Entry(speed.resnet50_in_other_libraries, 420),
    "why": Entry(why.what_sets_the_figures, 300),
    "out of memory": Entry(runs.a_batch_that_does_not_fit, 150),
    "compile, resumed": Entry(runs.compiled_runs_go_on, 240),
    "dali": Entry(machine.dali_gives_the_same_batches, 90),
    "photographs speed": Entry(speed.resnet50_on_photographs, 300),
    "loaders": Entry(speed.loaders, 300),
    "start": Entry(speed.from_the_start_to_the_first_step, 120),
    "checkpoint stall": Entry(speed.a_checkpoint_is_saved_meanwhile, 60),
    "thirty epochs": Entry(speed.thirty_epochs_of_cifar, 300),
    "speedrun": Entry(speed.speedrun_beside_airbench, 300),
    "pages": Entry(runs.commands_of_the_pages, 240),
}


@dataclass(frozen=True)
class Slice:
    about: str  # what it shows, and what has to lie beside it
    lanes: list[list[str]]  # rows one after the other; the lanes beside each other
    minutes: float = 7.5


SLICES = {
    "behaviour": Slice(
        "whether everything works; needs nothing beside it",
        [
            ["machine", "jobs", "trace"],
            ["compile", "overflow"],
            ["step", "graph", "batches", "quality", "buffers", "kills", "devices"],
            ["exact", "two ranks", "pages"],
        ],
    ),
    "resnet50": Slice(
        "ResNet-50, both half precisions, eager and compiled; needs nothing beside it",
        [["resnet50 speed", "checkpoint stall"]],
        minutes=8,
    ),
    "libraries": Slice(
        "the same step in what people would pick instead; needs lightning, accelerate, timm", [["other libraries"]]
    ),
    "why": Slice("what sets the figures of a step, a start and a checkpoint; needs nothing beside it", [["why", "start"]]),
    "limits": Slice(
        "what needs the GPU for itself: too large a batch, and kills of a compiled job; needs nothing beside it",
        [["out of memory", "compile, resumed"]],
    ),
    "cifar": Slice("a step of the CIFAR jobs beside plain loops; needs nothing beside it", [["cifar speed"]]),
    "photographs": Slice(
        "all cores feeding one GPU; --data FOLDER with imagenet/{train,val}, --wheels FOLDER with nvImageCodec's",
        [["photographs speed", "loaders", "dali"]],
    ),
    "accuracy": Slice(
        "94 % beside airbench94, and thirty epochs; --data FOLDER with cifar-10-batches-py",
        [["speedrun", "thirty epochs"]],
        minutes=9.3,
    ),
}
