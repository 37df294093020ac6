"""The network interfaces of this machine, and which of them reaches a peer.

psutil knows addresses, state, speed and MTU on Linux and macOS alike. What an interface *is* (a cable, Wi-Fi, a tunnel)
and where the default route goes, each system tells in its own way: linux.py and darwin.py.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hetdeploy.errors import PeerUnreachable, PreflightError
from hetdeploy.network import darwin, linux

if TYPE_CHECKING:
    from psutil._ntuples import snicaddr, snicstats

Kind = Literal["wired", "wifi", "virtual", "tunnel", "loopback"]

# A UDP connect asks the kernel for a route and sends nothing; any port will do, this is the one for discarding.
_DISCARD_PORT = 9


@dataclass(frozen=True)
class Interface:
    """A network interface. ``speed`` is in Mbit/s, 0 where the system does not say; ``mtu`` in bytes."""

    name: str
    ipv4: tuple[ipaddress.IPv4Interface, ...]
    up: bool
    speed: int
    mtu: int
    kind: Kind
    mac: str | None = None

    @property
    def address(self) -> str:
        """The IPv4 address to be reached at: a configured one before a self-assigned (169.254) one."""
        if not self.ipv4:
            raise PreflightError(f"{self.name} has no IPv4 address", "give it one, or choose another with --nic")
        return str(min(self.ipv4, key=lambda address: address.is_link_local).ip)

    @property
    def self_assigned(self) -> bool:
        """Whether all its addresses are link-local, which is what a NIC gives itself where no DHCP server answers."""
        return all(address.is_link_local for address in self.ipv4)

    def is_neighbour(self, peer: str) -> bool:
        """Whether ``peer`` is an address on a network that this interface is directly connected to."""
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in own.network for own in self.ipv4)

    def describe(self) -> str:
        """``eno1 (192.168.1.10, wired, 1000 Mbit/s)``"""
        facts = [self.address if self.ipv4 else "no IPv4 address", self.kind]
        if self.speed:
            facts.append(f"{self.speed} Mbit/s")
        if not self.up:
            facts.append("down")
        return f"{self.name} ({', '.join(facts)})"


def read() -> list[Interface]:
    """All interfaces of this machine, or of the network namespace that this process is in."""
    import psutil

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    kinds = darwin.kinds(list(states)) if platform.system() == "Darwin" else linux.kinds(list(states))
    return assemble(addresses, states, kinds)


def assemble(
    addresses: Mapping[str, Sequence[snicaddr]], states: Mapping[str, snicstats], kinds: Mapping[str, Kind]
) -> list[Interface]:
    """Interfaces from psutil's tables of addresses and states."""
    import psutil

    interfaces = []
    for name, state in states.items():
        own = addresses.get(name, [])
        ipv4 = [
            ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
            for entry in own
            if entry.family == socket.AF_INET
        ]
        mac = next((entry.address for entry in own if entry.family == psutil.AF_LINK), None)
        interfaces.append(
            Interface(name, tuple(ipv4), state.isup, max(state.speed, 0), state.mtu, kinds[name], mac or None)
        )
    return interfaces


def source_address(peer: str) -> str:
    """The address of this machine from which packets to ``peer`` leave. Sends nothing.

    Raises PeerUnreachable where there is no route, or no such host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _DISCARD_PORT))
        except OSError as error:
            mend = "connect it to the network that the peer is on"
            if platform.system() == "Darwin" and error.errno == darwin.EHOSTUNREACH:
                mend += f"; if it is, {darwin.LOCAL_NETWORK_PRIVACY}"
            raise PeerUnreachable(f"this machine has no route to {peer} ({error.strerror})", mend) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> Interface:
    """The interface that owns an IPv4 address. Raises PreflightError if none does."""
    for interface in read():
        if any(str(own.ip) == address for own in interface.ipv4):
            return interface
        # All of 127.0.0.0/8 is this machine, though one address of it is listed.
        if interface.kind == "loopback" and interface.is_neighbour(address):
            return interface
    raise PreflightError(f"no network interface of this machine has the address {address}", "see `hetdeploy doctor`")


def outgoing(peer: str | None) -> str | None:
    """The name of the interface by which packets to ``peer`` leave, or by the default route where that is None.

    None if there is no default route. Raises PeerUnreachable where there is no way to the peer.
    """
    if peer is not None:
        return interface_of(source_address(peer)).name
    return darwin.default_route() if platform.system() == "Darwin" else linux.default_route()
