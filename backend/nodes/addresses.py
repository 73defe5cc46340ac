"""Addresses and network interfaces of this machine, from the kernel alone. Standard library only (Linux)."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # RFC 5737: an address of nobody, behind the default route


def interface_addresses() -> dict[str, str]:
    """Address -> interface, of every IPv4 address that the kernel names first, and of global IPv6 ones."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # has no IPv4 address
            found[socket.inet_ntoa(answer[20:24])] = name
    return {**found, **_ipv6_addresses()}


def _ipv6_addresses() -> dict[str, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for digits, _, _, scope, _, name in (line.split() for line in lines):
        if int(scope, 16) == 0:  # global
            found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found


def local_address_towards(host: str) -> str:
    """Our address on the route to `host`; "" if there is none. Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return ""


def interface_towards(host: str) -> str:
    """The interface of the route to `host`, or the one that has it if it is our own address; "" if none."""
    return interface_addresses().get(local_address_towards(host), "")


def own_address(host: str) -> tuple[str, bool]:
    """The address of this machine that `host`, its name or address, stands for; and whether it is ours.

    A name of ours may mean loopback here (Debian's 127.0.1.1) or a forwarding address (a Service): then it is
    the one of the default route. Raises OSError for a name that is not known.
    """
    rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found = sorted((str(row[4][0]) for row in rows), key=lambda one: ":" in one)  # IPv4 first
    ours = interface_addresses()
    loopback = [one for one in found if ipaddress.ip_address(one).is_loopback]
    if loopback and host in ("localhost", *loopback):
        return loopback[0], True
    for address in found:
        if address in ours and address not in loopback:
            return address, True
    return next(iter(candidates()), found[0]), False


def candidates() -> list[str]:
    """Addresses under which others may reach this machine, that of the default route first."""
    preferred = local_address_towards(_ANYWHERE)
    found = [one for one in interface_addresses() if not ipaddress.ip_address(one).is_loopback]
    return sorted(found, key=lambda one: one != preferred)


def machine_id() -> str:
    """Equal for processes that see the same network interfaces: boot and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"


def bracketed(address: str) -> str:
    """As URLs have it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
