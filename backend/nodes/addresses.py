"""Addresses and network interfaces of this machine, from the kernel alone. Standard library only (Linux)."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # RFC 5737: an unassigned address, reached by the default route


def interface_addresses() -> dict[str, str]:
    """Map addresses to interfaces: the first IPv4 address of each interface, and global IPv6 addresses."""
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
    """Return our address on the route to `host`, or "". Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return ""


def interface_towards(host: str) -> str:
    """Return the interface of the route to `host`, or of `host` itself if it is our own address; "" if
    none.
    """
    return interface_addresses().get(local_address_towards(host), "")


def own_address(host: str) -> tuple[str, bool]:
    """Return this machine's address for `host` (a name or an address), and whether `host` is ours.

    Our name may resolve to loopback here (Debian's 127.0.1.1) or to a forwarding address (a Service): then
    the address of the default route is returned. Raises OSError for an unknown name.
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
    """Return the addresses under which others may reach this machine, that of the default route first."""
    preferred = local_address_towards(_ANYWHERE)
    found = [one for one in interface_addresses() if not ipaddress.ip_address(one).is_loopback]
    return sorted(found, key=lambda one: one != preferred)


def machine_id() -> str:
    """Return an id that is equal for processes with the same network interfaces: boot and network
    namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"


def bracketed(address: str) -> str:
    """Return the address as in URLs: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
