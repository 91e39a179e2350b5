"""What Python sees of the stand-in device: the module torch.npu and the backend hccl, as torch_npu has them."""

import contextlib
import types

import torch
import torch_npu_device as device
from torch import distributed

__version__ = torch.__version__.split("+")[0]


def autoload():
    """Called by torch when it is imported."""
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    distributed.Backend.register_backend("hccl", hccl, devices=["npu"])


def hccl(store, rank, size, timeout):
    return device.hccl(distributed.ProcessGroupGloo(store, rank, size, timeout))


def module():
    made = types.ModuleType("torch.npu")
    made.is_available = lambda: device.device_count() > 0
    made.device_count, made.current_device = device.device_count, device.current_device
    made.set_device = lambda chosen: device.set_device(index(chosen))
    made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made.synchronize = lambda chosen=None: None
    made.empty_cache = lambda: None
    made.get_device_name = lambda chosen=None: "Stand-in NPU"
    made.get_device_properties = lambda chosen=None: types.SimpleNamespace(name="Stand-in NPU", total_memory=1 << 36)
    made.mem_get_info = lambda chosen=None: ((1 << 36) - device.memory_allocated(index(chosen)), 1 << 36)
    made.memory_allocated = lambda chosen=None: device.memory_allocated(index(chosen))
    made.conv = types.SimpleNamespace(allow_hf32=True)
    made.is_bf16_supported = lambda: True
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.default_generators = tuple(torch.Generator(f"npu:{number}") for number in range(device.device_count()))
    made.manual_seed = made.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in made.default_generators]
    made.get_rng_state = lambda chosen=None: made.default_generators[index(chosen)].get_state()
    made.set_rng_state = lambda state, chosen=None: made.default_generators[index(chosen)].set_state(state)
    made.Stream = lambda chosen=None: torch.Stream(torch.device("npu", index(chosen)))
    made.current_stream = lambda chosen=None: torch.accelerator.current_stream(torch.device("npu", index(chosen)))
    made.stream = lambda chosen: contextlib.nullcontext()
    made.Event = lambda enable_timing=False: torch.Event("npu", enable_timing=enable_timing)
    return made


def index(chosen):
    """The number of a device that is given as one, as torch.device or not at all."""
    if isinstance(chosen, (str, torch.device)):
        chosen = torch.device(chosen).index
    return device.current_device() if chosen is None else int(chosen)
