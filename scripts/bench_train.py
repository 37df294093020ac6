#!/usr/bin/env python3
"""The pair against the leader alone: two ranks, one core each, the helper slowed down, the link shaped.

    sudo scripts/bench_train.py --k 1 2 4 8 --modes alone allreduce:bf16 assist:bf16 diloco:int8 --seeds 0 1 2
    scripts/bench_train.py --rate none                  # not root: both ranks on loopback, not shaped

A mode is NAME[:WIRE][:OPTION]: alone, ddp, allreduce (option ``late``: exchange after backward, not during), assist
(option ``bf16``: weights go down in bf16), diloco (option: seconds between two exchanges of a fragment). Every mode
trains the same GPT on the same text. All but diloco have the same global batch at every step, split between the ranks
by their speed. diloco has local steps of an eighth of it, which alone makes it learn more from a sample at first; so
it has to be compared with alone::local, the leader alone with such steps. The helper takes k times as long as its core
needs, by sleeping.

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
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from bench_train_rank import BUCKET_MB, FRAGMENTS, HELPER, LEADER, Run
from two_hosts import two_hosts

TIMEOUT_SECONDS = 3600.0
SMOOTHED_STEPS = 5
ADAM_STATE = 2.0
ALONE = ("alone", "alone:local")
TARGET_AT = 0.8
"""The target is the loss that the leader alone reaches after this part of its steps."""


def main() -> int:
    options = parse()
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
        for run in runs(options, address):
            results.append(measure(run, hosts))
            speed = results[-1]["throughput"]
            print(f"{run.name} k={run.k:g} seed={run.seed}: {speed:.2f} micro-batches/s", file=sys.stderr)
            if options.json:
                options.json.write_text(json.dumps({"rate": options.rate, "results": results}, indent=1) + "\n")
    compare(results)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps({"rate": options.rate, "results": results}, indent=1) + "\n")
    if options.png:
        draw(results, options.png)
    return 0


def runs(options: argparse.Namespace, store: str) -> Iterator[Run]:
    size = {name: getattr(options, name) for name in ("layers", "width", "context", "batch")}
    work = (options.steps, options.micro_batches, {**size, "heads": 8, "lr": 1e-3}, options.pretend)
    for seed in options.seeds:
        for mode, wire, option in options.modes:
            for k in options.k if mode != "alone" else options.k[:1]:
                yield Run(mode, wire, option, k, seed, *work, store)


def parse() -> argparse.Namespace:
    def mode(text: str) -> tuple[str, str, str]:
        name, wire, option = (text + "::").split(":")[:3]
        if name not in ("alone", "ddp", "allreduce", "assist", "diloco"):
            raise argparse.ArgumentTypeError(f"unknown mode {name}")
        return name, wire or "fp32", option

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    default = [
        "alone",
        "alone::local",
        "ddp",
        "allreduce:fp32",
        "allreduce:bf16",
        "allreduce:int8",
        "allreduce:bf16:late",
    ]
    default += ["allreduce:bf16:late", "assist:fp32", "assist:bf16", "assist:int8", "diloco:int8:8"]
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
    if ("alone", "fp32", "") not in options.modes:
        options.modes.insert(0, ("alone", "fp32", ""))
    return options


# --- one run: start the ranks, collect what they say ---


def measure(run: Run, hosts: Any) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("bench_train_rank.py"))]
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
    for base in alone.values():
        window = SMOOTHED_STEPS * base["samples"][0]
        smooth(base, window)
        target = base["smooth"][int(TARGET_AT * len(base["losses"])) - 1]
        for result in (each for each in results if each["seed"] == base["seed"]):
            smooth(result, window)
            result["memory"] = [each - base["grown"] for each in result["grown_by_rank"]]
            result["loss"] = result["smooth"][-1]
            result["gain"] = result["throughput"] / base["throughput"]
            result["target"] = target
            result["to_target"] = reached(result, target)
            if result["to_target"] is not None:
                result["time"] = result["to_target"] / reached(base, target)


def smooth(result: dict[str, Any], window: float) -> None:
    """Add the mean loss of the last ``window`` samples at each step: as many for every mode, whatever its batches."""
    result["smooth"] = []
    for end in range(1, len(result["losses"]) + 1):
        total = count = 0.0
        for loss, samples in zip(result["losses"][:end][::-1], result["samples"][:end][::-1], strict=True):
            total, count = total + loss * samples, count + samples
            if count >= window:
                break
        result["smooth"].append(total / count)


def reached(result: dict[str, Any], target: float) -> float | None:
    return next((at for at, loss in zip(result["times"], result["smooth"], strict=True) if loss <= target), None)


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
        rows.append((name, f"{k:g}" if name not in ALONE else "-", *numbers, *more, memory, bound))
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
    """Time to the target loss and throughput by k, and the losses of the first seed at the second k."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (time_axis, gain_axis, loss_axis) = pyplot.subplots(1, 3, figsize=(16, 5))
    ks = sorted({result["k"] for result in results})
    shown, seed = ks[min(1, len(ks) - 1)], results[0]["seed"]
    names = list(dict.fromkeys(result["run"] for result in results))
    modes = list(dict.fromkeys(name.split(":")[0] for name in names))
    for name in names:
        mode = name.split(":")[0]
        shade = sum(1 for other in names[: names.index(name)] if other.split(":")[0] == mode)
        style = {"color": f"C{modes.index(mode)}", "linestyle": ("-", "--", ":", "-.")[shade % 4]}
        same = [result for result in results if result["run"] == name]
        if name not in ALONE:
            for axis, key in ((time_axis, "time"), (gain_axis, "gain")):
                found = {k: [each[key] for each in same if each["k"] == k and key in each] for k in ks}
                points = [(k, statistics.fmean(values)) for k, values in found.items() if values]
                axis.plot(*zip(*points, strict=True), marker="o", label=name, **style)
        curve = [each for each in same if each["seed"] == seed and (mode == "alone" or each["k"] == shown)]
        for each in curve:
            loss_axis.plot(each["times"], each["smooth"], label=name, **style)
    for axis in (time_axis, gain_axis):
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xlabel="helper slower by k", xscale="log", xticks=ks, xticklabels=[f"{k:g}" for k in ks])
        axis.minorticks_off()
    time_axis.set(ylabel="time to the target loss / leader alone", title="below the line: faster than alone")
    gain_axis.set(ylabel="throughput / leader alone", title="above the line: more than alone")
    loss_axis.set(xlabel="seconds", ylabel="training loss", title=f"k = {shown:g}")
    loss_axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
