"""The device on which this process computes: a GPU, an NPU, another accelerator that torch supports, or the CPU.

Only this package makes the calls of torch that differ between the kinds of device.
"""

from common.devices.choice import choose, describe, fewer_than_promised, identity, require_one_each
from common.devices.diagnosis import (
    KILLED,
    build,
    diagnosis,
    is_its_own_fault,
    misfit,
    no_memory,
    unknown_architecture,
    versions_apart,
)
from common.devices.kinds import (
    BACKENDS,
    CHANNELS_LAST,
    DALI,
    DATA_PARALLEL,
    KINDS,
    TORCH,
    accelerator,
    available,
    backend,
    collectives_of,
    count,
    has_queues,
    is_accelerator,
    is_ascend,
    is_nvidia,
    noun,
    of,
    refuse,
    slices,
    widest,
)
from common.devices.work import (
    autocast,
    compile_network,
    cores_of_a_rank,
    current,
    current_stream,
    full_precision,
    fused,
    give_memory_back,
    grad_scaler,
    half_precision,
    layout,
    loader_workers,
    mark,
    memory_in_use,
    on_stream,
    peak_memory,
    profiled,
    seed_in_use,
    side_stream,
    synchronize,
    to_device,
    use,
)

__all__ = [
    "BACKENDS", "CHANNELS_LAST", "DALI", "DATA_PARALLEL", "KILLED", "KINDS", "TORCH", "accelerator",
    "autocast", "available", "backend", "build", "choose", "collectives_of", "compile_network", "cores_of_a_rank",
    "count", "current", "current_stream", "describe", "diagnosis", "fewer_than_promised", "full_precision", "fused",
    "give_memory_back", "grad_scaler", "half_precision", "has_queues", "identity", "is_accelerator", "is_ascend",
    "is_its_own_fault", "is_nvidia", "layout", "loader_workers", "mark", "memory_in_use", "misfit",
    "no_memory", "noun", "of", "on_stream", "peak_memory", "profiled", "refuse", "require_one_each", "seed_in_use",
    "side_stream", "slices", "synchronize", "to_device", "unknown_architecture", "use", "versions_apart", "widest",
]  # fmt: skip
