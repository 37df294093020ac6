"""The leader's side of ``assist``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetdeploy.train.background import Background
from hetdeploy.train.buckets import Bucket
from hetdeploy.train.crew import HELPER, Crew, Meeting, Reception
from hetdeploy.train.device import staging_for
from hetdeploy.train.errors import MisuseError, NonFiniteGradient, PeerLost
from hetdeploy.train.messages import (
    COMMAND_TAG,
    FINE,
    GRADIENT_TAG,
    PROBLEM,
    STOP,
    WEIGHTS_TAG,
    WORK,
    Command,
    Report,
    gradient_bytes,
    unpack_report,
)
from hetdeploy.train.metrics import StepRecord
from hetdeploy.train.shares import Pace, Split, smoothed
from hetdeploy.train.snapshot import Snapshot, followed
from hetdeploy.train.wire import Wire

FAREWELL_SECONDS = 5.0
"""How long helpers that are in time get to hear that it is over. One that is asleep hears it from its closed
connection.
"""
PROBE_EVERY = 50
"""A helper that is too slow for a share gets one micro-batch now and then, to see whether it still is: after one step,
then after twice as many each time, up to this many. Its first share (which warms up) and a stall say little about it.
"""

log = logging.getLogger(__name__)


class Leader:
    """Owns weights and optimizer. Everything that can block is done by one background thread for each helper."""

    def __init__(
        self,
        crew: Crew,
        model: nn.Module,
        whole: Bucket,
        lines: list[str],
        *,
        wire: Wire,
        weights: str,
        micro_batches: int,
        redo: bool,
        patience: float,
        split: Split,
    ) -> None:
        self.whole = whole
        self.staging = staging_for(whole.parameters[0].device)
        self.redo = redo
        self.patience = patience
        self.per_micro: float | None = None
        self.last_ended = time.perf_counter()
        self._micro_batches = micro_batches
        self._split = split
        self._wire = wire
        self._weights = weights
        self._followed = followed(model, whole.parameters)
        self._snapshots: list[Snapshot] = []
        self._members: list[Member] = []
        self._reception = Reception(crew.store, model, lines) if crew.store is not None else None

    @property
    def names(self) -> list[str]:
        """Names of the helpers that are here."""
        self._look_round()
        return [member.name for member in self._members]

    @property
    def paces(self) -> list[Pace]:
        """Measured times of the helpers that are here."""
        return [member.pace for member in self._members]

    def wait_for(self, helpers: int, timeout: float) -> None:
        """Block until so many helpers are here. Raises PeerLost."""
        if self._reception is None:
            raise MisuseError("nobody can join this leader", "start it in a crew, see Crew.current")
        self._look_round()
        self._reception.wait(helpers - len(self._members), timeout)

    def steps(self, total: int, start: int) -> Iterator[LeaderStep]:
        """See ``Assist.steps``."""
        for number in range(start, total):
            self._look_round()
            step = LeaderStep(self, number, self._assign(number))
            yield step
            if not step.reduced:
                raise MisuseError(f"step {number} was not reduced", "call step.reduce() at the end of every step")

    def tell(self, command: Command) -> None:
        """Tell every helper, and let it arrive where it can soon. One that is late hears it after its share."""
        wait([member.tell(command) for member in self._members], FAREWELL_SECONDS)

    def close(self) -> None:
        """Send helpers home."""
        if self._reception is not None:
            self._reception.close()
        self._look_round()
        self.tell(Command(STOP, 0))
        for member in self._members:
            if not member.busy:  # else its thread ends with the process
                member.close()
        self._members = []

    def _look_round(self) -> None:
        """Take in who has come, and let go who is lost."""
        for meeting in self._reception.arrivals() if self._reception is not None else []:
            log.info("helper %d (%s) has joined", meeting.number, meeting.name)
            self._members.append(Member(meeting, self.whole, self._wire))
        for member in self._members:
            member.settle()
        self._members = [member for member in self._members if not member.lost]

    def _assign(self, number: int) -> list[Assignment]:
        free = [member for member in self._members if not member.busy]
        shares = list(self._split(self._micro_batches, self.per_micro, [member.pace for member in free]))
        for i, member in enumerate(free):
            if sum(shares) + 1 < self._micro_batches and member.rests(shares[i]):
                shares[i] = 1
        working = [(member, share) for member, share in zip(free, shares, strict=True) if share]
        if not working:
            return []
        snapshot = self._snapshot()
        first = self._micro_batches - sum(share for _, share in working)
        assignments = []
        for member, share in working:
            member.work(number, range(first, first + share), snapshot)
            assignments.append(Assignment(member, range(first, first + share), snapshot))
            first += share
        return assignments

    def own_share(self, assignments: list[Assignment]) -> range:
        """The micro-batches that no helper has."""
        return range(assignments[0].micros.start if assignments else self._micro_batches)

    def _snapshot(self) -> Snapshot:
        unused = next((each for each in self._snapshots if each.free), None)
        if unused is None:
            unused = Snapshot(self.staging, self._followed, self._weights)
            self._snapshots.append(unused)
        unused.take()
        return unused


class LeaderStep:
    """See ``assist.Step``."""

    def __init__(self, leader: Leader, number: int, assignments: list[Assignment]) -> None:
        self.number = number
        self.reduced = False
        self.record: StepRecord | None = None
        self._leader = leader
        self._assignments = assignments
        self._began = time.perf_counter()
        self._samples = 0.0
        self._loss: float | Tensor = 0.0
        self._compute = 0.0
        self._waited = 0.0
        self._arrived: list[tuple[Assignment, Gradient]] | None = None

    def __iter__(self) -> Iterator[int]:
        yield from self._leader.own_share(self._assignments)
        missing = self._collect()
        if self._leader.redo:
            for assignment in missing:
                yield from assignment.micros

    def count(self, samples: float, loss: Tensor | float = 0.0) -> None:
        """Say how many samples a loss was summed over."""
        self._samples += samples
        self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)

    def reduce(self) -> StepRecord:
        """Add what has arrived, divide by the samples counted. Raises NonFiniteGradient."""
        entered = time.perf_counter()
        if self._arrived is None:
            self._collect()
        assert self._arrived is not None
        self.reduced = True
        self._add([gradient for _, gradient in self._arrived])
        reports = [gradient.report for _, gradient in self._arrived]
        total = self._samples + sum(report.samples for report in reports)
        self._refuse_non_finite()
        gradients = [parameter.grad for parameter in self._leader.whole.parameters if parameter.grad is not None]
        if gradients and total:
            torch._foreach_div_(gradients, total)
        for assignment in self._assignments:
            assignment.snapshot.wait()  # the optimizer may change the weights now; long since copied
        loss = float(self._loss) + sum(report.loss for report in reports)
        now = time.perf_counter()
        record = StepRecord(
            rank=0,
            step=self.number,
            samples=self._samples,
            global_samples=total,
            loss=loss / total if total else 0.0,
            compute_s=now - self._leader.last_ended - self._waited - (now - entered),
            copy_s=0.0,
            exchange_exposed_s=now - entered,
            exchange_hidden_s=max((gradient.link_s for _, gradient in self._arrived), default=0.0),
            idle_s=self._waited,
            bytes_sent=sum(assignment.snapshot.length for assignment in self._assignments),
            algorithm=f"assist {len(self._arrived)}/{len(self._assignments)}",
        )
        self._leader.last_ended = now
        self.record = record
        return record

    def _collect(self) -> list[Assignment]:
        """When the own share is done: who is in time. Returns the assignments that are missing."""
        leader = self._leader
        leader.staging.synchronize()
        own = leader.own_share(self._assignments)
        self._compute = time.perf_counter() - self._began
        if own:
            leader.per_micro = smoothed(leader.per_micro, self._compute / len(own))
        began_waiting = time.perf_counter()
        wait([assignment.member.result for assignment in self._assignments], self._compute * leader.patience)
        self._waited = time.perf_counter() - began_waiting
        self._arrived, missing = [], []
        for assignment in self._assignments:
            gradient = assignment.member.take(self.number)
            if gradient is None:
                missing.append(assignment)
            else:
                self._arrived.append((assignment, gradient))
        return missing

    def _add(self, gradients: list[Gradient]) -> None:
        parameters = self._leader.whole.parameters
        for gradient in gradients:
            used = gradient.report.used.tolist()
            for parameter, touched in zip(parameters, used, strict=True):
                if touched and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            parts = torch.split(gradient.flat, self._leader.whole.sizes)
            chosen = [
                (parameter.grad, part)
                for parameter, part, touched in zip(parameters, parts, used, strict=True)
                if touched and parameter.grad is not None
            ]
            self._leader.staging.add([part for _, part in chosen], [target for target, _ in chosen])

    def _refuse_non_finite(self) -> None:
        assert self._arrived is not None
        bad: tuple[int, int] | None = next(
            (
                (assignment.member.number, gradient.report.refused)
                for assignment, gradient in self._arrived
                if gradient.report.refused != FINE
            ),
            None,
        )
        whole = self._leader.whole
        present = [(i, each.grad) for i, each in enumerate(whole.parameters) if each.grad is not None]
        if bad is None and present:
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in present], float("inf"))).cpu()
            infinite = norms.isfinite().logical_not_().nonzero()
            if infinite.numel():
                bad = (0, present[int(infinite[0])][0])
        if bad is None:
            return
        for parameter in whole.parameters:
            parameter.grad = None
        self._leader.tell(Command(PROBLEM, self.number, rank=bad[0], parameter=bad[1]))
        self._leader.last_ended = time.perf_counter()
        raise NonFiniteGradient(bad[0], whole.names[bad[1]], self.number)


@dataclass(frozen=True)
class Assignment:
    """A helper's share of one step."""

    member: Member
    micros: range
    snapshot: Snapshot


@dataclass(frozen=True)
class Gradient:
    """What a helper sent: its report and the decoded sum of gradients, valid until its next share."""

    report: Report
    flat: Tensor
    round_trip_s: float

    @property
    def link_s(self) -> float:
        """Weights down and gradient up, with all copying and coding."""
        return max(0.0, self.round_trip_s - self.report.compute_s)


class Member:
    """A helper as the leader sees it. Free, busy (also when late), or lost."""

    def __init__(self, meeting: Meeting, whole: Bucket, wire: Wire) -> None:
        self.number = meeting.number
        self.name = meeting.name
        self.pace = Pace()
        self.lost = False
        self.result: Future[Gradient] = Future()
        self._group = meeting.group
        self._wire = wire
        self._background = Background(f"hetdeploy-helper-{meeting.number}")
        self._parameters = len(whole.parameters)
        self._flat = torch.empty(whole.numel)
        self._message = torch.empty(
            gradient_bytes(self._parameters, wire.payload_bytes(whole.numel)), dtype=torch.uint8
        )
        self._micros = 0
        self._rested, self._probe_after = 0, 1
        self._used = True
        self.busy = False
        """Its exchange has not been settled. Only the leader's own thread changes this."""

    def rests(self, share: int) -> bool:
        """Take note of the share that it would get; whether it has rested long enough to be measured anew."""
        if share:
            self._rested, self._probe_after = 0, 1
            return False
        self._rested += 1
        if self._rested <= self._probe_after:
            return False
        self._rested, self._probe_after = 0, min(2 * self._probe_after, PROBE_EVERY)
        self.pace.outdated = True
        return True

    def work(self, step: int, micros: range, snapshot: Snapshot) -> None:
        """Give it a share; returns at once."""
        command = Command(WORK, step, micros.start, len(micros), used=self._used)
        self._used = False
        self._micros = len(micros)
        self.busy = True
        snapshot.hold()
        self.result = self._background.submit(lambda: self._exchange(command, snapshot, time.perf_counter()))
        self.result.add_done_callback(lambda _: snapshot.release())

    def take(self, step: int) -> Gradient | None:
        """Its gradient for ``step`` if that has arrived; the step then counts on it."""
        if not self.result.done():
            log.warning("helper %d (%s) is late for step %d", self.number, self.name, step)
            return None
        gradient = self.settle()
        self._used = gradient is not None
        return gradient

    def settle(self) -> Gradient | None:
        """If its exchange is over, make it free, or lost. Never waits."""
        if not (self.busy and self.result.done()):
            return None
        self.busy = False
        try:
            gradient = self.result.result()
        except PeerLost as error:
            log.warning("helper %d (%s) is lost: %s", self.number, self.name, error)
            self.lost = True
            self.close()
            return None
        self.pace.measured(self._micros, gradient.report.compute_s, gradient.round_trip_s)
        return gradient

    def tell(self, command: Command) -> Future[None]:
        """Send a command that has no answer."""
        return self._background.submit(lambda: self._send(command))

    def close(self) -> None:
        """End its thread."""
        self._background.close()

    def _send(self, command: Command) -> None:
        self._group.send(command.pack(), HELPER, COMMAND_TAG).wait("sending a command")

    def _exchange(self, command: Command, snapshot: Snapshot, assigned: float) -> Gradient:
        # Ready to receive before anything is sent: both directions of the link are free at any time.
        receiving = self._group.receive(self._message, HELPER, GRADIENT_TAG)
        self._send(command)
        self._group.send(snapshot.payload(), HELPER, WEIGHTS_TAG).wait(f"sending weights of step {command.step}")
        receiving.wait(f"awaiting the gradient of step {command.step}")
        report, payload = unpack_report(self._message, self._parameters)
        self._wire.decode(payload, self._flat)
        return Gradient(report, self._flat, time.perf_counter() - assigned)
