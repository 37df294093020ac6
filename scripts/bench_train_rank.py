"""One rank of bench_train.py: a small GPT on real text, trained in one mode, on one core.

python bench_train_rank.py RANK RUN       # RUN: the fields of Run as JSON; prints what was measured as one line of JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from train_gpt import GPT, Size, load_text

from hetdeploy.train import AllReduce, Assist, Crew, DiLoCo, WeightedDDP, World
from hetdeploy.train.balance import Balancer, gather_seconds

LEADER, HELPER = 0, 1
WARM_UP_STEPS = 3
BUCKET_MB = 4
FRAGMENTS = 4
LOCAL_PARTS = 8
"""Of a global batch: one is what a local step of diloco takes."""


@dataclass(frozen=True)
class Run:
    mode: str
    wire: str
    option: str
    k: float
    seed: int
    steps: int
    micro_batches: int
    size: dict[str, Any]
    pretend: float
    store: str

    @property
    def name(self) -> str:
        return ":".join(
            part for part in (self.mode, self.wire if self.mode not in ("alone", "ddp") else "", self.option) if part
        )


class Rank:
    """Model, text, and the work of one micro-batch."""

    def __init__(self, rank: int, run: Run) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[rank]})
        torch.set_num_threads(1)
        torch.manual_seed(run.seed)
        self.rank = rank
        self.run = run
        self.slower = run.k if rank == HELPER else 1.0
        self.size = Size(**run.size)
        self.model = GPT(self.size)
        self.text = load_text(None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.size.lr)
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.losses: list[float] = []
        self.times: list[float] = []
        self.records: list[Any] = []
        self.busy = self.last_busy = 0.0
        self.began = time.perf_counter()

    def micro_batch(self, step: int, micro: int) -> tuple[Any, int]:
        """One backward pass over the ``micro``-th part of global batch ``step``: the loss's sum and its number of
        bytes.
        """
        if self.run.pretend:
            return self.pretend(), self.size.batch * self.size.context
        began = time.thread_time()  # of this thread's work alone: backward may wait for another rank in it
        loss, samples = self.loss(1_000_003 * (self.run.seed + 1) + 1009 * step + micro)
        time.sleep(self.last_busy * (self.slower - 1))  # before backward, in which gradients may leave
        loss.backward()
        self.last_busy = time.thread_time() - began
        self.busy += self.last_busy * self.slower
        return loss.detach(), samples

    def pretend(self) -> Any:
        self.busy += self.run.pretend * self.slower
        began = time.perf_counter()
        loss = torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum() * 0
        loss.backward()
        time.sleep(max(0.0, self.run.pretend * self.slower - (time.perf_counter() - began)))
        return loss.detach()

    def loss(self, seed: int) -> tuple[Any, int]:
        length = self.size.context
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.text) - length - 1, (self.size.batch,), generator=generator)
        block = torch.stack([self.text[i : i + length + 1] for i in starts.tolist()]).long()
        logits = self.model(block[:, :-1])
        targets = block[:, 1:].reshape(-1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()

    def start(self) -> None:
        self.began = time.perf_counter()

    def done(self, record: Any) -> None:
        self.times.append(time.perf_counter() - self.began)
        self.losses.append(record.loss)
        self.records.append(record)

    def apply(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, **more: Any) -> dict[str, Any]:
        with torch.no_grad():
            held = [self.loss(77_000_000_007 + i) for i in range(8)]
        sizes = [each.numel() for each in self.model.parameters()]
        parameters = sum(sizes)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before
        timed = self.records[WARM_UP_STEPS:]
        seconds = self.times[-1] - self.times[WARM_UP_STEPS - 1] if timed else 0.0
        said: dict[str, Any] = {
            "grown": grown * 1024 / (4 * parameters),
            "parameters": parameters,
            "largest": max(sizes) / parameters,
        }
        if timed:
            of_step = len(timed) / seconds
            per_micro = self.size.batch * self.size.context
            said |= {
                "throughput": sum(record.global_samples for record in timed) / per_micro / seconds,
                "waits": statistics.fmean(record.idle_s for record in timed) * of_step,
                "exposed": statistics.fmean(record.exchange_exposed_s for record in timed) * of_step,
                "hidden": statistics.fmean(record.exchange_hidden_s for record in timed) * of_step,
                "step_s": seconds / len(timed),
                "bytes": statistics.fmean(record.bytes_sent for record in timed),
                "losses": self.losses,
                "samples": [record.global_samples for record in self.records],
                "times": self.times,
                "held": float(sum(loss for loss, _ in held)) / sum(count for _, count in held),
            }
        return said | more


def rank_main(rank: int, run: Run) -> int:

    me = Rank(rank, run)
    host, port = run.store.split(":")
    key = f"{run.name}/{run.k}/{run.seed}"
    if run.mode == "alone":
        print(json.dumps(assist(me, None)))
        return 0
    store = dist.PrefixStore(key, dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False))
    if run.mode == "assist":
        print(json.dumps(assist(me, store)))
        return 0
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    print(json.dumps(diloco(me) if run.mode == "diloco" else symmetric(me)))
    dist.destroy_process_group()
    return 0


def assist(me: Rank, store: Any) -> dict[str, Any]:
    run = me.run
    crew = Crew(me.rank == LEADER, store)
    parts = LOCAL_PARTS if run.option == "local" else 1
    weights = run.option if run.option == "bf16" else "fp32"
    micro_batches = max(1, run.micro_batches // parts)
    with Assist(me.model, micro_batches=micro_batches, wire=run.wire, weights=weights, crew=crew) as together:
        if store is not None:
            together.wait_for(1)
        me.start()
        for step in together.steps(run.steps * parts):
            for micro in step:
                loss, samples = me.micro_batch(step.number, micro)
                step.count(samples, loss)
            record = step.reduce()
            if record is not None:
                me.apply()
                me.done(record)
        own, helpers = together.paces
    said = me.report()
    if own and helpers and helpers[0].per_micro:
        k, link, step_s = helpers[0].per_micro / own, helpers[0].link, said["step_s"]
        # What the leader spends in a step beside its micro-batches (the optimizer), it would spend alone too.
        mine = statistics.fmean(record.samples for record in me.records[WARM_UP_STEPS:])
        mine /= me.size.batch * me.size.context
        besides = step_s * (1 - said["waits"]) - mine * own
        alone = run.micro_batches / (run.micro_batches * own + besides)
        said |= {"own_s": own, "besides_s": besides, "measured_k": k, "link_s": link}
        said["formula"] = said["throughput"] / (alone * (1 + max(0.0, (1 / k) * (1 - link / step_s))))
    return said


def symmetric(me: Rank) -> dict[str, Any]:
    run = me.run
    sync: Any
    if run.mode == "ddp":
        sync = WeightedDDP(me.model)
        me.model = sync
    else:
        sync = AllReduce(me.model, wire=run.wire, overlap=run.option != "late", bucket_mb=BUCKET_MB)
    balancer = Balancer(2, run.micro_batches, least=1)
    group = World.current().open("balance")
    with sync.no_sync():
        _, _, seconds = work(me, sync, run.steps, range(1))  # how fast each rank is, before the first step
    me.optimizer.zero_grad()
    balancer.update([each * share for each, share in zip(gather_seconds(group, seconds), balancer.shares, strict=True)])
    me.start()
    for step in range(run.steps):
        leaders = balancer.shares[LEADER]
        mine = range(leaders) if me.rank == LEADER else range(leaders, run.micro_batches)
        total, count, seconds = work(me, sync, step, mine)
        record = sync.reduce(count, total)
        me.apply()
        me.done(record)
        balancer.update(gather_seconds(group, seconds))
    if run.mode == "ddp":
        me.model = sync.module
    return me.report()


def work(me: Rank, sync: Any, step: int, micros: range) -> tuple[Any, int, float]:
    """The loss's sum, the number of bytes and the seconds of these micro-batches; the last one starts the exchange."""
    me.busy = 0.0
    total, count = 0.0, 0
    for micro in micros:
        with contextlib.nullcontext() if micro == micros[-1] else sync.no_sync():
            loss, samples = me.micro_batch(step, micro)
        total, count = total + loss, count + samples
    return total, count, me.busy


def diloco(me: Rank) -> dict[str, Any]:
    """As many local steps as each rank can, of a part of the global batch each; an exchange takes the time of some
    steps.
    """
    run = me.run
    local = max(1, run.micro_batches // LOCAL_PARTS)
    every = timedelta(seconds=float(run.option or 10))
    sync = DiLoCo(me.model, every=every, fragments=FRAGMENTS, wire=run.wire)
    me.start()
    step, exchanges = 0, run.steps
    while sync.exchanges < exchanges:
        total, count = 0.0, 0
        for micro in range(local):
            loss, samples = me.micro_batch(2 * step + me.rank, micro)
            total, count = total + loss, count + samples
        for parameter in me.model.parameters():
            parameter.grad /= count
        me.apply()
        record = sync.step(count, total)
        if record is not None:
            me.done(record)
        step += 1
    sync.finish()
    return me.report(local_steps=step)


if __name__ == "__main__":
    sys.exit(rank_main(int(sys.argv[1]), Run(**json.loads(sys.argv[2]))))
