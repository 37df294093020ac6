#!/usr/bin/env python3
"""The pair against the leader alone: two ranks, one core each, the helper slowed down, the link shaped.

    sudo scripts/bench_train.py --k 1 2 4 8 --modes alone allreduce:bf16 assist:bf16 diloco:int8 --seeds 0 1 2
    scripts/bench_train.py --rate none                  # not root: both ranks on loopback, not shaped

A mode is NAME[:WIRE][:OPTION]: alone, ddp, allreduce (option ``late``: exchange after backward, not during), assist
(option ``bf16``: weights go down in bf16), diloco (option: seconds between two exchanges of a fragment). Every mode
trains the same GPT on the same text. All but diloco have the same global batch at every step, split between the ranks
by their speed. The helper takes k times as long as its core needs, by sleeping.

What the table says, warm-up left out:

mb/s      micro-batches per second
gain      the same over the leader alone with the same seed
formula   for assist: mb/s over the leader's own rate times 1 + (1/k)(1 - (U + D)/T), with that rate (optimizer too),
          k, U + D and T as measured in the same run: two ranks on one machine slow each other down
time      until the mean training loss of the last steps is below what the leader alone reaches after 0.8 of its
          steps, over the leader alone's time
waits     part of the leader's time in which it waits for the helper
exposed   part of the leader's time in which it exchanges and does nothing else
hidden    part of the leader's time in which it computes and an exchange goes on
loss      training loss of the last steps
held      loss on held-out batches with the final weights
memory    leader/helper: peak resident memory beyond that of the leader alone, over the gradients' fp32 size; a helper
          of assist has no optimizer state, which is twice that size
bound     what docs/training.md says it is at most

Writes everything as JSON with --json, prints the table, and draws a picture with --png if matplotlib is here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEADER, HELPER = 0, 1
TIMEOUT_SECONDS = 3600.0
WARM_UP_STEPS = 3
SMOOTHED_STEPS = 5
BUCKET_MB = 4
FRAGMENTS = 4
ADAM_STATE = 2.0
TARGET_AT = 0.8
"""The target is the loss that the leader alone reaches after this part of its steps."""


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


def main() -> int:
    options = parse()
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parent))
    from two_hosts import two_hosts

    shaped = options.rate != "none"
    if shaped and os.geteuid() != 0:
        print("error: a shaped link needs root: use sudo, or --rate none", file=sys.stderr)
        return 2
    # So that a benchmark that is stopped takes its ranks and its second host with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: list[dict[str, Any]] = []
    with two_hosts(rate=options.rate) if shaped else contextlib.nullcontext() as hosts:
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        address = f"{hosts.head_address if hosts else '127.0.0.1'}:{store.port}"
        for seed in options.seeds:
            for mode, wire, option in options.modes:
                for k in options.k if mode != "alone" else options.k[:1]:
                    size = {
                        "layers": options.layers,
                        "heads": 8,
                        "width": options.width,
                        "context": options.context,
                        "batch": options.batch,
                        "lr": 1e-3,
                    }
                    work = (options.steps, options.micro_batches, size, options.pretend)
                    run = Run(mode, wire, option, k, seed, *work, address)
                    results.append(measure(run, hosts))
                    print(
                        f"{run.name} k={k} seed={seed}: {results[-1]['throughput']:.2f} micro-batches/s",
                        file=sys.stderr,
                    )
    compare(results)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps({"rate": options.rate, "results": results}, indent=1) + "\n")
    if options.png:
        draw(results, options.png)
    return 0


def parse() -> argparse.Namespace:
    def mode(text: str) -> tuple[str, str, str]:
        name, wire, option = (text + "::").split(":")[:3]
        if name not in ("alone", "ddp", "allreduce", "assist", "diloco"):
            raise argparse.ArgumentTypeError(f"unknown mode {name}")
        return name, wire or "fp32", option

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    default = ["alone", "ddp", "allreduce:fp32", "allreduce:bf16", "allreduce:int8", "allreduce:bf16:late"]
    default += ["assist:fp32", "assist:bf16", "assist:int8", "diloco:int8:8"]
    parser.add_argument("--modes", type=mode, nargs="+", default=[mode(each) for each in default])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it, or none")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batches", type=int, default=32, help="in a global batch")
    parser.add_argument("--batch", type=int, default=1, help="texts in a micro-batch")
    parser.add_argument("--context", type=int, default=128, help="bytes of a text")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    pretend = "sleep so many seconds for each micro-batch instead of computing: what exchanges cost, on a busy machine"
    parser.add_argument("--pretend", type=float, default=0.0, help=pretend)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    if options.modes[0][0] != "alone":
        options.modes.insert(0, ("alone", "fp32", ""))
    return options


# --- one run: start the ranks, collect what they say ---


def measure(run: Run, hosts: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--rank"]
    ranks = [LEADER] if run.mode == "alone" else [LEADER, HELPER]
    processes = []
    for rank in ranks:
        arguments = [*command, str(rank), json.dumps(asdict(run))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if hosts:
            environment["GLOO_SOCKET_IFNAME"] = hosts.head_nic if rank == LEADER else hosts.other_nic
        if hosts and rank == HELPER:
            arguments = hosts.command(*arguments)
        processes.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"error: {run.name} k={run.k}: ranks ended with {[each.returncode for each in processes]}")
    ranks_said = [json.loads(each) for each in said]
    return {
        "run": run.name,
        "k": run.k,
        "seed": run.seed,
        **ranks_said[0],
        "grown_by_rank": [each["grown"] for each in ranks_said],
    }


def compare(results: list[dict[str, Any]]) -> None:
    """Add what is relative to the leader alone with the same seed."""
    alone = {result["seed"]: result for result in results if result["run"] == "alone"}
    for result in results:
        base = alone[result["seed"]]
        target = smoothed(base["losses"])[int(TARGET_AT * len(base["losses"])) - 1]
        result["memory"] = [each - base["grown"] for each in result["grown_by_rank"]]
        result["gain"] = result["throughput"] / base["throughput"]
        result["target"] = target
        result["to_target"] = reached(result, target)
        if result["to_target"] is not None:
            result["time"] = result["to_target"] / reached(base, target)


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, i + 1 - SMOOTHED_STEPS) : i + 1]) for i in range(len(losses))]


def reached(result: dict[str, Any], target: float) -> float | None:
    for at, loss in zip(result["times"], smoothed(result["losses"]), strict=True):
        if loss <= target:
            return at
    return None


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        (
            "mode",
            "k",
            "mb/s",
            "gain",
            "formula",
            "time",
            "waits",
            "exposed",
            "hidden",
            "loss",
            "held",
            "memory",
            "bound",
        )
    ]
    keys = list(dict.fromkeys((result["run"], result["k"]) for result in results))
    for name, k in keys:
        same = [result for result in results if (result["run"], result["k"]) == (name, k)]

        def mean(key: str, same: list[dict[str, Any]] = same, digits: int = 2) -> str:
            values = [result.get(key) for result in same]
            return "-" if any(value is None for value in values) else f"{statistics.fmean(values):.{digits}f}"

        memory = "/".join(f"{max(each):.1f}" for each in zip(*(result["memory"] for result in same), strict=True))
        numbers = (mean("throughput"), mean("gain"), mean("formula"), mean("time"), mean("waits", digits=3))
        more = (mean("exposed", digits=3), mean("hidden", digits=3), mean("loss", digits=4), mean("held", digits=4))
        bound = "/".join(f"{each:.1f}" for each in bounds(same[0])) or "-"
        rows.append((name, f"{k:g}" if name != "alone" else "-", *numbers, *more, memory, bound))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def bounds(result: dict[str, Any]) -> tuple[float, ...]:
    """The leader's and the helper's memory beyond the leader alone, over the gradients' fp32 size, as documented."""
    mode, wire, option = (result["run"] + "::").split(":")[:3]
    payload = {"fp32": 1.0, "bf16": 0.5, "int8": 0.27}.get(wire, 0.0)
    feedback = 1.0 if wire == "int8" else 0.0
    if mode == "allreduce":
        bucket = max(BUCKET_MB * 2**20 / (4 * result["parameters"]), result["largest"])
        return (1 + feedback + 3 * 2 * payload * bucket,) * 2
    if mode == "assist":
        weights = 1.5 if option == "bf16" else 1.0
        return 2 * weights + 1 + payload, weights + 1 + payload + 2 * feedback - ADAM_STATE
    return (4 + feedback + 2 * payload / FRAGMENTS,) * 2 if mode == "diloco" else ()


def draw(results: list[dict[str, Any]], output: Path) -> None:
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for name in dict.fromkeys(result["run"] for result in results):
        same = [result for result in results if result["run"] == name]
        ks = sorted({result["k"] for result in same})
        gains = [statistics.fmean(result["gain"] for result in same if result["k"] == k) for k in ks]
        left.plot(ks, gains, marker="o", label=name)
        first = same[0]
        right.plot(first["times"], smoothed(first["losses"]), label=f"{name} k={first['k']:g}")
    left.axhline(1.0, color="black", linewidth=0.5)
    left.set(xlabel="helper slower by k", ylabel="throughput over leader alone", xscale="log")
    right.set(xlabel="seconds", ylabel="training loss")
    left.legend()
    right.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)


# --- one rank ---


class Rank:
    """Model, text, and the work of one micro-batch."""

    def __init__(self, rank: int, run: Run) -> None:
        import torch

        sys.path.insert(0, str(Path(__file__).parent))
        from train_gpt import GPT, Size, load_text

        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[rank]})
        torch.set_num_threads(1)
        torch.manual_seed(run.seed)
        self.torch = torch
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
        self.began = time.perf_counter()

    def micro_batch(self, step: int, micro: int) -> tuple[Any, int]:
        """One backward pass over the ``micro``-th part of global batch ``step``: the loss's sum and its number of
        bytes.
        """
        if self.run.pretend:
            return self.pretend(), self.size.batch * self.size.context
        began = time.perf_counter()
        loss, samples = self.loss(1_000_003 * (self.run.seed + 1) + 1009 * step + micro)
        loss.backward()
        time.sleep((time.perf_counter() - began) * (self.slower - 1))
        return loss.detach(), samples

    def pretend(self) -> Any:
        began = time.perf_counter()
        loss = self.torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum() * 0
        loss.backward()
        time.sleep(max(0.0, self.run.pretend * self.slower - (time.perf_counter() - began)))
        return loss.detach()

    def loss(self, seed: int) -> tuple[Any, int]:
        torch, length = self.torch, self.size.context
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
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, **more: Any) -> dict[str, Any]:
        with self.torch.no_grad():
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
                "times": self.times,
                "loss": smoothed(self.losses)[-1],
                "held": float(sum(loss for loss, _ in held)) / sum(count for _, count in held),
            }
        return said | more


def rank_main(rank: int, run: Run) -> int:
    import torch.distributed as dist

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
    from hetdeploy.train import Assist, Crew

    run = me.run
    crew = Crew(me.rank == LEADER, store)
    weights = run.option or "fp32"
    with Assist(me.model, micro_batches=run.micro_batches, wire=run.wire, weights=weights, crew=crew) as together:
        if store is not None:
            together.wait_for(1)
        me.start()
        for step in together.steps(run.steps):
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
    from hetdeploy.train import AllReduce, WeightedDDP

    run = me.run
    theirs = max(1, round(run.micro_batches / (1 + run.k)))
    mine = (
        range(run.micro_batches - theirs) if me.rank == LEADER else range(run.micro_batches - theirs, run.micro_batches)
    )
    sync: Any
    if run.mode == "ddp":
        sync = WeightedDDP(me.model)
        me.model = sync
    else:
        sync = AllReduce(me.model, wire=run.wire, overlap=run.option != "late", bucket_mb=BUCKET_MB)
    me.start()
    for step in range(run.steps):
        total, count = 0.0, 0
        for micro in mine:
            with contextlib.nullcontext() if micro == mine[-1] else sync.no_sync():
                loss, samples = me.micro_batch(step, micro)
            total, count = total + loss, count + samples
        record = sync.reduce(count, total)
        me.apply()
        me.done(record)
    if run.mode == "ddp":
        me.model = sync.module
    return me.report()


def diloco(me: Rank) -> dict[str, Any]:
    """As many local steps as each rank can, with half the global batch each; an exchange takes the time of some
    steps.
    """
    from datetime import timedelta

    from hetdeploy.train import DiLoCo

    run = me.run
    local = max(1, run.micro_batches // 8)
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
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank_main(int(sys.argv[2]), Run(**json.loads(sys.argv[3]))))
    sys.exit(main())
