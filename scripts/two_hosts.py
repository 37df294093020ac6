#!/usr/bin/env python3
"""A second machine on a LAN, made of one Linux machine: a network namespace behind a shaped cable.

    sudo scripts/two_hosts.py COMMAND [ARG ...]     run COMMAND on the second machine, then take it down again

The first machine is the root namespace. Needs root and iproute2. Also what the tests and benchmarks stand on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIGABIT = "1gbit"


@dataclass(frozen=True)
class TwoHosts:
    """The first machine's address and NIC, the second machine's, and how to run things over there."""

    namespace: str
    head_address: str
    head_nic: str
    other_address: str
    other_nic: str
    host_name: str

    def command(self, *arguments: str) -> list[str]:
        """``arguments`` as a command line that runs on the second machine, under a host name of its own."""
        script = 'hostname "$1" && shift && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", script, "sh", self.host_name, *arguments]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(*arguments), **options)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(self.command(*arguments), check=False, **options)

    def unplug(self) -> None:
        """Pull the cable."""
        _ip("link", "set", self.head_nic, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.head_nic, "up")


@contextmanager
def two_hosts(
    *, rate: str | None = GIGABIT, head: int = 1, other: int = 2, host_name: str = "mac", subnet: str | None = None
) -> Iterator[TwoHosts]:
    """Two hosts on a cable. ``head`` and ``other`` are the last numbers of their addresses; ``rate`` as tc takes it."""
    number = os.getpid() % 16_000
    subnet = subnet or f"10.{64 + number // 250}.{number % 250}"
    hosts = TwoHosts(
        namespace=f"hd{number}",
        head_address=f"{subnet}.{head}",
        head_nic=f"hd{number}a",
        other_address=f"{subnet}.{other}",
        other_nic="en0",
        host_name=host_name,
    )
    _ip("netns", "add", hosts.namespace)
    try:
        _ip("link", "add", hosts.head_nic, "type", "veth", "peer", "name", hosts.other_nic, "netns", hosts.namespace)
        _ip("addr", "add", f"{hosts.head_address}/24", "dev", hosts.head_nic)
        _ip("link", "set", hosts.head_nic, "up")
        inside = ("netns", "exec", hosts.namespace)
        _ip(*inside, "ip", "addr", "add", f"{hosts.other_address}/24", "dev", hosts.other_nic)
        _ip(*inside, "ip", "link", "set", hosts.other_nic, "up")
        _ip(*inside, "ip", "link", "set", "lo", "up")
        if rate is not None:
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run(["tc", "qdisc", "add", "dev", hosts.head_nic, *shape])
            _ip(*inside, "tc", "qdisc", "add", "dev", hosts.other_nic, *shape)
        yield hosts
    finally:
        # Whoever still runs over there would keep the namespace alive.
        listing = subprocess.run(["ip", "netns", "pids", hosts.namespace], capture_output=True, text=True, check=False)
        for pid in listing.stdout.split():
            subprocess.run(["kill", "-KILL", pid], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", hosts.head_nic], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", hosts.namespace], check=False)


def clean_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without settings of hetdeploy, for a machine of its own."""
    return {key: value for key, value in environ.items() if not key.startswith("HETDEPLOY_")}


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    with two_hosts() as hosts:
        print(
            f"head {hosts.head_address} on {hosts.head_nic}; {hosts.host_name} {hosts.other_address}", file=sys.stderr
        )
        return hosts.run(*sys.argv[1:], cwd=Path.cwd()).returncode


if __name__ == "__main__":
    sys.exit(main())
