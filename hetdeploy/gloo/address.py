"""Socket addresses as gloo stores them: a raw ``sockaddr_storage`` and the number a connecting peer must greet with.

A pair address is 136 bytes in both dialects: 128 bytes of ``sockaddr_storage``, then the signed sequence number, 8
bytes in ``tcp`` and 4 in ``uv`` (4 bytes of padding follow). Sources: address.h of gloo/transport/tcp and
gloo/transport/uv; for the sockaddr layouts, <netinet/in.h> on Linux and on macOS.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout

SOCKADDR_BYTES = 128
PAIR_ADDRESS_BYTES = 136
SEQUENCE = {Dialect.TCP: struct.Struct("<q"), Dialect.UV: struct.Struct("<i")}

# (address family constant, length of the structure) of each layout. AF_INET6 differs between the systems.
_FAMILY_IPV4 = 2
_FAMILY_IPV6 = {Layout.LINUX: 10, Layout.DARWIN: 30}
_IPV4_BYTES = 16
_IPV6_BYTES = 28


@dataclass(frozen=True)
class SockAddr:
    """An IP address literal and port. ``scope`` is the interface index of a link-local IPv6 address, else 0."""

    host: str
    port: int
    scope: int = 0

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def dialled(self) -> str:
        """The host as ``connect`` takes it: a link-local address needs its scope."""
        return f"{self.host}%{self.scope}" if self.scope else self.host

    def __str__(self) -> str:
        return f"[{self.dialled}]:{self.port}" if self.family == socket.AF_INET6 else f"{self.host}:{self.port}"

    def encode(self, layout: Layout) -> bytes:
        """128 bytes, zero behind the address."""
        if self.family == socket.AF_INET:
            head = _head(layout, _FAMILY_IPV4, _IPV4_BYTES)
            raw = head + struct.pack(">H", self.port) + ipaddress.IPv4Address(self.host).packed
        else:
            head = _head(layout, _FAMILY_IPV6[layout], _IPV6_BYTES)
            address = ipaddress.IPv6Address(self.host).packed
            raw = head + struct.pack(">H", self.port) + bytes(4) + address + struct.pack("<I", self.scope)
        return raw.ljust(SOCKADDR_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes, layout: Layout) -> SockAddr:
        """Read the first 28 bytes; what lies behind is whatever the writer's memory held.

        Raises GlooProtocolError for a family that is neither IPv4 nor IPv6 in this layout.
        """
        if len(data) < _IPV6_BYTES:
            raise GlooProtocolError(f"a gloo address of {len(data)} bytes is too short to hold a socket address")
        family = int.from_bytes(data[:2], "little") if layout is Layout.LINUX else data[1]
        (port,) = struct.unpack_from(">H", data, 2)
        if family == _FAMILY_IPV4:
            return cls(str(ipaddress.IPv4Address(data[4:8])), port)
        if family == _FAMILY_IPV6[layout]:
            (scope,) = struct.unpack_from("<I", data, 24)
            return cls(str(ipaddress.IPv6Address(data[8:24])), port, scope)
        raise GlooProtocolError(
            f"a gloo address begins with {data[:4].hex()}, no IPv4 or IPv6 address in the {layout.value} layout"
        )


# Larger than any address a rank can have: gloo compares address bytes, then ports, and the smaller end listens.
UNREACHABLE = {
    socket.AF_INET: SockAddr("255.255.255.255", 65535),
    socket.AF_INET6: SockAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 65535),
}


@dataclass(frozen=True)
class PairAddress:
    """Where one end of a pair listens, and the sequence number that tells this pair from its siblings on that port."""

    address: SockAddr
    sequence: int

    def encode(self, dialect: Dialect, layout: Layout) -> bytes:
        """136 bytes."""
        raw = self.address.encode(layout) + SEQUENCE[dialect].pack(self.sequence)
        return raw.ljust(PAIR_ADDRESS_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes, dialect: Dialect, layout: Layout) -> PairAddress:
        """Raises GlooProtocolError unless ``data`` is 136 bytes with a readable address."""
        if len(data) != PAIR_ADDRESS_BYTES:
            raise GlooProtocolError(f"a gloo pair address has {len(data)} bytes instead of {PAIR_ADDRESS_BYTES}")
        (sequence,) = SEQUENCE[dialect].unpack_from(data, SOCKADDR_BYTES)
        return cls(SockAddr.decode(data, layout), sequence)


def _head(layout: Layout, family: int, length: int) -> bytes:
    return struct.pack("<H", family) if layout is Layout.LINUX else bytes([length, family])
