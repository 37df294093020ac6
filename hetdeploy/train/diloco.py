"""Local steps, then one exchange of how far each rank has come (Douillard et al. 2023, DiLoCo; fragments and overlap
as in Streaming DiLoCo, 2025).

    sync = DiLoCo(model, every=datetime.timedelta(seconds=30), fragments=4, wire="int8")
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()                        # the script's own optimizer, its state stays on this rank
        optimizer.zero_grad()
        sync.step(samples=len(x), loss=loss * len(x))
        if sync.rounds == ROUNDS: break
    sync.finish()                                        # equal weights on all ranks

Every rank keeps the same *master weights* m on the CPU. An exchange takes one fragment of the parameters (fragments
take turns, so each is exchanged once in ``every``). Rank i took n_i samples since the fragment's last turn and its
weights are now w_i:

    pseudo-gradient   d_i = m - w_i                      (old minus new: it points uphill, as a gradient does)
    mean              d   = sum n_i d_i / sum n_i        (weighted by samples: a rank twice as fast counts twice)
    outer step        v   = mu v + d,   m' = m - lr (d + mu v)    (Nesterov as in torch.optim.SGD; lr 0.7, mu 0.9)
    local weights     w'_i = w_i + (m' - s_i)            (s_i: w_i when the exchange began)

The exchange travels while the next local steps are computed; what they changed is kept by the last line and is part of
the next pseudo-gradient, so that no local step is lost or counted twice. **Staleness**: an outer step is applied at
the first local step after it has arrived, and at the latest when the next exchange is due, ``every`` / fragments after
it began (twice that, where ``every`` is a time): the rank then waits. ``overlap=False`` waits at once (staleness zero).

``every`` is a number of local steps, or a time: then every rank takes as many local steps as it can in equal
wall-clock. All ranks take part in every exchange, in the same order; with a time they begin it within a local step of
each other. Choose it so that even the slowest rank takes a few local steps in ``every`` / fragments.

What it costs: statistical efficiency. Compare time to a loss, never samples per second.

Memory on the CPU in fp32 sizes G of the trainable parameters: masters, momenta, exchange buffers and snapshots, 4 G;
with int8 one more.
"""

from __future__ import annotations

import datetime
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetdeploy.train import layout
from hetdeploy.train.buckets import FP32_BYTES, Bucket, bucket_layout, plan_buckets
from hetdeploy.train.device import staging_for
from hetdeploy.train.errors import MisuseError, NonFiniteGradient
from hetdeploy.train.metrics import StepRecord, as_number
from hetdeploy.train.summing import Summed, Summer
from hetdeploy.train.wire import wire_format
from hetdeploy.train.world import EXCHANGE_TIMEOUT, World

PATIENCE_INTERVALS = 2
"""With a time for ``every``: how many intervals after it began an exchange has to be there, which a slower rank begins
later. Until then local steps go on.
"""
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
FINE = -1


class DiLoCo:
    """See the module's text. Collective, as are ``step`` (when an exchange is due) and ``finish``.

    every: local steps (int) or time between two exchanges of the same fragment; the same on all ranks. fragments:
    about how many parts take turns. timeout: how long a rank waits for the slowest one, on top of ``every`` where that
    is a time.

    Raises LayoutMismatch on every rank if models or arguments differ.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | datetime.timedelta,
        fragments: int = 1,
        wire: str = "fp32",
        lr: float = OUTER_LR,
        momentum: float = OUTER_MOMENTUM,
        overlap: bool = True,
        timeout: datetime.timedelta = EXCHANGE_TIMEOUT,
        world: World | None = None,
    ) -> None:
        interval = every.total_seconds() if isinstance(every, datetime.timedelta) else every
        if interval <= 0 or fragments < 1:
            raise MisuseError(f"every={every} with {fragments} fragments cannot be", "use positive numbers")
        self.world = World.current() if world is None else world
        self.exchanges = 0
        """Outer steps applied so far, one fragment each; the same on all ranks after the same number of ``step``
        results.
        """
        self.lr = lr
        self.momentum = momentum
        self._model = model
        self._timed = isinstance(every, datetime.timedelta)
        self._overlap = overlap
        trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
        buckets = plan_buckets(model, -(-trainable * FP32_BYTES // fragments))
        if not buckets:
            raise MisuseError("the model has no trainable parameter", "check requires_grad")
        self._interval = interval / len(buckets)
        waiting = timeout + every if isinstance(every, datetime.timedelta) else timeout
        self._summer = Summer(self.world, wire_format(wire), "diloco", waiting)
        if self.world.size > 1:
            lines = layout.describe(model, {"wire": wire, "every": every, "outer": (lr, momentum)})
            # Last: where models differ, the first difference named is the parameter and not what follows from it.
            layout.compare(self._summer.group, [*lines, f"fragments = {bucket_layout(buckets)}"])
            layout.align(self._summer.group, model)
        self._staging = staging_for(buckets[0].parameters[0].device)
        feedback = self._summer.wire.feedback and self.world.size > 1
        self._fragments = [self._fragment(bucket, feedback) for bucket in buckets]
        self._under_way: _UnderWay | None = None
        self._local_steps = 0
        self._begun_at = 0.0 if not self._timed else time.perf_counter()
        self._samples = 0.0
        self._loss = 0.0
        self._left = time.perf_counter()
        self._all_finished = False

    @property
    def rounds(self) -> int:
        """How often every fragment has been exchanged."""
        return self.exchanges // len(self._fragments)

    def step(self, samples: float, loss: Tensor | float = 0.0) -> StepRecord | None:
        """After each local optimizer step. The record of the outer step, if one was applied.

        samples: how many samples (or tokens) the local step took; loss: their sum.

        Raises NonFiniteGradient on all ranks (with all weights back at the master weights), PeerLost.
        """
        self._local_steps += 1
        self._samples += samples
        self._loss += as_number(loss)
        for fragment in self._fragments:
            fragment.samples += samples
            fragment.fresh = False
        due = self._due()
        record = None
        if self._under_way is not None and (due or self._under_way.done):
            record = self._apply()
        if due:
            self._begin(finished=False)
            if not self._overlap:
                record = self._apply()
            if self._timed:
                # Not from when it was due: a rank that had to wait would be due again at once, and wait ever after.
                self._begun_at = time.perf_counter()
        return record

    def finish(self) -> None:
        """Collective, once, at the end: exchange until every rank has nothing left, then take the master weights
        everywhere.

        A rank that ends earlier takes part with no samples until all have called this.
        """
        if self._under_way is not None:
            self._apply()
        while not self._all_finished:
            self._begin(finished=True)
            self._apply()
        for _ in range(len(self._fragments) - 1):
            self._begin(finished=True)
            self._apply()
        self.restore()
        if self.world.size > 1:
            layout.broadcast(self._summer.group, self._model.buffers())
        self._all_finished = False
        self._begun_at = time.perf_counter() if self._timed else float(self._local_steps)

    def restore(self) -> None:
        """Put the master weights into the model. Local."""
        for fragment in self._fragments:
            self._staging.upload(fragment.master, fragment.bucket.parameters)
            fragment.samples = 0.0
            fragment.fresh = True

    def close(self) -> None:
        """End the threads."""
        self._summer.close()

    def state_dict(self) -> dict[str, Any]:
        """The outer state (an exchange under way is waited for): CPU tensors and numbers."""
        if self._under_way is not None:
            self._apply()
        return {
            "exchanges": self.exchanges,
            "masters": [fragment.master.clone() for fragment in self._fragments],
            "momenta": [fragment.velocity.clone() for fragment in self._fragments],
            "residuals": [None if each.residual is None else each.residual.clone() for each in self._fragments],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The outer state, and with it the master weights into the model. On all ranks, the same state."""
        sizes = [master.numel() for master in state["masters"]]
        if sizes != [fragment.bucket.numel for fragment in self._fragments]:
            raise MisuseError("the saved outer state has other fragments", "use the same model and number of fragments")
        self.exchanges = state["exchanges"]
        for i, fragment in enumerate(self._fragments):
            fragment.master.copy_(state["masters"][i])
            fragment.velocity.copy_(state["momenta"][i])
            if fragment.residual is not None and state["residuals"][i] is not None:
                fragment.residual.copy_(state["residuals"][i])
        self.restore()

    def _fragment(self, bucket: Bucket, feedback: bool) -> _Fragment:
        master = self._staging.buffer(bucket.numel)
        self._staging.download(bucket.parameters, bucket.sizes, master)()
        return _Fragment(
            bucket,
            master,
            velocity=torch.zeros(bucket.numel),
            began=self._staging.buffer(bucket.numel),
            moved=torch.zeros(bucket.numel),
            residual=torch.zeros(bucket.numel) if feedback else None,
        )

    def _due(self) -> bool:
        if self._timed:
            is_awaited = self._under_way is not None and not self._under_way.done
            intervals = PATIENCE_INTERVALS if is_awaited else 1
            return time.perf_counter() - self._begun_at >= intervals * self._interval
        if self._local_steps - self._begun_at < self._interval:
            return False
        self._begun_at += self._interval  # to the grid of every / fragments
        return True

    def _begin(self, finished: bool) -> None:
        fragment = self._fragments[self.exchanges % len(self._fragments)]
        ready = self._staging.download(fragment.bucket.parameters, fragment.bucket.sizes, fragment.began)
        weight, refused = fragment.samples, [FINE]
        fragment.samples = 0.0
        fragment.fresh = True

        def pseudo_gradient() -> None:
            ready()
            torch.sub(fragment.master, fragment.began, out=fragment.moved).mul_(weight)

        def refuse(position: int) -> None:
            refused[0] = position

        numbers = (self.exchanges, weight, self._samples, self._loss, float(finished), time.perf_counter() - self._left)
        self._samples, self._loss = 0.0, 0.0
        summed = self._summer.add(fragment.moved, pseudo_gradient, fragment.residual, refuse)
        headers = self._summer.gather(
            lambda: torch.tensor([*numbers, refused[0]], dtype=torch.float64).view(torch.uint8)
        )
        self._under_way = _UnderWay(fragment, summed, headers, numbers[2])

    def _apply(self) -> StepRecord:
        entered = time.perf_counter()
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        headers, summed = under_way.headers.result(), under_way.summed.result()
        table = torch.stack([header.view(torch.float64) for header in headers])
        number, weights, samples, losses, finished, computed, refused = table.unbind(dim=1)
        fragment = under_way.fragment
        self._raise_together(fragment, number, refused)
        if float(weights.sum()):
            self._outer_step(fragment, float(weights.sum()))
            self._put(fragment)
        total = float(samples.sum())
        record = StepRecord(
            rank=self.world.rank,
            step=self.exchanges,
            samples=under_way.samples,
            global_samples=total,
            loss=float(losses.sum()) / total if total else 0.0,
            compute_s=float(computed[self.world.rank]),
            copy_s=summed.copied - summed.started,
            exchange_exposed_s=time.perf_counter() - entered,
            exchange_hidden_s=max(0.0, min(entered, summed.finished) - summed.copied),
            idle_s=0.0,
            bytes_sent=summed.bytes_sent,
            algorithm=summed.algorithm,
        )
        self.exchanges += 1
        self._all_finished = bool(finished.all())
        self._left = time.perf_counter()
        return record

    def _outer_step(self, fragment: _Fragment, weight: float) -> None:
        mean = fragment.moved.div_(weight)
        fragment.velocity.mul_(self.momentum).add_(mean)
        # In separate operations, so that no machine fuses them and all ranks' masters stay equal in every bit.
        fragment.master.sub_(mean.add_(fragment.velocity * self.momentum).mul_(self.lr))

    def _put(self, fragment: _Fragment) -> None:
        if fragment.fresh:  # no local step since the exchange began: the master weights themselves, in every bit
            self._staging.upload(fragment.master, fragment.bucket.parameters)
            return
        correction = torch.sub(fragment.master, fragment.began, out=fragment.moved)
        self._staging.add(torch.split(correction, fragment.bucket.sizes), fragment.bucket.parameters)

    def _raise_together(self, fragment: _Fragment, number: Tensor, refused: Tensor) -> None:
        bad = [rank for rank, position in enumerate(refused.tolist()) if position != FINE]
        if len(set(number.tolist())) > 1:
            raise MisuseError(f"ranks are at different exchanges: {[int(each) for each in number.tolist()]}")
        if not bad:
            return
        self.exchanges += 1
        if fragment.residual is not None:
            fragment.residual.zero_()
        self.restore()
        self._left = time.perf_counter()
        name = fragment.bucket.name_at(int(refused[bad[0]]))
        raise NonFiniteGradient(bad[0], name, self.exchanges - 1, what="pseudo-gradient")


@dataclass
class _Fragment:
    bucket: Bucket
    master: Tensor
    velocity: Tensor
    began: Tensor
    """The local weights when the exchange under way began."""
    moved: Tensor
    """The pseudo-gradient on its way, then its mean."""
    residual: Tensor | None
    samples: float = 0.0
    """Taken since its last exchange began."""
    fresh: bool = True
    """No local step since then."""


@dataclass
class _UnderWay:
    fragment: _Fragment
    summed: Future[Summed]
    headers: Future[list[Tensor]]
    samples: float

    @property
    def done(self) -> bool:
        return self.summed.done() and self.headers.done()
