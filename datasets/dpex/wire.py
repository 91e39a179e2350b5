"""How data sets and batches travel between the processes of datasets.dpex: a short pickle, and beside it the bytes of every
tensor and array, which nobody copies to read them.

Between two processes of one machine the bytes lie in anonymous memory whose descriptor is handed over: it needs no name, no
room in /dev/shm, and nobody can forget to delete it.
"""

import io
import mmap
import os
import pickle
import site
import sys
import sysconfig
from multiprocessing import reduction

ALIGNED = 64  # bytes; as torch allocates
AT_ONCE = 1 << 30  # bytes; the kernel writes no more than 2 GiB in one call


def pack(thing):
    """(the pickle, the buffers that it leaves out, the modules that whoever reads it must have)"""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing):
            module = getattr(thing, "__module__", None) if isinstance(thing, FUNCTION_LIKE) else type(thing).__module__
            modules.add(module)
            if type(thing).__name__ == "Tensor" and type(thing).__module__ == "torch":
                return _apart(thing)
            return super().reducer_override(thing)

    modules, buffers, file = set(), [], io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
    return file.getvalue(), [buffer.raw() for buffer in buffers], modules


FUNCTION_LIKE = (type, type(pack))


def unpack(header, buffers):
    """Only ever of what a process that this job started has packed."""
    return pickle.loads(header, buffers=buffers)


def _apart(tensor):
    """A tensor as an array that lies in memory as the tensor does, and how to read it."""
    import torch

    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # channels last stays channels last
    whole = tensor.permute(order).contiguous()
    # numpy has no name for bfloat16
    array = whole.view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()
    return _together, (array, tensor.dtype, order)


def _together(array, dtype, order):
    import torch

    tensor = torch.from_numpy(array).view(dtype)
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])


def packages(modules):
    """The folders of those top-level packages that were not installed but lie beside the user's program."""
    installed = (*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    found = set()
    for name in {str(module).split(".")[0] for module in modules if module}:
        for path in getattr(sys.modules.get(name), "__path__", []):
            if not path.startswith(installed) and os.path.isdir(path):  # those of a bundle are in one file
                found.add(path)
    return found


def send_buffers(connection, buffers):
    """Hand the bytes to the process at the other end, behind a message that has told it their `sizes`."""
    if not buffers:
        return
    descriptor = os.memfd_create("batch")
    try:
        for buffer in buffers:
            _write(descriptor, buffer)
            os.lseek(descriptor, -os.lseek(descriptor, 0, os.SEEK_END) % ALIGNED, os.SEEK_END)
        os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR))
        reduction.send_handle(connection, descriptor, None)
    finally:
        os.close(descriptor)


def _write(descriptor, buffer):
    rest = memoryview(buffer).cast("B")
    while len(rest):
        rest = rest[os.write(descriptor, rest[:AT_ONCE]) :]


def map_here(descriptor, length):
    """For few and short-lived ones: Python keeps a descriptor for each of them."""
    return memoryview(mmap.mmap(descriptor, length))


def map_with_torch(descriptor, length):
    """For batches, of which a reader may keep any number."""
    import torch

    return memoryview(torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8).numpy())


def receive_buffers(connection, sizes, mapped=map_with_torch):
    """The same bytes as memory that is the receiver's own, to write into, too."""
    if not sizes:
        return []
    descriptor = reduction.recv_handle(connection)
    try:
        length = os.fstat(descriptor).st_size
        memory = mapped(descriptor, length) if length else memoryview(bytearray())
    finally:
        os.close(descriptor)
    buffers, at = [], 0
    for size in sizes:
        buffers.append(memory[at : at + size])
        at += -(-size // ALIGNED) * ALIGNED
    return buffers
