"""Synchronous data parallelism for ranks that DDP or gloo refuse (MPS beside CUDA), with uneven batches.

    sync = AllReduce(model, wire="bf16")             # compares layouts, takes rank 0's weights
    for micro_batches in loader:
        for x, y in micro_batches[:-1]:
            with sync.no_sync():
                F.cross_entropy(model(x), y, reduction="sum").backward()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()                               # buckets leave while backward is still running
        sync.reduce(samples=count, loss=loss)         # gradients are now the mean over all samples of all ranks
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

**One normaliser.** Losses are *sums* over samples (or tokens), over as many backward passes as a rank likes.
``reduce`` adds the gradients of all ranks and divides once, by the number of samples that all ranks together report.
So the result is the gradient of one process over the union of the batches, whatever their sizes (pytorch issues 67253,
37359: a mean of means is not). A loss that is a mean over its n samples has to be multiplied by n.

Invariants, at every return of ``reduce``:

- every trainable parameter was exchanged exactly once, at every bucket size, whether it was used on this rank or not;
- ``.grad`` holds the same bits on every rank; it is None where no rank has used the parameter (as in one process);
- or it has raised, on every rank alike: then ``.grad`` is None everywhere and no weight has changed.

Memory beyond the model, its gradients G (fp32) and the optimizer: G in CPU memory (also G for int8's error feedback),
and what ``summing`` states for the buckets in flight.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetdeploy.train import layout
from hetdeploy.train.buckets import Bucket, bucket_layout, plan_buckets
from hetdeploy.train.device import staging_for
from hetdeploy.train.errors import MisuseError, NonFiniteGradient, TrainError
from hetdeploy.train.metrics import StepRecord, as_number, covered
from hetdeploy.train.summing import Summed, Summer
from hetdeploy.train.wire import wire_format
from hetdeploy.train.world import EXCHANGE_TIMEOUT, World

MEBIBYTE = 1 << 20
NOBODY = -1


class AllReduce:
    """Hooks ``model``'s parameters; see the module's text for the loop around it.

    wire: "fp32", "bf16" or "int8" (wire.py states their errors). bucket_mb: fp32 size of a bucket; smaller ones
    overlap more and cost more rounds. overlap: False exchanges only inside ``reduce`` (to measure what overlapping is
    worth). align_every: compare a digest of the weights after that many steps and take rank 0's where they differ,
    because devices round differently; 0 never. timeout: how long to wait for the slowest rank.

    Raises LayoutMismatch on every rank if models or arguments differ, PeerLost if a rank does not come.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire: str = "fp32",
        bucket_mb: float = 16,
        overlap: bool = True,
        align_every: int = 500,
        timeout: datetime.timedelta = EXCHANGE_TIMEOUT,
        world: World | None = None,
    ) -> None:
        self.world = World.current() if world is None else world
        self.step = 0
        """Steps reduced so far; the one under way has this number."""
        self._model = model
        self._overlap = overlap
        self._align_every = align_every
        self._buckets = plan_buckets(model, int(bucket_mb * MEBIBYTE))
        self._names = [name for bucket in self._buckets for name in bucket.names]
        self._frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        if not self._buckets:
            raise MisuseError("the model has no trainable parameter", "check requires_grad")
        self._summer = Summer(self.world, wire_format(wire), "allreduce", timeout)
        if self.world.size > 1:
            lines = layout.describe(model, {"wire": wire, "align_every": align_every})
            # Last: where models differ, the first difference named is the parameter and not what follows from it.
            layout.compare(self._summer.group, [*lines, f"buckets = {bucket_layout(self._buckets)}"])
            layout.align(self._summer.group, model)
        self._staging = staging_for(self._buckets[0].parameters[0].device)
        feedback = self._summer.wire.feedback and self.world.size > 1
        self._flats = [self._staging.buffer(bucket.numel) for bucket in self._buckets]
        self._residuals = [torch.zeros(bucket.numel) if feedback else None for bucket in self._buckets]
        self._lock = threading.Lock()  # backward may run hooks in one thread for each device
        self._syncing = True
        self._fresh()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]
        self._left = time.perf_counter()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around every backward pass of a step but the last: gradients accumulate, nothing is exchanged."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def reduce(self, samples: float, loss: Tensor | float = 0.0) -> StepRecord:
        """Collective: turn every ``.grad`` into the mean over all ranks' samples. Call it once a step, on every rank.

        samples: how many samples (or tokens) this rank's losses were summed over since the last call; 0 is fine, also
        without any backward pass. loss: their sum, to be averaged alike into the record.

        Raises NonFiniteGradient (naming rank, parameter and step) or MisuseError on all ranks, PeerLost.
        """
        entered = time.perf_counter()
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        summed_loss = as_number(loss)
        headers = self._summer.gather(lambda: self._header(samples, summed_loss, entered - self._left)).result()
        exchanged = [future.result() for future in self._exchanges]
        rows = [_Header.unpack(header, len(self._used)) for header in headers]
        self._raise_together(rows)
        total = sum(row.samples for row in rows)
        used = torch.stack([row.used for row in rows]).any(dim=0).tolist()
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            self._store(bucket, flat.div_(total) if total else flat, used)
        record = self._record(rows, samples, total, entered, exchanged)
        self.step += 1
        self._fresh()
        if self._align_every and self.step % self._align_every == 0 and self.world.size > 1:
            # The weights before this step's update: whatever they have drifted apart by until now ends here.
            layout.align(self._summer.group, self._model)
        self._left = time.perf_counter()
        return record

    def state_dict(self) -> dict[str, Any]:
        """This rank's step and error feedback: CPU tensors and numbers."""
        return {"step": self.step, "residuals": [None if each is None else each.clone() for each in self._residuals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` returned on this rank. ``step`` must be the same on all ranks."""
        sizes = [None if residual is None else residual.numel() for residual in state["residuals"]]
        if sizes != [None if residual is None else residual.numel() for residual in self._residuals]:
            raise MisuseError("the saved error feedback has other buckets", "use the same model, wire and bucket_mb")
        self.step = state["step"]
        for mine, saved in zip(self._residuals, state["residuals"], strict=True):
            if mine is not None:
                mine.copy_(saved)

    def close(self) -> None:
        """Remove the hooks and end the threads."""
        for hook in self._hooks:
            hook.remove()
        self._summer.close()

    def _fresh(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._seen = [[False] * len(bucket.parameters) for bucket in self._buckets]
        self._used = torch.zeros(sum(self._missing), dtype=torch.bool)
        self._launched = 0
        self._exchanges: list[Future[Summed]] = []
        self._refused = NOBODY
        self._repeated = NOBODY

    def _hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        def accumulated(_parameter: Tensor) -> None:
            if not (self._syncing and self._overlap):
                return
            with self._lock:
                if self._seen[bucket.index][place]:
                    # A second backward pass of the step that was not under no_sync. Other ranks are waiting: tell them
                    # all.
                    self._repeated = self._position(bucket, place)
                    return
                self._seen[bucket.index][place] = True
                self._missing[bucket.index] -= 1
                # In order of index, on every rank: gloo matches exchanges by the order they are started in.
                while self._launched < len(self._buckets) and self._missing[self._launched] == 0:
                    self._launch(self._buckets[self._launched])

        return accumulated

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        flat = self._flats[bucket.index]
        for parameter in bucket.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        gradients = [parameter.grad for parameter in bucket.parameters]
        for place, gradient in enumerate(gradients):
            self._used[self._position(bucket, place)] = gradient is not None
        ready = self._staging.download(gradients, bucket.sizes, flat)

        def refuse(position: int) -> None:
            self._refused = self._names.index(bucket.name_at(position))

        self._exchanges.append(self._summer.add(flat, ready, self._residuals[bucket.index], refuse))

    def _position(self, bucket: Bucket, place: int) -> int:
        return sum(len(each.names) for each in self._buckets[: bucket.index]) + place

    def _header(self, samples: float, loss: float, computed: float) -> Tensor:
        unplanned = next((i for i, (_, each) in enumerate(self._frozen) if each.grad is not None), NOBODY)
        fields = (self.step, samples, loss, computed, self._refused, self._repeated, unplanned)
        return torch.cat([torch.tensor(fields, dtype=torch.float64).view(torch.uint8), self._used.view(torch.uint8)])

    def _raise_together(self, rows: list[_Header]) -> None:
        problem = next(filter(None, (self._problem(rank, row) for rank, row in enumerate(rows))), None)
        if problem is None:
            return
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        for residual in self._residuals:
            if residual is not None:
                residual.zero_()  # it belongs to a step that never was
        self.step += 1
        self._fresh()
        self._left = time.perf_counter()
        raise problem

    def _problem(self, rank: int, row: _Header) -> TrainError | None:
        if row.step != self.step:
            return MisuseError(f"rank {rank} is at step {row.step}, rank {self.world.rank} at step {self.step}")
        if row.refused != NOBODY:
            return NonFiniteGradient(rank, self._names[row.refused], self.step)
        if row.repeated != NOBODY:
            return MisuseError(
                f"{self._names[row.repeated]} got a gradient on rank {rank} at step {self.step} after it was exchanged",
                "wrap all backward passes of a step but the last in no_sync()",
            )
        if row.unplanned != NOBODY:
            return MisuseError(
                f"{self._frozen[row.unplanned][0]} was frozen and has a gradient on rank {rank} at step {self.step}",
                "make a new AllReduce after unfreezing",
            )
        return None

    def _store(self, bucket: Bucket, flat: Tensor, used: list[bool]) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._staging.upload(flat, [parameter.grad for parameter in bucket.parameters if parameter.grad is not None])
        for place, parameter in enumerate(bucket.parameters):
            if not used[self._position(bucket, place)]:
                parameter.grad = None

    def _record(
        self, rows: list[_Header], samples: float, total: float, entered: float, exchanged: list[Summed]
    ) -> StepRecord:
        now = time.perf_counter()
        blocked = now - entered
        computed = rows[self.world.rank].computed
        # All ranks leave a step together, so what the slowest computed longer is what this one waits for it.
        idle = min(max(row.computed for row in rows) - computed, blocked)
        exposed = blocked - idle
        hidden = covered([(each.copied, min(each.finished, entered)) for each in exchanged if each.copied < entered])
        return StepRecord(
            rank=self.world.rank,
            step=self.step,
            samples=samples,
            global_samples=total,
            loss=sum(row.loss for row in rows) / total if total else 0.0,
            compute_s=computed,
            copy_s=covered([(each.started, each.copied) for each in exchanged]),
            exchange_exposed_s=exposed,
            exchange_hidden_s=hidden,
            idle_s=idle,
            bytes_sent=sum(each.bytes_sent for each in exchanged),
            algorithm=",".join(sorted({each.algorithm for each in exchanged})),
        )


@dataclass(frozen=True)
class _Header:
    """What ranks tell each other at every step: float64 (whole numbers are exact up to 2**53), then which parameters
    were used.
    """

    step: int
    samples: float
    loss: float
    computed: float
    refused: int
    repeated: int
    unplanned: int
    used: Tensor

    @classmethod
    def unpack(cls, packed: Tensor, parameters: int) -> _Header:
        boundary = packed.numel() - parameters
        step, samples, loss, computed, *problems = packed[:boundary].clone().view(torch.float64).tolist()
        refused, repeated, unplanned = (int(problem) for problem in problems)
        used = packed[boundary:].bool()
        return cls(int(step), samples, loss, computed, refused, repeated, unplanned, used)
