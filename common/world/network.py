"""Find the network interface for the ranks and a free port,
and set how many connections a process may have."""

import array
import contextlib
import fcntl
import os
import re
import resource
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

SIOCGIFCONF = 0x8912  # asks for all IPv4 addresses
IFREQ_BYTES = 40  # of one of them: 16 of the interface's name, then family, port, and 4 of the address
MOST_ADDRESSES = 4096
ADAPTERS = Path("/sys/class/infiniband")

# Errors of NCCL that InfiniBand, or GPUDirect over it, may have caused, rather than another rank.
OF_INFINIBAND = r"nccl.*(ib_|ibv|NET/IB|GDR|unhandled system error|ncclSystemError|ncclInternalError)"


def allow_open_files(number: int) -> int:
    """Let this process have `number` files and connections open, or as many as the hard limit allows;
    return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def free_port() -> int:
    """Return a TCP port that is free on this host."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def route_to(address: str) -> Optional[str]:
    """Return this host's address from which packets to `address` leave, or None without a route.

    No packet is sent there.
    """
    for family, kind, protocol, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    return None


def group_environment(own_address: Optional[str]) -> dict[str, str]:
    """Return the environment of a process group of Gloo: interfaces(),
    and two settings with which ranks meet in fewer bytes.

    Without them each rank tells an address for each other rank, and of 256 ranks, rank 0 sends 156 MB instead
    of 12 MB.
    """
    store_settings = {
        name: os.environ.get(name, "1")
        for name in ("GLOO_ENABLE_STORE_V2_API", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
    }
    return {**store_settings, **interfaces(own_address)}


def interfaces(own_address: Optional[str]) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME and, unless it is lo, NCCL_SOCKET_IFNAME for the interface with this address,
    if not yet set.

    Without them Gloo resolves the host's own name, which in many containers is the loopback, and no node
    reaches another.
    """
    name = interface_of(own_address)
    if name is None:
        return {}
    settings = {"GLOO_SOCKET_IFNAME": name}
    if name != "lo":
        settings["NCCL_SOCKET_IFNAME"] = name
    return {variable: value for variable, value in settings.items() if variable not in os.environ}


def interface_of(address: Optional[str]) -> Optional[str]:
    """Return the name, such as eth0, of the interface that has this address, or None."""
    if address is None:
        return None
    return _ipv4_interfaces().get(address) or _ipv6_interface(address)


def _ipv4_interfaces() -> dict[str, str]:
    """Return {IPv4 address: the interface that has it}; an interface may have several.

    {} if nobody may ask.
    """
    answer = array.array("B", bytes(IFREQ_BYTES * MOST_ADDRESSES))
    memory_address, num_bytes = answer.buffer_info()
    request = struct.pack(
        "iL", num_bytes, memory_address
    )  # struct ifconf; the kernel returns the bytes it wrote
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            num_bytes, _ = struct.unpack("iL", fcntl.ioctl(probe, SIOCGIFCONF, request))
    except OSError:  # without IPv4, or in a sandbox
        return {}
    names = {name for _, name in socket.if_nameindex()}
    interfaces: dict[str, str] = {}
    for start in range(0, num_bytes, IFREQ_BYTES):
        entry = answer[start : start + IFREQ_BYTES].tobytes()
        label = os.fsdecode(entry[:16].partition(b"\0")[0])
        name = label.partition(":")[0]  # eth0:1 is a label of an address of eth0
        if name in names:
            interfaces.setdefault(socket.inet_ntoa(entry[20:24]), name)
    return interfaces


def _ipv6_interface(address: str) -> Optional[str]:
    with contextlib.suppress(OSError, ValueError), open("/proc/net/if_inet6") as file:
        packed = socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()
        for line in file:
            digits, *_, name = line.split()
            if digits == packed:
                return name
    return None


def interface_error(environ: Mapping[str, str], backend: str) -> Optional[str]:
    """Return an error text if the variable of this backend, such as NCCL_SOCKET_IFNAME,
    names no interface of this node."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    setting = environ.get(variable, "")
    names = [name for _, name in socket.if_nameindex()]
    if not setting or any(_selects(setting, name, variable) for name in names):
        return None
    return f"{variable} is {setting}, this node has {', '.join(names)}; unset {variable}"


def _selects(setting: str, name: str, variable: str) -> bool:
    """Whether the list `setting` selects `name`.

    For NCCL, a name is a prefix unless after "=", and "^" excludes the names.
    """
    if variable.startswith("GLOO"):
        return name in setting.split(",")
    listed = setting.lstrip("^=").split(",")
    excludes = setting.startswith("^")
    if "=" in setting[:2]:
        return (name in listed) != excludes
    return name.startswith(tuple(listed)) != excludes


def adapter_warning(environ: Mapping[str, str]) -> Optional[str]:
    """Return a warning if NCCL_IB_HCA, without NCCL_IB_DISABLE=1, names no adapter of this node,
    so NCCL silently takes TCP."""
    setting = re.sub(r":\d+", "", environ.get("NCCL_IB_HCA", ""))  # without the ports of the adapters
    if not setting or environ.get("NCCL_IB_DISABLE") == "1":
        return None
    names = sorted(os.listdir(ADAPTERS)) if ADAPTERS.is_dir() else []
    if any(_selects(setting, name, "NCCL_IB_HCA") for name in names):
        return None
    adapters = ", ".join(names) or "no InfiniBand adapter"
    warning = f"NCCL_IB_HCA is {setting}, this node has {adapters}: NCCL takes TCP, which is slower"
    return f"{warning}; unset NCCL_IB_HCA, or ask for another node"


def port_error(environ: Mapping[str, str]) -> Optional[str]:
    """Return an error text if one of 16 ports from HCCL_IF_BASE_PORT on is taken;
    None with HCCL_HOST_SOCKET_PORT_RANGE."""
    if environ.get("HCCL_HOST_SOCKET_PORT_RANGE") or not environ.get("HCCL_IF_BASE_PORT", "60000").isdigit():
        return None
    first_port = int(environ.get("HCCL_IF_BASE_PORT", "60000"))
    taken = [port for port in range(first_port, min(first_port + 16, 65536)) if not _is_free(port)]
    if not taken:
        return None
    ports = ", ".join(map(str, taken))
    return (
        f"HCCL needs ports {first_port} to {first_port + 15}, and on this node {ports} is taken; give "
        "another HCCL_IF_BASE_PORT"
    )


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def advice(error: Exception) -> str:
    """Return what to try if InfiniBand may have caused this error of NCCL, to be appended to its text;
    else an empty text."""
    if not re.search(OF_INFINIBAND, str(error), re.IGNORECASE | re.DOTALL):
        return ""
    remedies = "NCCL_IB_DISABLE=1 tries it without InfiniBand, NCCL_NET_GDR_LEVEL=0 without GPUDirect over it"
    return f"; NCCL_DEBUG=INFO says why; {remedies}"
