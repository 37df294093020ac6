"""The bridge tried on one machine: two ranks of this machine's torch, joined by it, one with the other system's face.

On Linux rank 1, behind the bridge, shows it the ``uv`` dialect of a Mac; on a Mac rank 1 is what it is, and rank 0
looks like a Linux rank. So a Mac proves its address layout, its loopback, the calls its gloo makes and the codec before
any other machine is involved. The parent needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hetdeploy.gloo.bridge import BridgeService
from hetdeploy.gloo.dialect import DIALECT_VARIABLE, LAYOUT_VARIABLE, Dialect, Layout, dialect_here
from hetdeploy.gloo.install import BRIDGE_VARIABLE, FACE_VARIABLE, JOB_VARIABLE, forward_master

DEADLINE = 60.0
"""Seconds for everything, torch's import on a cold disk included; a warm machine takes under ten."""

DIAL_TIMEOUT = 5.0
_SIZE = 2
_LARGE = 1_000_003


@dataclass(frozen=True)
class Report:
    """What was tried. ``problem`` is None when all of it was right."""

    torch: str
    layout: Layout
    checks: tuple[str, ...]
    seconds: float
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


def run(layout: Layout) -> Report:
    """Run both ranks and compare their answers. ``layout`` is that of the rank with the ``uv`` dialect.

    On macOS only Layout.DARWIN makes sense; on Linux either can be tried. A failure is in the report, never raised.
    """
    started = time.monotonic()
    bridge = BridgeService(_dial, Dialect.UV, node="selftest")
    bridge.start()
    ranks = [_Rank(number, bridge, layout) for number in range(_SIZE)]
    timer = threading.Timer(DEADLINE, _kill, ranks)
    timer.start()
    try:
        ranks[1].tell(str(ranks[0].read().get("port", "")))
        answers = [rank.read() for rank in ranks]
    finally:
        timer.cancel()
        for rank in ranks:
            rank.close()
        bridge.close()
    problems = [str(answer["problem"]) for answer in answers if "problem" in answer] + list(bridge.problems)
    return Report(
        torch=str(answers[1].get("torch", "")),
        layout=layout,
        checks=tuple(answers[1].get("checks", ())),
        seconds=time.monotonic() - started,
        problem="; ".join(problems) or None,
    )


class _Rank:
    """A rank as a process: it writes JSON objects, one a line, among whatever torch has to say."""

    def __init__(self, number: int, bridge: BridgeService, layout: Layout) -> None:
        self._number = number
        self._last_words = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(number)],
            env=_environment(number, bridge, layout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: what it said last is read below
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next object; one that names the problem where the rank ended instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
            self._last_words = line.strip() or self._last_words
        return {"problem": f"rank {self._number} ended ({self.process.wait()}): {self._last_words}"}

    def close(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def _kill(*ranks: _Rank) -> None:
    for rank in ranks:
        rank.process.kill()


def _environment(number: int, bridge: BridgeService, layout: Layout) -> dict[str, str]:
    ours = ("HETDEPLOY_", "GLOO_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ[JOB_VARIABLE] = "selftest"
    environ[LAYOUT_VARIABLE] = layout.value
    environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if number == 1:
        environ[BRIDGE_VARIABLE] = str(bridge.path)
    if dialect_here({}) is Dialect.UV and number == 0:
        environ[FACE_VARIABLE] = Dialect.TCP.value
    if dialect_here({}) is Dialect.TCP and number == 1:
        environ |= {FACE_VARIABLE: Dialect.UV.value, DIALECT_VARIABLE: Dialect.UV.value}
    return environ


def _dial(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=DIAL_TIMEOUT)


def _take_part(rank: int) -> None:
    """The ranks' side: a store, a group, some collectives with known answers."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=DEADLINE / 2)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        _say(port=store.port)
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.stdin.readline().strip()}
        forward_master(os.environ)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, wait_for_workers=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_SIZE, timeout=timeout)
    done: list[str] = []
    for name, check in _checks(rank):
        if not check():
            return _say(torch=torch.__version__, checks=done, problem=f"rank {rank} got a wrong answer from {name}")
        done.append(name)
    dist.barrier()
    dist.destroy_process_group()
    return _say(torch=torch.__version__, checks=done)


def _checks(rank: int) -> Iterator[tuple[str, Callable[[], bool]]]:
    import torch
    import torch.distributed as dist

    other = 1 - rank

    def all_reduce(count: int, group: dist.ProcessGroup | None = None) -> bool:
        tensor = torch.arange(count) % 1009 + rank
        dist.all_reduce(tensor, group=group)
        return torch.equal(tensor, 2 * (torch.arange(count) % 1009) + 1)

    def broadcast() -> bool:
        tensors = [torch.full((4099,), float(rank)) for _ in range(_SIZE)]
        for source, tensor in enumerate(tensors):
            dist.broadcast(tensor, source)
        return all(bool((tensor == source).all()) for source, tensor in enumerate(tensors))

    def all_gather_object() -> bool:
        got: list[Any] = [None] * _SIZE
        dist.all_gather_object(got, {"rank": rank, "text": "x" * 1000 * rank})
        return got == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x" * 1000}]

    def both_ways() -> bool:
        got, mine = torch.empty(_LARGE), torch.full((_LARGE,), float(rank))
        receiving, sending = dist.irecv(got, other), dist.isend(mine, other)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()
        return bool((got == other).all())

    def new_group() -> bool:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        right = all_reduce(4099, group)
        dist.destroy_process_group(group)
        return right

    for count in (1, 4099, _LARGE):
        yield f"all_reduce of {count}", lambda count=count: all_reduce(count)  # type: ignore[misc]
    yield "broadcast", broadcast
    yield "all_gather_object", all_gather_object
    yield "isend and irecv, both ways", both_ways
    yield "new_group", new_group


def _say(**fields: Any) -> None:
    # A line of its own, whatever torch wrote before.
    sys.stdout.write("\n" + json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _take_part(int(sys.argv[1]))
