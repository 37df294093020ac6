"""Adding flat fp32 buffers over all ranks, in the background, with the wire format's bytes on the wire.

Two algorithms, chosen for each buffer from its size and the number of ranks N (P: payload bytes of the whole buffer).
Both decode to fp32, add in rank order and leave the same bits on every rank.

==========  =====================  ======  ========================================================================
algorithm   bytes each rank sends  rounds  how
==========  =====================  ======  ========================================================================
gather      (N - 1) P              1       every rank gets every payload and adds them itself; one rounding
two-phase   2 (N - 1) / N P        2       rank i gets everyone's i-th part, adds, encodes the sum; the sums go to
                                           everyone: two roundings
==========  =====================  ======  ========================================================================

For two ranks the bytes are the same (P) and gather is one round shorter. For more, two-phase sends less; gather still
wins while the bytes it would save cost less time than its second round (``ROUND_BYTES``).

Memory, beyond the buffers themselves: ``IN_FLIGHT`` times the payloads of the largest buffer, however many buffers
there are. Two ranks: 2 payloads (own and other's, swapped directly). More: 1 + 2 N for gather (gloo gathers into a
buffer of its own first), about 2 for two-phase.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from hetdeploy.train.background import Background
from hetdeploy.train.device import Ready
from hetdeploy.train.wire import BLOCK, Wire, encode_with_feedback, first_non_finite
from hetdeploy.train.world import EXCHANGE_TIMEOUT, Group, Pending, World

IN_FLIGHT = 3
"""Buffers that may be between encoding and decoding at once: one each being encoded, on the wire, being decoded."""

ROUND_BYTES = 64 * 1024
"""What a gigabit link carries in half a millisecond, about the cost of one more round of messages between two hosts."""


@dataclass(frozen=True)
class Summed:
    """One buffer's exchange. Times are ``time.perf_counter`` seconds; ``copied - started`` is the wait for the
    device.
    """

    started: float
    copied: float
    finished: float
    bytes_sent: int
    algorithm: str


def algorithm_for(ranks: int, payload_bytes: int) -> str:
    """ "gather" or "two-phase", whichever is faster; the same answer on every rank."""
    saved = (ranks - 1) * payload_bytes * (1 - 2 / ranks)
    return "gather" if saved <= ROUND_BYTES else "two-phase"


class Summer:
    """Sums buffers over all ranks. Every rank must ``add`` and ``gather`` in the same order, with buffers of equal
    length.

    Two threads: one encodes and starts exchanges, one awaits and decodes, so that a buffer travels while the next is
    encoded. Second-phase exchanges use a group of their own, since the two threads start theirs in no fixed order.
    """

    def __init__(self, world: World, wire: Wire, purpose: str, timeout: datetime.timedelta = EXCHANGE_TIMEOUT) -> None:
        self.wire = wire
        self._world = world
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._buffers = _Buffers()
        if world.size == 1:
            return
        self.group = world.open(purpose, timeout)
        self._second = world.open(f"{purpose}-sums", timeout) if world.size > 2 else None
        self._starting = Background(f"hetdeploy-{purpose}-send")
        self._finishing = Background(f"hetdeploy-{purpose}-receive")

    def add(self, flat: Tensor, ready: Ready, residual: Tensor | None, refuse: Callable[[int], None]) -> Future[Summed]:
        """Replace ``flat`` by its sum over all ranks.

        ready: blocks until ``flat`` holds this rank's values. residual: this rank's error feedback for the buffer, as
        long as ``flat``; it is added before and updated after. refuse: called with the position of the first value
        that is NaN or Inf, if there is one; this rank then contributes zeros, so that nobody's sum is poisoned.
        """
        if self._world.size == 1:
            return _add_alone(flat, ready, refuse)
        done: Future[Summed] = Future()

        def start() -> None:
            started = time.perf_counter()
            ready()
            copied = time.perf_counter()
            finite = _refuse_non_finite(flat, refuse)
            self._slots.acquire()
            try:
                summing = self._algorithm(flat, residual if finite else None)
            except BaseException:
                self._slots.release()
                raise
            self._finishing.submit(lambda: _relay(done, lambda: finish(started, copied, summing)))

        def finish(started: float, copied: float, summing: _Gather | _TwoPhase) -> Summed:
            try:
                summing.finish()
            finally:
                self._slots.release()
            return Summed(started, copied, time.perf_counter(), summing.bytes_sent, summing.name)

        self._starting.submit(lambda: _relay_failure(done, start))
        return done

    def gather(self, message: Callable[[], Tensor]) -> Future[list[Tensor]]:
        """A small uint8 message of equal length from every rank, in rank order, made when all that was added before
        has been looked at for NaN and Inf.
        """
        done: Future[list[Tensor]] = Future()
        if self._world.size == 1:
            done.set_result([message()])
            return done

        def start() -> None:
            mine = message()
            received = torch.empty(self._world.size * mine.numel(), dtype=torch.uint8)
            pending = self.group.all_gather(received, mine)
            self._finishing.submit(lambda: _relay(done, lambda: finish(pending, received)))

        def finish(pending: Pending, received: Tensor) -> list[Tensor]:
            pending.wait("comparing counts")
            return list(received.chunk(self._world.size))

        self._starting.submit(lambda: _relay_failure(done, start))
        return done

    def close(self) -> None:
        """Let what is queued finish, then end both threads."""
        if self._world.size > 1:
            self._starting.close()
            self._finishing.close()

    def _algorithm(self, flat: Tensor, residual: Tensor | None) -> _Gather | _TwoPhase:
        if algorithm_for(self._world.size, self.wire.payload_bytes(flat.numel())) == "gather":
            return _Gather(self.group, self.wire, flat, residual, self._buffers)
        assert self._second is not None
        return _TwoPhase(self.group, self._second, self.wire, flat, residual, self._buffers)


class _Gather:
    name = "gather"

    def __init__(self, group: Group, wire: Wire, flat: Tensor, residual: Tensor | None, buffers: _Buffers) -> None:
        self._wire = wire
        self._flat = flat
        self._buffers = buffers
        length = wire.payload_bytes(flat.numel())
        self.bytes_sent = length * (group.size - 1)
        self._sent = buffers.take(length)
        self._received = buffers.take(length if group.size == 2 else length * group.size)
        encode_with_feedback(wire, flat, self._sent, residual)
        if group.size == 2:
            # gloo's all-gather would collect both payloads in a buffer of its own and copy them out.
            peer = 1 - group.rank
            self._pending = [group.receive(self._received, peer), group.send(self._sent, peer)]
            self._payloads = [self._sent, self._received] if group.rank == 0 else [self._received, self._sent]
        else:
            self._pending = [group.all_gather(self._received, self._sent)]
            self._payloads = list(self._received.chunk(group.size))

    def finish(self) -> None:
        for pending in self._pending:
            pending.wait("summing gradients")
        _decode_sum(self._wire, self._payloads, self._flat)
        self._buffers.give(self._sent, self._received)


class _TwoPhase:
    name = "two-phase"

    def __init__(
        self, first: Group, second: Group, wire: Wire, flat: Tensor, residual: Tensor | None, buffers: _Buffers
    ) -> None:
        self._wire = wire
        self._second = second
        self._buffers = buffers
        # Whole blocks, so that int8 rounds the same blocks in both phases; the last parts may be shorter, or empty.
        part = -(-flat.numel() // (first.size * BLOCK)) * BLOCK
        self._length = wire.payload_bytes(part)
        self._parts = [flat[part * i : part * (i + 1)] for i in range(first.size)]
        residuals = [None if residual is None else residual[part * i : part * (i + 1)] for i in range(first.size)]
        self._residual = residuals[first.rank]
        self._sent = buffers.take(self._length * first.size)
        self._received = buffers.take(self._length * first.size)
        self.bytes_sent = 2 * self._length * (first.size - 1)
        for values, payload, carried in zip(self._parts, self._payloads(self._sent), residuals, strict=True):
            encode_with_feedback(wire, values, payload, carried)
        self._pending = first.all_to_all(self._received, self._sent)

    def finish(self) -> None:
        self._pending.wait("summing parts of gradients")
        rank = self._second.rank
        mine = self._parts[rank]
        theirs = self._received.view(len(self._parts), self._length)[:, : self._wire.payload_bytes(mine.numel())]
        _decode_sum(self._wire, list(theirs), mine)
        # What rounding takes from the sum is carried by the rank that rounded it, together with its own share's.
        payload = self._sent[: self._length]
        own_rounding = None if self._residual is None else self._residual.clone()
        if self._residual is not None:
            self._residual.zero_()
        encode_with_feedback(self._wire, mine, payload[: self._wire.payload_bytes(mine.numel())], self._residual)
        if self._residual is not None and own_rounding is not None:
            self._residual.add_(own_rounding)
        self._second.all_gather(self._received, payload).wait("gathering sums")
        for values, sums in zip(self._parts, self._payloads(self._received), strict=True):
            self._wire.decode(sums, values)
        self._buffers.give(self._sent, self._received)

    def _payloads(self, packed: Tensor) -> list[Tensor]:
        rows = packed.view(len(self._parts), self._length)
        return [row[: self._wire.payload_bytes(part.numel())] for row, part in zip(rows, self._parts, strict=True)]


class _Buffers:
    """Byte buffers that are used again: fresh ones of this size cost page faults at every step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    def take(self, length: int) -> Tensor:
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.numel() >= length]
            if fitting:
                chosen = min(fitting, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not chosen]
                return chosen[:length]
        return torch.empty(length, dtype=torch.uint8)

    def give(self, *buffers: Tensor) -> None:
        whole = [torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()) for buffer in buffers]
        with self._lock:
            self._free += whole
            # The largest are the ones that serve every bucket.
            self._free = sorted(self._free, key=Tensor.numel)[-2 * IN_FLIGHT :]


def _decode_sum(wire: Wire, payloads: list[Tensor], values: Tensor) -> None:
    wire.decode(payloads[0], values)
    for payload in payloads[1:]:
        wire.accumulate(payload, values)


def _refuse_non_finite(flat: Tensor, refuse: Callable[[int], None]) -> bool:
    position = first_non_finite(flat)
    if position is None:
        return True
    refuse(position)
    flat.zero_()
    return False


def _add_alone(flat: Tensor, ready: Ready, refuse: Callable[[int], None]) -> Future[Summed]:
    started = time.perf_counter()
    ready()
    copied = time.perf_counter()
    _refuse_non_finite(flat, refuse)
    done: Future[Summed] = Future()
    done.set_result(Summed(started, copied, copied, 0, "alone"))
    return done


def _relay(done: Future[Summed] | Future[list[Tensor]], job: Callable[[], object]) -> None:
    try:
        done.set_result(job())  # type: ignore[arg-type]
    except BaseException as error:  # noqa: BLE001  (belongs to whoever asks for the result)
        done.set_exception(error)


def _relay_failure(done: Future[Summed] | Future[list[Tensor]], job: Callable[[], None]) -> None:
    try:
        job()
    except BaseException as error:  # noqa: BLE001  (belongs to whoever asks for the result)
        done.set_exception(error)
