"""Gives a rank the face of the other dialect, so that torch itself can be on both ends of a bridge on one machine.

The reverse of a bridge, for tests and the self-test alone: what the rank's gloo publishes is rewritten into the other
dialect's records, and its listener hidden behind one that takes the other dialect's greetings and messages. On Linux a
rank behind the bridge wears the face of a Mac's; on macOS a rank without a bridge wears that of a Linux one. A face can
only be dialled: its peers have to be behind a bridge, or it has to be itself.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from datetime import timedelta

from hetdeploy.gloo.address import SEQUENCE, UNREACHABLE, PairAddress, SockAddr
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout
from hetdeploy.gloo.record import RankRecord, decode_uv, encode_uv
from hetdeploy.gloo.store import PassingStore
from hetdeploy.gloo.wire import codecs, greeting
from hetdeploy.link.relay import relay

GREETING_TIMEOUT = 10.0
"""Seconds for whoever connects to greet."""


class MacFace(PassingStore):
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
        hidden = dict.fromkeys(record.sequences, record.address)
        shown = _open_face(hidden, self._size - 1, Dialect.TCP, Dialect.UV)
        pairs = {peer: PairAddress(shown, record.sequences[peer]) for peer in range(self._size) if peer != self._rank}
        return super().set(key, encode_uv(pairs, self._layout))

    def get(self, key: str) -> bytes:
        _, number = _split(key)
        data = super().get(key)
        if number is None or number == self._rank or self._size == 1:
            return data
        pair = decode_uv(data, number, self._size, self._layout)[self._rank]
        _check_unreachable(pair.address, number)
        return RankRecord(b"bridged", pair.address, (pair.sequence,) * self._size).encode()

    def close(self) -> None:
        self._passing.close()


class LinuxFace(PassingStore):
    """Takes the store calls of a ``uv`` gloo and makes those of a ``tcp`` gloo out of them."""

    def __init__(self, inner: PassingStore, rank: int, size: int, layout: Layout) -> None:
        super().__init__(inner)
        self._rank, self._size, self._layout = rank, size, layout
        self._hostname = b""

    def set(self, key: str, value: str | bytes) -> None:
        _, number = _split(key)
        data = value.encode() if isinstance(value, str) else value
        if number != self._rank:  # rank_<own rank>: a tcp rank has no such key
            self._hostname = data
            return None
        pairs = decode_uv(data, self._rank, self._size, self._layout)
        hidden = {pair.sequence: pair.address for pair in pairs.values()}
        shown = _open_face(hidden, self._size - 1, Dialect.UV, Dialect.TCP)
        sequences = [pairs[peer].sequence if peer != self._rank else 0 for peer in range(self._size)]
        return super().set(key, RankRecord(self._hostname, shown, tuple(sequences)).encode())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        super().wait([key.replace("rank_", "") for key in keys], timeout)

    def get(self, key: str) -> bytes:
        record = RankRecord.decode(super().get(key.replace("rank_", "")), self._size)
        _, number = _split(key)
        if number is None:
            return record.hostname
        _check_unreachable(record.address, number)
        others = [rank for rank in range(self._size) if rank != number]
        return encode_uv({rank: PairAddress(record.address, 0) for rank in others}, self._layout)


def _open_face(hidden: Mapping[int, SockAddr], peers: int, own: Dialect, shown: Dialect) -> SockAddr:
    """Listen in ``shown``, until all ``peers`` have come, in front of a gloo that takes ``own`` at ``hidden``.

    ``hidden`` is by the sequence number that a peer greets with.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    address = SockAddr("127.0.0.1", listener.getsockname()[1])
    threading.Thread(target=_accept, args=(listener, hidden, peers, own, shown), name="face", daemon=True).start()
    return address


def _accept(listener: socket.socket, hidden: Mapping[int, SockAddr], peers: int, own: Dialect, shown: Dialect) -> None:
    with listener:
        for _ in range(peers):
            outside, _ = listener.accept()
            threading.Thread(target=_carry, args=(outside, hidden, own, shown), name="face pair", daemon=True).start()


def _carry(outside: socket.socket, hidden: Mapping[int, SockAddr], own: Dialect, shown: Dialect) -> None:
    outside.settimeout(GREETING_TIMEOUT)
    number = SEQUENCE[shown]
    (sequence,) = number.unpack(outside.recv(number.size, socket.MSG_WAITALL))
    address = hidden[sequence]
    inside = socket.create_connection((address.host, address.port), timeout=GREETING_TIMEOUT)
    inside.sendall(greeting(own, sequence))
    # Whether the ranks agree is for the bridge to judge: it tells the reason, a face only passes for a gloo.
    relay(inside, outside, *codecs(own, shown, "the rank itself", "the bridge", match_lengths=False))


def _check_unreachable(address: SockAddr, peer: int) -> None:
    if address not in UNREACHABLE.values():
        raise GlooProtocolError(f"the bridge gave {address} as the address of rank {peer}")


def _split(key: str) -> tuple[str, int | None]:
    prefix, slash, last = key.rpartition("/")
    return prefix + slash, int(last) if last.isdigit() else None
