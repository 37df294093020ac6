"""A helper's side of ``assist``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hetdeploy.train.buckets import Bucket
from hetdeploy.train.crew import LEADER, Crew, join
from hetdeploy.train.device import staging_for
from hetdeploy.train.errors import MisuseError, NonFiniteGradient, PeerLost
from hetdeploy.train.messages import (
    COMMAND_TAG,
    COMMAND_WORDS,
    FINE,
    GRADIENT_TAG,
    PROBLEM,
    STOP,
    WEIGHTS_TAG,
    Command,
    Report,
    gradient_bytes,
    pack_report,
)
from hetdeploy.train.metrics import StepRecord
from hetdeploy.train.snapshot import Snapshot, followed
from hetdeploy.train.wire import Wire, encode_with_feedback, first_non_finite
from hetdeploy.train.world import Pending

log = logging.getLogger(__name__)


class Helper:
    """Holds no state that matters: weights come down for every share. (int8's error feedback is the one thing it
    carries.)
    """

    def __init__(
        self, crew: Crew, model: nn.Module, whole: Bucket, lines: list[str], *, wire: Wire, weights: str
    ) -> None:
        if crew.store is None:
            raise MisuseError("a helper needs a leader to join", "see Crew.current")
        log.info("waiting for the leader")
        meeting = join(crew.store, model, lines)
        self._stopped = meeting is None
        if meeting is None:
            log.warning("the leader has finished already: there is nothing to help with")
            return
        log.info("joined the leader as helper %d", meeting.number)
        self.number = meeting.number
        self.group = meeting.group
        self.whole = whole
        self.wire = wire
        self.staging = staging_for(whole.parameters[0].device)
        self.flat = self.staging.buffer(whole.numel)
        self.message = torch.zeros(
            gradient_bytes(len(whole.parameters), wire.payload_bytes(whole.numel)), dtype=torch.uint8
        )
        self.residual = torch.zeros(whole.numel) if wire.feedback else None
        self.sending: Pending | None = None
        self.last_ended = time.perf_counter()
        self._residual_before = torch.zeros(whole.numel) if wire.feedback else None
        self._weights = Snapshot(self.staging, followed(model, whole.parameters), weights)

    def steps(self, _total: int, _start: int) -> Iterator[HelperStep]:
        """See ``Assist.steps``."""
        problem: NonFiniteGradient | None = None
        while not self._stopped:
            try:
                command = self._command()
            except PeerLost as error:
                raise problem or error from error
            if command.kind == STOP:
                self._stopped = True
                if problem is not None:
                    raise problem
                return
            if command.kind == PROBLEM:
                # The leader may go on; if it does not, this is why, and not that its connection was closed.
                problem = NonFiniteGradient(command.rank, self.whole.names[command.parameter], command.step)
                log.warning("%s", problem)
                continue
            problem = None
            self._prepare(command)
            step = HelperStep(self, command)
            yield step
            if not step.reduced:
                raise MisuseError(f"step {step.number} was not reduced", "call step.reduce() at the end of every step")

    def close(self) -> None:
        """The leader may have ended before this helper's last word was read; nothing else to end."""
        self._stopped = True

    def _command(self) -> Command:
        words = torch.zeros(COMMAND_WORDS, dtype=torch.int64)
        self.group.receive(words, LEADER, COMMAND_TAG).wait("awaiting the next share")
        return Command.unpack(words)

    def _prepare(self, command: Command) -> None:
        receiving = self.group.receive(self._weights.receive(), LEADER, WEIGHTS_TAG)
        if self.sending is not None:
            self.sending.wait("sending a gradient")
            self.sending = None
        if self.residual is not None and self._residual_before is not None:
            if not command.used:
                self.residual.copy_(self._residual_before)
            self._residual_before.copy_(self.residual)
        receiving.wait(f"receiving weights of step {command.step}")
        self._weights.apply()
        for parameter in self.whole.parameters:
            parameter.grad = None


class HelperStep:
    """See ``assist.Step``."""

    def __init__(self, helper: Helper, command: Command) -> None:
        self.number = command.step
        self.reduced = False
        self.record: StepRecord | None = None
        self._helper = helper
        self._micros = range(command.first, command.first + command.count)
        self._began = time.perf_counter()
        self._samples = 0.0
        self._loss: float | Tensor = 0.0

    def __iter__(self) -> Iterator[int]:
        yield from self._micros

    def count(self, samples: float, loss: Tensor | float = 0.0) -> None:
        """Say how many samples a loss was summed over."""
        self._samples += samples
        self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)

    def reduce(self) -> None:
        """Send the sum of gradients. What is NaN or Inf is reported by name and not sent."""
        helper = self._helper
        self.reduced = True
        helper.staging.synchronize()
        compute = time.perf_counter() - self._began
        gradients = [parameter.grad for parameter in helper.whole.parameters]
        helper.staging.download(gradients, helper.whole.sizes, helper.flat)()
        copied = time.perf_counter()
        position, refused = first_non_finite(helper.flat), FINE
        if position is not None:
            refused = helper.whole.names.index(helper.whole.name_at(position))
            helper.flat.zero_()
        used = torch.tensor([gradient is not None for gradient in gradients])
        report = Report(self.number, self._samples, float(self._loss), compute, refused, used)
        payload = pack_report(helper.message, report)
        encode_with_feedback(helper.wire, helper.flat, payload, helper.residual if refused == FINE else None)
        helper.sending = helper.group.send(helper.message, LEADER, GRADIENT_TAG)
        now = time.perf_counter()
        self.record = StepRecord(
            rank=helper.number,
            step=self.number,
            samples=self._samples,
            global_samples=self._samples,
            loss=report.loss / self._samples if self._samples else 0.0,
            compute_s=compute,
            copy_s=copied - self._began - compute,
            exchange_exposed_s=now - copied,
            exchange_hidden_s=0.0,
            # Weights on their way down are in here: a helper cannot tell them from a leader that has no work for it.
            idle_s=self._began - helper.last_ended,
            bytes_sent=helper.message.numel(),
            algorithm="assist",
        )
        helper.last_ended = now
