#!/usr/bin/env python3
"""Mixed traffic through the bridge for as long as is asked: whether every answer is right, and whether anything grows.

    scripts/soak_bridge.py SECONDS [--layout linux|darwin] [--pause SECONDS] [--json FILE]

A stock torch rank and one with a Mac's face make and destroy groups, up to three at a time, the default group among
them, and check the answers of random operations on random sizes, some of them in flight in both directions at once.
As in a job the bridge is in the joiner's own process, which knows no torch, and all goes over the TLS link to the
head's. The sequence is the same in every run. The store, which keeps a few hundred bytes of every group that there
ever was, is this process's.

Memory (resident), descriptors and threads of all four processes are read once a second (oftener in a short run). After
a warm-up of a tenth of the time, the rest's second half is compared with its first, by the lower quartiles: that is
what is held while few groups are open. Ends with 1 if something grew by more than the tolerances below, if an answer
was wrong or if the bridge complained. The ranks' malloc is told to give large blocks back at once: left to itself glibc
keeps what tensors of random sizes leave behind, and a stock pair without any bridge swells by 100 MB and more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hetdeploy.link.credentials import JOINER, Credentials

SCHEMA_VERSION = 1
SEED = 7
SIZE = 2
MEMORY_TOLERANCE_MB = 4.0
COUNT_TOLERANCE = 9
"""Descriptors or threads: at most what one open group holds in a process. A run makes hundreds."""

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc's; other systems do not look at it."""

WARM_UP = 0.1
"""Of the whole time: caches fill, allocators find their size."""

SAMPLE_SECONDS = 1.0
LEAST_SAMPLES = 60
MINUTE = 60.0
DEADLINE_SECONDS = 120.0
"""To start, to get on by one group, and to end."""

GROUPS_PER_DEFAULT = 10
MOST_OPERATIONS = 6
IN_FLIGHT = 6
PERIOD = 101
"""Tensors repeat 0..100: sums of two are exact in every dtype here."""

RENDEZVOUS, BRIDGE, RANKS = "head's link", "bridge", ("rank 0", "rank 1 (Mac)")
PARTS = Path(__file__).parent / "bench_bridge_parts.py"
MEMBER = (sys.executable, str(PARTS), "member")


@dataclass(frozen=True)
class Reading:
    """What one process holds at one moment."""

    memory_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """Everything at ``seconds`` after the start; ``readings`` by the process's name."""

    seconds: float
    groups: int
    operations: int
    megabytes: float
    readings: dict[str, Reading]


@dataclass(frozen=True)
class Comparison:
    """One quantity of one process in the first half and in the second."""

    process: str
    quantity: str
    first: float
    second: float
    tolerance: float

    @property
    def grows(self) -> bool:
        return self.second > self.first + self.tolerance


def main(arguments: Sequence[str] | None = None, member: Sequence[str] = MEMBER) -> int:
    """``member``: the command of the bridge's process; the dialect and the join code are added."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, metavar="SECONDS")
    parser.add_argument("--layout", choices=("linux", "darwin"), default="darwin", help="of the Mac's addresses")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each round (default: 0)")
    parser.add_argument("--largest", type=float, default=8.0, metavar="MB", help="tensor, 10^6 bytes (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args(arguments)
    soak = Soak(options.seconds)
    try:
        with soak.processes(options.layout, options.largest, options.pause, member):
            soak.watch()
    except Trouble as trouble:
        soak.problems.append(str(trouble))
    comparisons = compare(soak.samples)
    is_good = not soak.problems and bool(comparisons) and not any(comparison.grows for comparison in comparisons)
    if options.json:
        result = {
            "schema": SCHEMA_VERSION,
            "seconds": options.seconds,
            "layout": options.layout,
            "pause": options.pause,
            "largest_mb": options.largest,
            "cores_used": soak.cores_used,
            "minutes": minutes(soak.samples),
            "comparisons": [{**asdict(comparison), "grows": comparison.grows} for comparison in comparisons],
            "problems": soak.problems,
            "ok": is_good,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(soak.samples))
    print(verdict(comparisons, soak.problems))
    print(f"All of it took {soak.cores_used:.2f} of a core.")
    return 0 if is_good else 1


class Trouble(Exception):
    """A process failed or stands still."""


class Soak:
    """The processes of one run, and what was seen of them."""

    def __init__(self, seconds: float) -> None:
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.cores_used = 0.0
        self._seconds = seconds
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._said: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    @contextlib.contextmanager
    def processes(self, layout: str, largest: float, pause: float, member: Sequence[str]) -> Iterator[None]:
        """The head's end of the link, the joiner's with its bridge, and both ranks. Raises Trouble."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory(prefix="hetdeploy-soak-") as folder:
            credentials = Credentials.create(Path(folder), ttl_seconds=0)
            try:
                self._start(RENDEZVOUS, [sys.executable, str(PARTS), "link", folder, "127.0.0.1"])
                code = credentials.invitation(JOINER, "127.0.0.1", self._next()[1]["port"]).encode()
                self._start(BRIDGE, [*member, "uv", code])
                path = self._next()[1]["bridge"]
                for number, name in enumerate(RANKS):
                    command = [sys.executable, __file__, "rank", str(self._seconds), str(largest), str(pause)]
                    self._start(name, command, _environment(number, store.port, path, layout))
                yield
                self._end()
            finally:
                for process in self._processes.values():
                    process.kill()
                    process.wait()
                for thread in self._readers:
                    thread.join()

    def watch(self) -> None:
        """Read what the processes hold until rank 0 says that the time is over. Raises Trouble."""
        while "ready" not in self._next()[1]:
            pass
        started, cpu = time.monotonic(), self._cpu_seconds()
        every = min(SAMPLE_SECONDS, self._seconds / LEAST_SAMPLES)
        done: dict[str, Any] = {"groups": 0, "operations": 0, "megabytes": 0.0}
        heard = started
        while "over" not in done:
            now = time.monotonic()
            due = started + every * (len(self.samples) + 1)
            if now < due:
                with contextlib.suppress(queue.Empty):
                    name, said = self._take(due - now)
                    heard = time.monotonic()
                    done |= said if name == RANKS[0] else {}
                    continue
            if now > heard + DEADLINE_SECONDS:
                raise Trouble(f"nothing got on for {DEADLINE_SECONDS:g} s, after {done['groups']} groups")
            readings = {name: _read(process.pid) for name, process in self._processes.items()}
            counts = (done["groups"], done["operations"], done["megabytes"])
            self.samples.append(Sample(time.monotonic() - started, *counts, readings))
            self.cores_used = (self._cpu_seconds() - cpu) / (time.monotonic() - started)

    def _start(self, name: str, command: Sequence[str], environ: dict[str, str] | None = None) -> None:
        process = subprocess.Popen(
            command,
            env=environ or _clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes[name] = process
        self._readers.append(threading.Thread(target=self._listen, args=(name, process), daemon=True))
        self._readers[-1].start()

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        """Take the objects that a process prints, one a line, among whatever else it has to say."""
        assert process.stdin is not None
        assert process.stdout is not None
        last = ""
        with process.stdout, process.stdin:
            for line in process.stdout:
                if line.startswith("{"):
                    self._said.put((name, json.loads(line)))
                last = line.strip() or last
        self._said.put((name, {"ended": process.wait(), "last": last}))

    def _next(self) -> tuple[str, dict[str, Any]]:
        try:
            return self._take(DEADLINE_SECONDS)
        except queue.Empty:
            raise Trouble(f"a process has said nothing for {DEADLINE_SECONDS:g} s") from None

    def _take(self, seconds: float) -> tuple[str, dict[str, Any]]:
        """What was said next, and by whom. Raises queue.Empty, or Trouble if it is bad news."""
        name, said = self._said.get(timeout=seconds)
        if problem := said.get("problem"):
            raise Trouble(f"{name}: {problem}")
        if said.get("ended"):
            raise Trouble(f"{name} ended with {said['ended']}: {said['last']}")
        return name, said

    def _end(self) -> None:
        """Let everything end by itself, the ranks first. Raises Trouble."""
        running = set(RANKS)
        while running:
            name, said = self._next()
            running -= {name} if "ended" in said else set()
        for name in (BRIDGE, RENDEZVOUS):
            stdin = self._processes[name].stdin
            assert stdin is not None
            stdin.close()
            said = {}
            while "ended" not in said:
                _, said = self._next()
                self.problems += said.get("problems", [])

    def _cpu_seconds(self) -> float:
        processes = [psutil.Process(), *(psutil.Process(process.pid) for process in self._processes.values())]
        return sum(sum(process.cpu_times()[:2]) for process in processes)


def _read(pid: int) -> Reading:
    process = psutil.Process(pid)
    try:
        with process.oneshot():
            return Reading(process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())
    except psutil.Error as error:
        raise Trouble(f"a process is gone: {error}") from None


def _clean_environment() -> dict[str, str]:
    ours = ("HETDEPLOY_", "GLOO_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _environment(number: int, store_port: int, bridge: str, layout: str) -> dict[str, str]:
    environ = _clean_environment() | MALLOC
    environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "HETDEPLOY_JOB": "soak",
    }
    mac = {"HETDEPLOY_BRIDGE": bridge, "HETDEPLOY_DIALECT": "uv", "HETDEPLOY_FACE": "uv", "HETDEPLOY_SOCKADDR": layout}
    return environ | mac if number == 1 else environ


# -- what came of it


def compare(samples: Sequence[Sample]) -> list[Comparison]:
    """The second half beside the first, by process and quantity; nothing if there are no samples of one."""
    if not samples:
        return []
    begin, end = samples[-1].seconds * WARM_UP, samples[-1].seconds
    first = [sample.readings for sample in samples if begin < sample.seconds <= (begin + end) / 2]
    second = [sample.readings for sample in samples if sample.seconds > (begin + end) / 2]
    if not first:
        return []
    comparisons = []
    quantities = (
        ("memory_mb", "memory, MB", MEMORY_TOLERANCE_MB),
        ("descriptors", "descriptors", COUNT_TOLERANCE),
        ("threads", "threads", COUNT_TOLERANCE),
    )
    for name in first[0]:
        for attribute, quantity, tolerance in quantities:
            halves = [_quartile([getattr(readings[name], attribute) for readings in half]) for half in (first, second)]
            comparisons.append(Comparison(name, quantity, *halves, tolerance))
    return comparisons


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def minutes(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What happened in each minute; of what is held, the lower quartile of memory and the range of the counts."""
    rows = []
    before = Sample(0.0, 0, 0, 0.0, {})
    for minute in range(math.ceil(samples[-1].seconds / MINUTE) if samples else 0):
        among = [sample for sample in samples if minute * MINUTE < sample.seconds <= (minute + 1) * MINUTE]
        if not among:
            continue
        row: dict[str, Any] = {
            "minute": minute + 1,
            "groups": among[-1].groups - before.groups,
            "operations": among[-1].operations - before.operations,
            "megabytes": among[-1].megabytes - before.megabytes,
            "processes": {},
        }
        for name in among[0].readings:
            readings = [sample.readings[name] for sample in among]
            descriptors, threads = [r.descriptors for r in readings], [r.threads for r in readings]
            row["processes"][name] = {
                "memory_mb": _quartile([reading.memory_mb for reading in readings]),
                "descriptors": [min(descriptors), max(descriptors)],
                "threads": [min(threads), max(threads)],
            }
        rows.append(row)
        before = among[-1]
    return rows


def table(samples: Sequence[Sample]) -> str:
    names = (BRIDGE, RENDEZVOUS, *RANKS)
    lines = [
        " " * 30 + "".join(f" | {name:^20}" for name in names),
        "minute groups operations    MB" + " | MB RSS   desc thread" * len(names),
    ]
    for row in minutes(samples):
        line = f"{row['minute']:6} {row['groups']:6} {row['operations']:10} {row['megabytes']:5.0f}"
        for name in names:
            held = row["processes"][name]
            line += f" | {held['memory_mb']:6.1f} {_range(held['descriptors']):>6} {_range(held['threads']):>6}"
        lines.append(line)
    if samples:
        last = samples[-1]
        lines.append(f"   all {last.groups:6} {last.operations:10} {last.megabytes:5.0f}")
    return "\n".join(lines)


def verdict(comparisons: Sequence[Comparison], problems: Sequence[str]) -> str:
    lines = []
    for comparison in comparisons:
        change = comparison.second - comparison.first
        word = "GROWS" if comparison.grows else "flat"
        halves = f"{comparison.first:.1f}, then {comparison.second:.1f} ({change:+.1f})"
        lines.append(f"{word:5} {comparison.process}: {comparison.quantity} {halves}")
    lines += [f"WRONG {problem}" for problem in problems]
    growing = sum(comparison.grows for comparison in comparisons)
    tolerances = f"tolerances: {MEMORY_TOLERANCE_MB:g} MB, {COUNT_TOLERANCE} descriptors or threads"
    if not comparisons:
        lines.append("Verdict: too short to compare two halves.")
    elif growing or problems:
        lines.append(f"Verdict: {growing} quantities grew, {len(problems)} problems ({tolerances}).")
    else:
        lines.append(f"Verdict: flat, and every answer right ({tolerances}).")
    return "\n".join(lines)


def _range(bounds: Sequence[int]) -> str:
    return "-".join(str(bound) for bound in sorted(set(bounds)))


# -- the ranks' side


def take_part(seconds: float, largest: float, pause: float) -> None:
    """Rank 0 decides when it is over; all else follows from the seed, on both alike."""
    torch.set_num_threads(1)
    traffic = Traffic(largest)
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_SECONDS / 2))
    _say(ready=True)
    end = time.monotonic() + seconds
    for round_number in range(sys.maxsize):
        goes_on = torch.tensor([int(time.monotonic() < end)])
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
        if round_number % GROUPS_PER_DEFAULT == GROUPS_PER_DEFAULT - 1:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_SECONDS / 2))
            traffic.groups += 1
        if problem := traffic.round():
            return _say(problem=problem)
        _say(groups=traffic.groups, operations=traffic.operations, megabytes=traffic.bytes / 1e6)
        if dist.get_rank() == 0:
            time.sleep(pause)
    _say(over=True)
    dist.barrier()
    return dist.destroy_process_group()


class Traffic:
    """Random operations with answers that both ranks know."""

    def __init__(self, largest: float) -> None:
        self.groups = self.operations = self.bytes = 0
        self._rank = int(os.environ["RANK"])
        self._order = random.Random(SEED)
        self._largest = int(largest * 1e6)
        self._checks = (
            self._all_reduce,
            self._broadcast,
            self._reduce,
            self._all_gather,
            self._scatter_and_gather,
            self._all_to_all,
            self._objects,
            self._in_flight,
            self._in_flight,
        )

    def round(self) -> str | None:
        """Make some groups, use them and destroy them. Returns what was wrong, or None."""
        groups = [dist.new_group() for _ in range(self._order.choice((1, 1, 2, 3)))]
        for _ in range(self._order.randint(1, MOST_OPERATIONS)):
            check = self._order.choice(self._checks)
            if not check(self._order.choice([*groups, dist.group.WORLD])):
                return f"a wrong answer from {check.__name__.strip('_')}, in group {self.groups} and those beside it"
        self._order.shuffle(groups)
        for group in groups:
            dist.barrier(group)
            dist.destroy_process_group(group)
        self.groups += len(groups)
        return None

    def _pattern(self, shift: int, like: Any) -> Any:
        return ((torch.arange(like.numel(), dtype=torch.int32) + shift) % PERIOD).to(like.dtype)

    def _blank(self) -> tuple[Any, int]:
        """A tensor of a random size and dtype, and the number from which both ranks' patterns follow."""
        dtypes = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
        dtype = self._order.choice(dtypes)
        nbytes = 4 * math.exp(self._order.uniform(0, math.log(self._largest / 4)))
        blank = torch.zeros(max(1, int(nbytes) // dtype.itemsize), dtype=dtype)
        self.operations += 1
        self.bytes += blank.nbytes
        return blank, self._order.randrange(PERIOD)

    def _all_reduce(self, group: Any) -> bool:
        blank, shift = self._blank()
        tensor = self._pattern(shift + self._rank, blank)
        dist.all_reduce(tensor, group=group)
        return bool((tensor == self._pattern(shift, blank) + self._pattern(shift + 1, blank)).all())

    def _broadcast(self, group: Any) -> bool:
        blank, shift = self._blank()
        source = self._order.randrange(SIZE)
        tensor = self._pattern(shift, blank) if self._rank == source else blank
        dist.broadcast(tensor, source, group=group)
        return bool((tensor == self._pattern(shift, blank)).all())

    def _reduce(self, group: Any) -> bool:
        blank, shift = self._blank()
        target = self._order.randrange(SIZE)
        tensor = self._pattern(shift + self._rank, blank)
        dist.reduce(tensor, target, group=group)
        total = self._pattern(shift, blank) + self._pattern(shift + 1, blank)
        return self._rank != target or bool((tensor == total).all())

    def _all_gather(self, group: Any) -> bool:
        blank, shift = self._blank()
        got = [blank.clone() for _ in range(SIZE)]
        dist.all_gather(got, self._pattern(shift + self._rank, blank), group=group)
        return all(bool((tensor == self._pattern(shift + rank, blank)).all()) for rank, tensor in enumerate(got))

    def _scatter_and_gather(self, group: Any) -> bool:
        blank, shift = self._blank()
        root = self._order.randrange(SIZE)
        pieces = [self._pattern(shift + rank, blank) for rank in range(SIZE)]
        piece = blank.clone()
        dist.scatter(piece, pieces if self._rank == root else None, src=root, group=group)
        got = [blank.clone() for _ in range(SIZE)] if self._rank == root else None
        dist.gather(piece, got, dst=root, group=group)
        mine = bool((piece == pieces[self._rank]).all())
        return mine and all(bool((one == right).all()) for one, right in zip(got or pieces, pieces, strict=True))

    def _all_to_all(self, group: Any) -> bool:
        blank, shift = self._blank()
        mine = [self._pattern(shift + SIZE * self._rank + other, blank) for other in range(SIZE)]
        got = torch.cat([blank] * SIZE)
        dist.all_to_all_single(got, torch.cat(mine), group=group)
        expected = [self._pattern(shift + SIZE * other + self._rank, blank) for other in range(SIZE)]
        return bool((got == torch.cat(expected)).all())

    def _objects(self, group: Any) -> bool:
        expected = [{"rank": rank, "text": "x" * self._order.randrange(10_000)} for rank in range(SIZE)]
        self.operations += 1
        got: list[Any] = [None] * SIZE
        dist.all_gather_object(got, expected[self._rank], group=group)
        return got == expected

    def _in_flight(self, group: Any) -> bool:
        """Messages in both directions and reductions, all of them under way before the first is waited for."""
        works, rights = [], []
        for tag in range(self._order.randint(2, IN_FLIGHT)):
            blank, shift = self._blank()
            if self._order.random() < 0.5:
                works.append(dist.isend(self._pattern(shift + self._rank, blank), 1 - self._rank, group, tag))
                works.append(dist.irecv(blank, 1 - self._rank, group, tag))
                rights.append((blank, self._pattern(shift + 1 - self._rank, blank)))
            else:
                total = self._pattern(shift, blank) + self._pattern(shift + 1, blank)
                tensor = self._pattern(shift + self._rank, blank)
                works.append(dist.all_reduce(tensor, group=group, async_op=True))
                rights.append((tensor, total))
        self._order.shuffle(works)
        for work in works:
            work.wait()
        return all(bool((got == right).all()) for got, right in rights)


def _say(**fields: Any) -> None:
    # A line of its own, whatever torch wrote before.
    sys.stdout.write("\n" + json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        take_part(*map(float, sys.argv[2:]))
    else:
        sys.exit(main())
