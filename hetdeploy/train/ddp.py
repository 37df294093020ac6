"""PyTorch's own DistributedDataParallel, where it is enough, with one normaliser instead of the mean of means.

Use it where every rank's device is one that DDP's backend takes (CPU ranks on gloo, CUDA ranks on NCCL) and every rank
has samples in every step. The loop is ``AllReduce``'s: losses are sums, ``no_sync`` around all backward passes but the
last, then ``reduce(samples=...)``. DDP divides by the number of ranks, which biases gradients towards the ranks with
smaller batches; here its communication hook sums, and ``reduce`` divides once by the number of samples of all ranks.

What DDP does not do and ``AllReduce`` does: ranks without samples, MPS, compression with error feedback.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hetdeploy.train import layout
from hetdeploy.train.errors import MisuseError, NonFiniteGradient
from hetdeploy.train.metrics import StepRecord, as_number
from hetdeploy.train.world import World

FINE = -1


class WeightedDDP(DistributedDataParallel):
    """DDP whose gradients are the mean over all ranks' samples after ``reduce``. ``options`` go to DDP as they are.

    Raises LayoutMismatch on every rank if models differ.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._world = World.current()
        if not dist.is_initialized():
            raise MisuseError(
                "DDP needs a process group", "start with torchrun, or use AllReduce, which trains alone too"
            )
        group = self._world.open("ddp")
        layout.compare(group, layout.describe(model, {"sync": "ddp"}))
        super().__init__(model, **options)
        self._counts = group
        self._largest: dict[str, Tensor] = {}
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._bytes = 0
        self.step = 0
        self._left = time.perf_counter()
        # Without annotations: DDP compares them with its own class, and here they are strings.
        self.register_comm_hook(None, lambda state, bucket: self._sum(bucket))

    def reduce(self, samples: float, loss: Tensor | float = 0.0) -> StepRecord:
        """Collective: turn every ``.grad`` into the mean over all ranks' samples. As ``AllReduce.reduce``."""
        entered = time.perf_counter()
        if not self._largest:
            raise MisuseError(
                f"rank {self._world.rank} had no backward pass in step {self.step}",
                "with DDP every rank needs one, outside no_sync; AllReduce takes ranks without samples",
            )
        names = list(self._names.values())
        bad = next((names.index(name) for name, norm in self._largest.items() if not bool(norm.isfinite())), FINE)
        row = torch.tensor([samples, as_number(loss), entered - self._left, bad], dtype=torch.float64)
        rows = torch.empty(self._world.size * row.numel(), dtype=torch.float64)
        self._counts.all_gather(rows, row).wait("comparing counts")
        table = rows.view(self._world.size, row.numel())
        record = self._record(table, samples, entered)
        self.step += 1
        self._largest = {}
        self._bytes = 0
        self._left = time.perf_counter()
        for rank, refused in enumerate(table[:, 3].int().tolist()):
            if refused != FINE:
                self.zero_grad(set_to_none=True)
                raise NonFiniteGradient(rank, names[refused], record.step)
        gradients = [parameter.grad for parameter in self._names if parameter.grad is not None]
        if gradients and record.global_samples:
            torch._foreach_div_(gradients, record.global_samples)
        return record

    def _sum(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        norms = torch._foreach_norm(bucket.gradients(), float("inf"))
        for parameter, norm in zip(bucket.parameters(), norms, strict=True):
            self._largest[self._names[parameter]] = norm
        # Zeros for all in place of NaN or Inf, decided on the device: asking for the answer here would stall backward.
        buffer.copy_(torch.where(torch.stack(norms).isfinite().all(), buffer, torch.zeros_like(buffer)))
        self._bytes += buffer.numel() * buffer.element_size()
        future = dist.all_reduce(buffer, group=self.process_group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def _record(self, table: Tensor, samples: float, entered: float) -> StepRecord:
        total, computed = float(table[:, 0].sum()), float(table[self._world.rank, 2])
        blocked = time.perf_counter() - entered
        return StepRecord(
            rank=self._world.rank,
            step=self.step,
            samples=samples,
            global_samples=total,
            loss=float(table[:, 1].sum()) / total if total else 0.0,
            # DDP exchanges inside backward and does not say for how long: that time counts as computing here.
            compute_s=computed,
            copy_s=0.0,
            exchange_exposed_s=blocked,
            exchange_hidden_s=0.0,
            idle_s=0.0,
            bytes_sent=2 * (self._world.size - 1) * self._bytes // self._world.size,
            algorithm="ddp",
        )
