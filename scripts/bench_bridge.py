#!/usr/bin/env python3
"""What the bridge costs: all_reduce between two hosts, with and without it, in one run.

    sudo scripts/bench_bridge.py [--rate RATE] [--megabytes N] [--rounds N] [--json FILE]

Two hosts on one machine (two_hosts.py), on a cable shaped to RATE. Five ways from rank 0 to rank 1 take turns, so that
whatever else the machine does meets all of them alike: two stock torch ranks by themselves, and a rank behind a bridge,
in each dialect, dialled directly and over the TLS link. The ``uv`` rank is gloo's real ``uv`` transport (pygloo) where
the interop tests have installed it, else a torch rank whose own process gives it a ``uv`` face.

MB/s is the tensor's size over the time of the all_reduce. "of stock" is the median of the rounds' ratios. A relay's CPU
seconds are per 10^9 bytes carried, an all_reduce of N bytes between two ranks being 2 N. Memory is the process's peak
beyond that of a Python that has imported nothing. All processes share one machine's cores here, both ends of the TLS
link among them, and two machines would not: on few cores and a fast cable that decides. An all_reduce fills the cable
in both directions; --one-way has a broadcast fill one, for half the work. Needs root, iproute2 and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from two_hosts import TwoHosts, clean_environment, two_hosts

from hetdeploy.errors import HetdeployError
from hetdeploy.link.credentials import JOINER, Credentials

SCHEMA_VERSION = 1
PARTS = Path(__file__).parent / "bench_bridge_parts.py"
PYGLOO = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hetdeploy-tests/pygloo-0.2.1/bin/python"
"""Where tests/interop installs it."""

STARTUP_SECONDS = 120.0
SLOWEST_MB_PER_SECOND = 5.0
"""A run that is slower than this on every all_reduce is given up."""

UNSHAPED = "none"
CARRIED = {"all_reduce": 2, "broadcast": 1}
"""Bytes between two ranks, both directions together, per byte of the tensor."""

TARGETS = {("uv-direct", "1gbit"): 0.97, ("uv-tls", "1gbit"): 0.95, ("uv-tls", "2500mbit"): 0.85}
"""The least ratio to the stock pair that the project sets itself, by way and rate."""
MEMORY_TARGET_MB = 64.0


@dataclass(frozen=True)
class Way:
    """A way from rank 0 to rank 1."""

    dialect: str
    link: str | None
    """``direct``, ``tls``, or None for no bridge at all."""

    @property
    def name(self) -> str:
        return f"{self.dialect}-{self.link}" if self.link else "stock"


WAYS = (Way("tcp", None), Way("tcp", "direct"), Way("uv", "direct"), Way("tcp", "tls"), Way("uv", "tls"))


@dataclass
class Relay:
    """A process that carries the bytes of one way."""

    part: str
    """``bridge`` (the joiner's member process) or ``server`` (the head's end of the link)."""
    pid: int
    cpu_seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the cable, as tc takes it, or `none` (default: 1gbit)")
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the tensor, 10^6 bytes (default: 100)")
    parser.add_argument("--rounds", type=int, default=11, help="how often each way has its turn (default: 11)")
    parser.add_argument("--face", action="store_true", help="no pygloo: a torch rank with a uv face instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument("--quick", action="store_true", help="small and short: that it works, not how fast")
    parser.add_argument("--one-way", action="store_true", help="a broadcast in place of the all_reduce")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.rounds = 4.0, 2
    # Ended by default, Python would leave the hosts and the processes behind.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit("stopped"))
    pygloo = str(PYGLOO) if PYGLOO.exists() and not options.face else ""
    try:
        with two_hosts(rate=None if options.rate == UNSHAPED else options.rate) as hosts:
            operation = "broadcast" if options.one_way else "all_reduce"
            result = Benchmark(hosts, operation, options.megabytes, options.rounds, pygloo).run(options.rate)
    except HetdeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


class Benchmark:
    def __init__(self, hosts: TwoHosts, operation: str, megabytes: float, rounds: int, pygloo: str) -> None:
        self._hosts = hosts
        self._operation = operation
        self._count = int(megabytes * 1e6 / 4)
        self._rounds = rounds
        self._pygloo = pygloo
        self._processes: list[subprocess.Popen[str]] = []
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._others: list[float] = []

    def run(self, rate: str) -> dict[str, Any]:
        """Raises HetdeployError when a process failed, a sum was wrong or a bridge had something to complain of."""
        bytes_in_all = self._count * 4 * len(WAYS) * (self._rounds + 1)
        deadline = threading.Timer(STARTUP_SECONDS + bytes_in_all / SLOWEST_MB_PER_SECOND / 1e6, self._kill)
        deadline.start()
        try:
            with tempfile.TemporaryDirectory(prefix="hetdeploy-bench-") as folder:
                relays = self._measure(Path(folder))
        finally:
            deadline.cancel()
            self._kill()
        return self._result(rate, relays)

    def _measure(self, folder: Path) -> dict[str, list[Relay]]:
        store = socket.create_server((self._hosts.head_address, 0))
        with store:  # torch's import takes long: the ranks come first
            ranks = [self._start("rank", "0", inherits=store), self._start("rank", "1", over_there=True)]
            found = {"store_port": store.getsockname()[1], "store_listener": store.fileno()}
        credentials = Credentials.create(folder, ttl_seconds=0)
        relays: dict[str, list[Relay]] = {}
        setups, members = [], []
        for way in WAYS:
            relays[way.name], code, bridge = [], [], ""
            if way.link == "tls":
                server = self._read(self._start("link", str(folder), self._hosts.head_address))
                relays[way.name].append(Relay("server", server["pid"]))
                code = [credentials.invitation(JOINER, self._hosts.head_address, server["port"]).encode()]
            if way.link:
                members.append(self._start("member", way.dialect, *code, over_there=True))
                said = self._read(members[-1])
                relays[way.name].insert(0, Relay("bridge", said["pid"]))
                bridge = said["bridge"]
            pids = [relay.pid for relay in relays[way.name]]
            setups.append({**asdict(way), "name": way.name, "bridge": bridge, "pids": pids})
        self._configure(ranks, {**found, "setups": setups})
        for _ in range(len(WAYS) * (self._rounds + 1)):
            self._take(self._read(ranks[0]), relays)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()
            if process.wait(STARTUP_SECONDS):
                raise HetdeployError("a rank failed", "see what it says above")
        for relay in (relay for among in relays.values() for relay in among):
            relay.peak_mb = peak_mb(relay.pid)
        for process in members:
            assert process.stdin is not None
            process.stdin.close()
            if problems := self._read(process)["problems"]:
                raise HetdeployError(f"a bridge complains: {problems[0]}")
        return relays

    def _configure(self, ranks: list[subprocess.Popen[str]], found: dict[str, Any]) -> None:
        config = {
            "head": self._hosts.head_address,
            "other": self._hosts.other_address,
            **found,
            "operation": self._operation,
            "count": self._count,
            "rounds": self._rounds,
            "pygloo": self._pygloo,
            "pids": [os.getpid(), *(process.pid for process in self._processes)],
        }
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(config) + "\n")
            process.stdin.flush()

    def _take(self, said: dict[str, Any], relays: dict[str, list[Relay]]) -> None:
        if said["turn"] == 0:
            return
        self._seconds[said["setup"]].append(said["seconds"])
        self._others.append(said["others"])
        for relay, seconds in zip(relays[said["setup"]], said["cpu"], strict=True):
            relay.cpu_seconds.append(seconds)

    def _result(self, rate: str, relays: dict[str, list[Relay]]) -> dict[str, Any]:
        bare, megabytes = bare_mb(), self._count * 4 / 1e6
        carried = CARRIED[self._operation] * megabytes / 1e3 * self._rounds
        ways = []
        for way in WAYS:
            seconds = self._seconds[way.name]
            ratios = [stock / own for stock, own in zip(self._seconds["stock"], seconds, strict=True)]
            ways.append(
                {
                    "name": way.name,
                    "mb_per_s": round(megabytes / statistics.median(seconds), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "target": TARGETS.get((way.name, rate)) if self._operation == "all_reduce" else None,
                    "relays": [
                        {
                            "part": relay.part,
                            "cpu_s_per_gb": round(sum(relay.cpu_seconds) / carried, 3),
                            "peak_mb_above_bare": round(relay.peak_mb - bare, 1),
                        }
                        for relay in relays[way.name]
                    ],
                }
            )
        return {
            "schema_version": SCHEMA_VERSION,
            "rate": rate,
            "operation": self._operation,
            "megabytes": megabytes,
            "rounds": self._rounds,
            "uv_rank": "pygloo 0.2.1, gloo's own uv transport" if self._pygloo else "torch behind a uv face",
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "others_cores": round(statistics.mean(self._others), 2),
            "bare_mb": round(bare, 1),
            "memory_target_mb": MEMORY_TARGET_MB,
            "ways": ways,
        }

    def _start(
        self, *arguments: str, over_there: bool = False, inherits: socket.socket | None = None
    ) -> subprocess.Popen[str]:
        command = [sys.executable, str(PARTS), *arguments]
        process: subprocess.Popen[str] = subprocess.Popen(
            self._hosts.command(*command) if over_there else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**clean_environment(), "OMP_NUM_THREADS": "1"},
            pass_fds=[inherits.fileno()] if inherits else [],
        )
        self._processes.append(process)
        return process

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The next object that a process prints, among whatever else it has to say."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise HetdeployError(
            f"a process of the benchmark has ended ({process.wait()}): {' '.join(map(str, process.args))}",
            "see what it says above; one that was killed (-9) took too long",
        )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def peak_mb(pid: int) -> float:
    """The most memory that a process has had resident, in 10^6 bytes."""
    return _peak_mb(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))


def bare_mb() -> float:
    """That of a Python that has imported nothing of its own accord."""
    own_status = "print(open('/proc/self/status').read())"
    return _peak_mb(
        subprocess.run([sys.executable, "-c", own_status], capture_output=True, text=True, check=True).stdout
    )


def _peak_mb(status: str) -> float:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['operation']} of {result['megabytes']:g} MB, cable {result['rate']}, {result['rounds']} rounds",
        f"uv rank: {result['uv_rank']}; {result['cores']} cores, of which others used {result['others_cores']}",
        "",
        f"{'way':11s} {'MB/s':>7s}  {'of stock':>8s}  {'(least, most)':14s}  target  "
        "relay: CPU s/GB, peak MB above a bare Python",
    ]
    for way in result["ways"]:
        least, most = way["ratio_range"]
        columns = [
            f"{way['name']:11s} {way['mb_per_s']:7.1f}  {way['ratio']:8.3f}",
            f"{f'({least:.3f}, {most:.3f})':14s}",
            f"{way['target'] or '':<6}",
            "; ".join(
                f"{relay['part']} {relay['cpu_s_per_gb']:.2f}, {relay['peak_mb_above_bare']:.0f}"
                for relay in way["relays"]
            ),
        ]
        lines.append("  ".join(columns).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
