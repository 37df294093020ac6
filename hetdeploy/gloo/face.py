"""Gives a Linux rank the face of a macOS one, so that torch itself can be put on both ends of the ``uv`` dialect.

The reverse of a bridge, for tests and the self-test alone: the rank's ``tcp`` gloo is made to publish and read ``uv``
records, in either socket address layout, and its listener hidden behind one that takes ``uv`` greetings and messages.
"""

from __future__ import annotations

import socket
import threading

from hetdeploy.gloo.address import SEQUENCE, UNREACHABLE, PairAddress, SockAddr
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout
from hetdeploy.gloo.record import RankRecord, decode_uv, encode_uv
from hetdeploy.gloo.store import PassingStore
from hetdeploy.gloo.wire import codecs, greeting
from hetdeploy.link.relay import relay

GREETING_TIMEOUT = 10.0
"""Seconds for whoever connects to greet."""


class FacedStore(PassingStore):
    """Takes the store calls of a ``tcp`` gloo and makes those of a ``uv`` gloo out of them, in the same order."""

    def __init__(self, inner: PassingStore, rank: int, size: int, layout: Layout) -> None:
        super().__init__(inner)
        self._passing = inner
        self._rank, self._size, self._layout = rank, size, layout

    def set(self, key: str, value: str | bytes) -> None:
        prefix, number = _split(key)
        if number != self._rank or self._size == 1 or isinstance(value, str):
            return super().set(key, value)
        record = RankRecord.decode(value, self._size)
        super().set(f"{prefix}rank_{number}", record.hostname)
        for lower in range(self._rank):
            super().wait([f"{prefix}rank_{lower}"])
            super().get(f"{prefix}rank_{lower}")
        shown = _open_face(record.address)
        pairs = {peer: PairAddress(shown, record.sequences[peer]) for peer in range(self._size) if peer != self._rank}
        return super().set(key, encode_uv(pairs, self._layout))

    def get(self, key: str) -> bytes:
        _, number = _split(key)
        data = super().get(key)
        if number is None or number == self._rank or self._size == 1:
            return data
        pair = decode_uv(data, number, self._size, self._layout)[self._rank]
        if pair.address not in UNREACHABLE.values():
            raise GlooProtocolError(f"the bridge gave {pair.address} as the address of rank {number}")
        return RankRecord(b"bridged", pair.address, (pair.sequence,) * self._size).encode()

    def close(self) -> None:
        self._passing.close()


def _open_face(hidden: SockAddr) -> SockAddr:
    """Listen as a ``uv`` gloo would, for as long as the process lives, in front of the ``tcp`` gloo at ``hidden``."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, hidden), name="face", daemon=True).start()
    return SockAddr("127.0.0.1", listener.getsockname()[1])


def _accept(listener: socket.socket, hidden: SockAddr) -> None:
    while True:
        outside, _ = listener.accept()
        threading.Thread(target=_carry, args=(outside, hidden), name="face pair", daemon=True).start()


def _carry(outside: socket.socket, hidden: SockAddr) -> None:
    outside.settimeout(GREETING_TIMEOUT)
    number = SEQUENCE[Dialect.UV]
    (sequence,) = number.unpack(outside.recv(number.size, socket.MSG_WAITALL))
    inside = socket.create_connection((hidden.host, hidden.port), timeout=GREETING_TIMEOUT)
    inside.sendall(greeting(Dialect.TCP, sequence))
    relay(inside, outside, *codecs(Dialect.TCP, Dialect.UV, "the rank itself", "the bridge"))


def _split(key: str) -> tuple[str, int | None]:
    prefix, slash, last = key.rpartition("/")
    return prefix + slash, int(last) if last.isdigit() else None
