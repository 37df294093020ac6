"""gloo's messages on a connection, and the codecs that turn one dialect's stream into the other's.

A connection starts with a greeting by the side that dialled: the sequence number it read in the peer's record (8 bytes
in ``tcp``, 4 in ``uv``). Then come messages: a header of little-endian u64 fields, and behind a DATA header its
payload.

========  =====  ===================================================
dialect   bytes  fields
========  =====  ===================================================
``tcp``   48     nbytes, opcode, slot, offset, length, roffset
``uv``    32     nbytes, opcode, tag, length
========  =====  ===================================================

``nbytes`` counts the header and the payload that follows it. Slot and tag are the same number. Sources:
gloo/transport/tcp/pair.h (Op::preamble), gloo/transport/uv/pair.h (Op::preamble).
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from hetdeploy.gloo.address import SEQUENCE
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError

HEADER_BYTES = {Dialect.TCP: 48, Dialect.UV: 32}
DATA, SEND_READY, RECV_READY = 1, 2, 3
_OPERATIONS = {DATA: "data", SEND_READY: "send-ready", RECV_READY: "recv-ready"}

# No tensor is as long as this; a longer one means that the bytes read are no header.
LONGEST_MESSAGE = 1 << 40
# Beyond as many announced transfers of one pair the codec no longer compares lengths: it must not grow.
MOST_ANNOUNCEMENTS = 1 << 16

_TCP = struct.Struct("<6Q")
_UV = struct.Struct("<4Q")
_MISMATCH = (
    "the ranks call different collectives, or with tensors of different sizes or types: compare the calls on both"
)
_GARBLED = "the two ranks run different torch versions, or what connected is not gloo"
_DIED = "the rank that wrote it died or was stopped: read the end of its log"


class Header(NamedTuple):
    """A message header without what follows from it. ``length``: payload bytes of DATA, announced bytes else."""

    operation: int
    slot: int
    length: int

    def encode(self, dialect: Dialect) -> bytes:
        nbytes = HEADER_BYTES[dialect] + (self.length if self.operation == DATA else 0)
        if dialect is Dialect.TCP:
            return _TCP.pack(nbytes, self.operation, self.slot, 0, self.length, 0)
        return _UV.pack(nbytes, self.operation, self.slot, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, dialect: Dialect, start: int = 0) -> Header:
        """Read one header at ``start``. Raises GlooProtocolError unless it is one that this dialect writes."""
        if dialect is Dialect.TCP:
            nbytes, operation, slot, offset, length, roffset = _TCP.unpack_from(data, start)
        else:
            nbytes, operation, slot, length = _UV.unpack_from(data, start)
            offset = roffset = 0
        payload = length if operation == DATA else 0
        if (
            operation in _OPERATIONS
            and length <= LONGEST_MESSAGE
            and nbytes == HEADER_BYTES[dialect] + payload
            and not offset
            and not roffset
        ):
            return cls(operation, slot, length)
        read = f"op {operation}, slot {slot:#x}, nbytes {nbytes}, length {length}, offsets {offset} and {roffset}"
        raise GlooProtocolError(f"no gloo message of the {dialect.value} dialect begins with {read}", _GARBLED)


def greeting(dialect: Dialect, sequence: int) -> bytes:
    """What the dialling side writes first. Raises GlooProtocolError for a number that does not fit."""
    try:
        return SEQUENCE[dialect].pack(sequence)
    except struct.error:
        raise GlooProtocolError(
            f"sequence number {sequence} does not fit the {dialect.value} greeting", _GARBLED
        ) from None


@dataclass
class Announcements:
    """Lengths announced on one pair and not yet delivered, by slot: a payload must fit what its receiver announced.

    A longer payload would make the receiving gloo abort its process (SIGABRT, beyond the reach of Python). One
    recv-ready of the receiver precedes every payload, and both sides keep them in order within a slot.
    """

    watching: bool = True
    _awaited: dict[tuple[bool, int], deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _count: int = 0

    def await_payload(self, forward: bool, header: Header) -> None:
        """Note a recv-ready: its sender awaits at most ``header.length`` bytes from the other side."""
        if not self.watching:
            return
        if self._count == MOST_ANNOUNCEMENTS:
            self.watching = False
            self._awaited.clear()
            return
        self._awaited[not forward, header.slot].append(header.length)
        self._count += 1

    def deliver(self, forward: bool, header: Header) -> None:
        """Match a payload. Raises GlooProtocolError where it is longer than announced, or nobody awaits it."""
        if not self.watching:
            return
        lengths = self._awaited.get((forward, header.slot))
        if not lengths:
            raise GlooProtocolError(
                f"a payload of {header.length} bytes arrived in slot {header.slot:#x}, where nobody awaits one",
                _GARBLED,
            )
        announced = lengths.popleft()
        self._count -= 1
        if not lengths:
            del self._awaited[forward, header.slot]
        if header.length > announced:
            raise GlooProtocolError(
                f"a payload of {header.length} bytes arrived where {announced} bytes are awaited", _MISMATCH
            )


class Codec:
    """One direction of a pair: takes ``source`` bytes as they were read, gives ``target`` bytes to write.

    Headers are checked and rewritten; payloads pass as slices of what was read. Keeps at most one incomplete header.
    Once it raised, both legs have to be closed: nothing tells where the next message starts. ``forward`` tells the two
    directions that share ``announcements`` apart; ``writer`` names in errors who wrote the source.
    """

    def __init__(
        self, source: Dialect, target: Dialect, announcements: Announcements, forward: bool, writer: str
    ) -> None:
        self._source = source
        self._target = target
        self._announcements = announcements
        self._forward = forward
        self._writer = writer
        self._partial = bytearray()
        self._payload_left = 0

    def feed(self, data: memoryview) -> list[memoryview | bytes]:
        """Raises GlooProtocolError at the first message that makes no sense."""
        try:
            return self._translate(data)
        except GlooProtocolError as error:
            raise GlooProtocolError(f"read from {self._writer}: {error.problem}", error.fix) from None

    def finish(self) -> None:
        """The source closed its side. Raises GlooProtocolError where that cut a message short."""
        if not self.in_message:
            return
        lacking = f"{self._payload_left} bytes of a payload" if self._payload_left else "the rest of a header"
        raise GlooProtocolError(f"{self._writer} closed its connection in mid-message, {lacking} missing", _DIED)

    @property
    def in_message(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._payload_left or self._partial)

    def _translate(self, data: memoryview) -> list[memoryview | bytes]:
        output: list[memoryview | bytes] = []
        size = HEADER_BYTES[self._source]
        at, end = 0, len(data)
        while at < end:
            if self._payload_left:
                stop = min(end, at + self._payload_left)
                output.append(data[at:stop])
                self._payload_left -= stop - at
                at = stop
                continue
            if not self._partial and end - at >= size:
                header = Header.decode(data, self._source, at)
                at += size
            else:
                stop = min(end, at + size - len(self._partial))
                self._partial += data[at:stop]
                at = stop
                if len(self._partial) < size:
                    break
                header = Header.decode(self._partial, self._source)
                self._partial.clear()
            self._account(header)
            output.append(header.encode(self._target))
        return output

    def _account(self, header: Header) -> None:
        if header.operation == DATA:
            self._announcements.deliver(self._forward, header)
            self._payload_left = header.length
        elif header.operation == RECV_READY:
            self._announcements.await_payload(self._forward, header)


def codecs(
    left: Dialect, right: Dialect, left_name: str, right_name: str, *, match_lengths: bool = True
) -> tuple[Codec, Codec]:
    """The two directions of one pair: left to right, right to left. The names are for errors.

    ``match_lengths``: refuse payloads that do not fit what their receivers have announced.
    """
    announcements = Announcements(watching=match_lengths)
    return (
        Codec(left, right, announcements, True, left_name),
        Codec(right, left, announcements, False, right_name),
    )
