"""Exact synchronous training in which the leader never waits for its helpers.

    assist = Assist(model, micro_batches=24, wire="bf16")
    with assist:
        for step in assist.steps(1000):
            for micro in step:                              # numbers of this machine's share of the global batch
                x, y = micro_batch(step.number, micro)      # the same on every machine for the same two numbers
                loss = F.cross_entropy(model(x), y, reduction="sum")
                loss.backward()
                step.count(samples=len(x), loss=loss)
            record = step.reduce()
            if record is not None:                          # the leader: gradients are the mean over the global batch
                optimizer.step()
                optimizer.zero_grad()
                print(record.step, record.loss)

Leader and helpers run this same script; who leads is decided by ``Crew.current``. At the start of each step the leader
sends its weights to every helper and works on its own share meanwhile; a helper computes the *sum* of gradients over
its share and sends it so that it arrives before the leader is through with its own (shares.py). The leader adds,
divides once by the number of samples that were counted, and steps its optimizer. Helpers hold no optimizer state and
get fresh weights for every share: they cannot drift, and one that is lost takes nothing with it.

Invariants:

- the gradient of a step is that of one process over the global batch, up to the rounding of the wire format of the
  helpers' part (exact up to the order of summation with wire="fp32");
- a helper that is late or lost costs its share of that step and nothing else. ``late="redo"``: the leader does the
  share itself, and the step is still the whole global batch. ``late="drop"``: the step is the mean over the samples
  that arrived;
- the leader waits for a helper at most ``patience`` times what its own share took;
- NaN or Inf anywhere raises NonFiniteGradient on the leader with gradients dropped; helpers learn of it too.

weights="fp32" sends the exact weights. weights="bf16" sends half the bytes and is exact where the forward pass uses
bf16 anyway.

Layers that look at the batch as a whole (BatchNorm) see one micro-batch at a time, as with gradient accumulation. The
leader's floating-point buffers go down with the weights.

Memory beyond the model and its gradients G (fp32 bytes): leader, weights once in CPU memory (twice while a helper is
late) and for each helper G and one gradient payload; helper, weights once, G and one payload, with int8 two more G. On
cuda and mps another G on the device while copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from hetdeploy.train import layout
from hetdeploy.train.buckets import Bucket, plan_buckets
from hetdeploy.train.crew import Crew
from hetdeploy.train.errors import MisuseError
from hetdeploy.train.helper import Helper
from hetdeploy.train.leader import Leader
from hetdeploy.train.metrics import StepRecord
from hetdeploy.train.shares import Pace, Split, split
from hetdeploy.train.wire import wire_format

PATIENCE = 0.1


class Step(Protocol):
    """One step of the global batch, on this machine."""

    number: int
    record: StepRecord | None
    """After ``reduce``, what the step cost this machine. A helper's loss and samples are those of its share alone."""

    def __iter__(self) -> Iterator[int]:
        """The micro-batches that are this machine's, from 0 to ``micro_batches`` - 1 of the global batch."""
        ...

    def count(self, samples: float, loss: Tensor | float = 0.0) -> None:
        """Say how many samples (or tokens) a loss was summed over, after its backward pass."""
        ...

    def reduce(self) -> StepRecord | None:
        """Finish the step. On the leader ``.grad`` is now the mean over all samples, and the record says what it cost;
        on a helper the sum has been sent and there is nothing to apply: None.
        """
        ...


class Assist:
    """See the module's text.

    micro_batches: how many make the global batch; the more, the finer it can be shared (two to three dozen are
    plenty). wire: format of gradients. weights: "fp32" or "bf16". late: "redo" or "drop". patience: how long the
    leader waits for a helper that is late, as a fraction of the time its own share took. split: who gets how much
    (shares.py). crew: by default from the environment.

    A helper's constructor waits for the leader, visibly (log level INFO). Raises LayoutMismatch when it refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batches: int,
        wire: str = "bf16",
        weights: str = "fp32",
        late: str = "redo",
        patience: float = PATIENCE,
        split: Split = split,
        crew: Crew | None = None,
    ) -> None:
        crew = Crew.current() if crew is None else crew
        if micro_batches < 1 or weights not in ("fp32", "bf16") or late not in ("redo", "drop"):
            raise MisuseError(
                f"micro_batches={micro_batches}, weights={weights!r}, late={late!r} cannot be",
                'use at least one micro-batch, "fp32" or "bf16", "redo" or "drop"',
            )
        whole = _one_bucket(model)
        options = {"wire": wire, "weights": weights, "micro_batches": micro_batches}
        lines = layout.describe(model, options)
        self.leads = crew.leads
        """Whether this process steps the optimizer, evaluates, logs and writes checkpoints."""
        self._part: Leader | Helper
        if crew.leads:
            self._part = Leader(
                crew,
                model,
                whole,
                lines,
                wire=wire_format(wire),
                weights=weights,
                micro_batches=micro_batches,
                redo=late == "redo",
                patience=patience,
                split=split,
            )
        else:
            self._part = Helper(crew, model, whole, lines, wire=wire_format(wire), weights=weights)

    def steps(self, total: int, start: int = 0) -> Iterator[Step]:
        """Steps ``start`` to ``total`` - 1 on the leader. On a helper those in which it has a share, until the leader
        closes.
        """
        yield from self._part.steps(total, start)

    def wait_for(self, helpers: int, timeout: float = 600.0) -> None:
        """On the leader, wait until so many have joined: for measurements, training needs nobody. Raises PeerLost."""
        if isinstance(self._part, Leader):
            self._part.wait_for(helpers, timeout)

    @property
    def helpers(self) -> list[str]:
        """On the leader, the names (host:pid) of the helpers that are here."""
        return self._part.names if isinstance(self._part, Leader) else []

    @property
    def paces(self) -> tuple[float | None, list[Pace]]:
        """On the leader, its measured seconds for a micro-batch, and its helpers' times; what shares are made from."""
        return (self._part.per_micro, self._part.paces) if isinstance(self._part, Leader) else (None, [])

    def close(self) -> None:
        """Send helpers home."""
        self._part.close()

    def __enter__(self) -> Assist:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _one_bucket(model: nn.Module) -> Bucket:
    buckets = plan_buckets(model, 1 << 62)
    if not buckets:
        raise MisuseError("the model has no trainable parameter", "check requires_grad")
    return buckets[0]
