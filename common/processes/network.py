"""Which network interface the ranks should use, and a port that is free."""

import contextlib
import fcntl
import os
import socket
import struct
from typing import Optional

SIOCGIFADDR = 0x8915


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def route_to(address: str) -> Optional[str]:
    """The address of this host from which packets to `address` leave; nothing is sent."""
    for family, kind, protocol, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    return None


def interfaces(own_address: Optional[str]) -> dict[str, str]:
    """{GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME} for the interface with this address, where the platform has not set them.

    Without them Gloo resolves the host's own name, which in many containers is the loopback, and no node reaches another.
    """
    name = interface_of(own_address)
    if name is None:
        return {}
    settings = {"GLOO_SOCKET_IFNAME": name}
    if name != "lo":
        settings["NCCL_SOCKET_IFNAME"] = name
    return {variable: value for variable, value in settings.items() if variable not in os.environ}


def interface_of(address: Optional[str]) -> Optional[str]:
    """eth0 for 10.0.0.7; None where no interface has it."""
    if address is None:
        return None
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    with contextlib.suppress(OSError, ValueError), open("/proc/net/if_inet6") as file:
        packed = socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()
        for line in file:
            digits, *_, name = line.split()
            if digits == packed:
                return name
    return None
