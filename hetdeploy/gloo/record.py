"""What a rank publishes in the store so that its peers find it: one record a rank in each dialect.

``tcp`` (gloo/transport/tcp/context.cc), key ``"<rank>"``::

    u64 length, host name | u64 136, pair address with sequence -1 | one i64 per rank of the group, itself included

Rank j connects to the address of record i and greets with record i's number j. ``uv`` (gloo/transport/context.cc), key
``"rank_<rank>"`` = host name, and key ``"<rank>"`` = the pair addresses for all other ranks, in rank order.

A rank behind a bridge publishes the ``tcp`` record whatever its own dialect, with the unreachable address, and a note
in the place of its host name: gloo only compares host names, so it may say anything.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from hetdeploy.gloo.address import PAIR_ADDRESS_BYTES, UNREACHABLE, PairAddress, SockAddr
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout

PUBLISHED_FAMILY = socket.AF_INET
"""Of the unreachable address: gloo compares its own with those of its family alone, and refuses any other."""

_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_LONGEST_HOSTNAME = 4096
_NO_SEQUENCE = -1
_NOTE_PREFIX = b"hetdeploy-bridge "


@dataclass(frozen=True)
class RankRecord:
    """A ``tcp`` record. ``sequences[j]`` is what rank j must greet with. The address is always in the Linux layout."""

    hostname: bytes
    address: SockAddr
    sequences: tuple[int, ...]

    def encode(self) -> bytes:
        address = PairAddress(self.address, _NO_SEQUENCE).encode(Dialect.TCP, Layout.LINUX)
        numbers = b"".join(_I64.pack(number) for number in self.sequences)
        return _U64.pack(len(self.hostname)) + self.hostname + _U64.pack(len(address)) + address + numbers

    @classmethod
    def decode(cls, data: bytes, size: int) -> RankRecord:
        """Read the record of a rank in a group of ``size``. Raises GlooProtocolError for anything else."""
        hostname, rest = _sized(data, _LONGEST_HOSTNAME, "host name")
        address, numbers = _sized(rest, PAIR_ADDRESS_BYTES, "address")
        pair = PairAddress.decode(address, Dialect.TCP, Layout.LINUX)
        if len(numbers) != size * _I64.size:
            raise GlooProtocolError(
                f"a rank record names {len(numbers) / _I64.size:g} ranks where the group has {size}",
                "start every rank with the same world size; if they are, the store holds a record of another group",
            )
        return cls(hostname, pair.address, struct.unpack(f"<{size}q", numbers))

    @property
    def note(self) -> BridgeNote | None:
        """What the bridge of this rank wrote, or None for a rank that its peers reach directly."""
        return BridgeNote.decode(self.hostname)


@dataclass(frozen=True)
class BridgeNote:
    """How to meet a rank behind a bridge: the joiner it is on, and the token of its offer there."""

    node: str
    token: str
    dialect: Dialect
    hostname: str

    def encode(self) -> bytes:
        fields = {"node": self.node, "token": self.token, "dialect": self.dialect.value, "hostname": self.hostname}
        return _NOTE_PREFIX + json.dumps(fields).encode()

    @classmethod
    def decode(cls, hostname: bytes) -> BridgeNote | None:
        """None for an ordinary host name. Raises GlooProtocolError for a note that cannot be read."""
        if not hostname.startswith(_NOTE_PREFIX):
            return None
        try:
            fields = json.loads(hostname[len(_NOTE_PREFIX) :])
            return cls(str(fields["node"]), str(fields["token"]), Dialect(fields["dialect"]), str(fields["hostname"]))
        except (ValueError, KeyError, TypeError) as error:
            raise GlooProtocolError(
                f"the note of a bridge cannot be read ({error})", "run the same hetdeploy on all machines"
            ) from None


def bridged_record(note: BridgeNote, sequences: tuple[int, ...]) -> RankRecord:
    """The record of a rank that nobody may dial: it compares above every real address, so its peers listen."""
    return RankRecord(note.encode(), UNREACHABLE[PUBLISHED_FAMILY], sequences)


def encode_uv(addresses: Mapping[int, PairAddress], layout: Layout) -> bytes:
    """The ``uv`` record: pair addresses by peer rank, own rank left out."""
    return b"".join(addresses[rank].encode(Dialect.UV, layout) for rank in sorted(addresses))


def decode_uv(data: bytes, rank: int, size: int, layout: Layout) -> dict[int, PairAddress]:
    """The ``uv`` record of ``rank`` in a group of ``size``, by peer rank. Raises GlooProtocolError for all else."""
    if len(data) != (size - 1) * PAIR_ADDRESS_BYTES:
        raise GlooProtocolError(
            f"rank {rank} published {len(data)} bytes, not {size - 1} pair addresses of {PAIR_ADDRESS_BYTES} bytes",
            "every rank must be started with the same world size and the torch version that this hetdeploy supports",
        )
    peers = [peer for peer in range(size) if peer != rank]
    chunks = [data[start : start + PAIR_ADDRESS_BYTES] for start in range(0, len(data), PAIR_ADDRESS_BYTES)]
    return {peer: PairAddress.decode(chunk, Dialect.UV, layout) for peer, chunk in zip(peers, chunks, strict=True)}


def _sized(data: bytes, longest: int, what: str) -> tuple[bytes, bytes]:
    """Split ``data`` behind a field that an u64 length introduces."""
    if len(data) < _U64.size:
        raise GlooProtocolError(f"a rank record ends before its {what}")
    (length,) = _U64.unpack_from(data)
    if length > longest or length > len(data) - _U64.size:
        raise GlooProtocolError(
            f"a rank record claims a {what} of {length} bytes, which cannot be",
            "the rank that wrote it runs another torch version, or speaks the other gloo dialect without a bridge",
        )
    return data[_U64.size : _U64.size + length], data[_U64.size + length :]
