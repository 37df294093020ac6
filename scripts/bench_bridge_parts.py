"""The processes of bench_bridge.py: two ranks, and what carries their bytes. Each talks JSON lines with the benchmark.

bench_bridge_parts.py link FOLDER ADDRESS         the head's link server
bench_bridge_parts.py member DIALECT [CODE]       what `hetdeploy join` is to its ranks; without CODE it dials directly
bench_bridge_parts.py rank NUMBER                 the configuration comes as a line on standard input
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=120)
DIAL_SECONDS = 10.0
LOOPBACK = "127.0.0.1"
PERIOD = 1009
"""The ranks' tensors repeat 0..1008, plus the rank: sums are exact in float32."""

PYGLOO_RANK = Path(__file__).parent / "bench_bridge_pygloo.py"


def link(folder: str, address: str) -> None:
    from hetdeploy.link.server import LinkServer

    server = LinkServer(Path(folder), (address, 0), Door())
    server.start()
    say(pid=os.getpid(), port=server.port)
    sys.stdin.read()
    server.close()


class Door:
    """The coordinator's part in the link: lets everybody in, and everywhere."""

    def admit(self, role: str, hello: dict[str, Any], peer: str) -> dict[str, Any]:
        return {}

    def connected(self, member: object) -> None:
        pass

    def message(self, member: object, msg: dict[str, Any]) -> None:
        pass

    def lost(self, member: object, reason: str) -> None:
        pass

    def dial_address(self, member: object, host: str, port: int) -> tuple[str, int]:
        return host, port

    def file(self, member: object, digest: str) -> Path:
        raise FileNotFoundError(digest)


def member(dialect: str, code: str = "") -> None:
    import hetdeploy.nodes.member  # noqa: F401 (what `hetdeploy join` imports: memory is measured here)
    from hetdeploy.gloo.bridge import BridgeService
    from hetdeploy.gloo.dialect import Dialect
    from hetdeploy.link.client import LinkClient
    from hetdeploy.link.invitation import Invitation

    with contextlib.ExitStack() as stack:
        dial: Callable[[str, int], socket.socket] = dial_directly
        if code:
            client = LinkClient.connect(Invitation.decode(code), "joiner", {})
            stack.callback(client.close)
            dial = client.dial
        bridge = BridgeService(dial, Dialect(dialect), node="bench")
        bridge.start()
        stack.callback(bridge.close)
        say(pid=os.getpid(), bridge=str(bridge.path))
        sys.stdin.read()
        say(problems=list(bridge.problems))


def dial_directly(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=DIAL_SECONDS)


def rank(number: str) -> None:
    import torch

    torch.set_num_threads(1)
    own = int(number)
    config = json.loads(sys.stdin.readline())
    store = open_store(own, config)
    with contextlib.ExitStack() as stack:
        pattern = (torch.arange(config["count"]) % PERIOD).float()
        parties = {setup["name"]: join(setup, own, config, store, pattern, stack) for setup in config["setups"]}
        ours = with_children(config["pids"])
        for turn, setup in schedule(config["setups"], config["rounds"]):
            started, before, others = time.perf_counter(), cpu_seconds(setup["pids"]), busy_seconds(ours)
            seconds = parties[setup["name"]]()
            others = (busy_seconds(ours) - others) / (time.perf_counter() - started)
            cpu = [late - early for early, late in zip(before, cpu_seconds(setup["pids"]), strict=True)]
            say(setup=setup["name"], turn=turn, seconds=seconds, cpu=cpu, others=others)
        sys.stdin.read()  # the other rank may still be looking at our CPU time


def schedule(setups: list[dict[str, Any]], rounds: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every setup once a round, there and back again, so that drift meets all alike. Round 0 warms up."""
    for turn in range(rounds + 1):
        for setup in setups if turn % 2 else reversed(setups):
            yield turn, setup


def open_store(own: int, config: dict[str, Any]) -> Any:
    from torch.distributed import TCPStore

    listening = {"is_master": True, "master_listen_fd": config["store_listener"]} if own == 0 else {}
    return TCPStore(config["head"], config["store_port"], wait_for_workers=False, timeout=TIMEOUT, **listening)


def join(
    setup: dict[str, Any],
    own: int,
    config: dict[str, Any],
    store: Any,
    pattern: Any,
    stack: contextlib.ExitStack,
) -> Callable[[], float]:
    """Form the group of one setup. Returns what performs a checked operation in it and tells its seconds."""
    import torch.distributed as dist

    from hetdeploy.gloo.control import BridgeClient
    from hetdeploy.gloo.dialect import Dialect, Layout
    from hetdeploy.gloo.face import MacFace
    from hetdeploy.gloo.store import BridgedStore

    given: Any = dist.PrefixStore(setup["name"], store)
    address = config["head"] if own == 0 else config["other"]
    if setup["link"] == "tls" or (own == 1 and setup["bridge"]):
        address = LOOPBACK
    if own == 1 and setup["bridge"]:
        dialect = Dialect(setup["dialect"])
        given = BridgedStore(given, own, 2, BridgeClient(setup["bridge"]), dialect, Layout.LINUX)
        stack.callback(given.close)
        if dialect is Dialect.UV and config["pygloo"]:
            return PyglooRank(config, own, given, stack).perform
        if dialect is Dialect.UV:
            given = MacFace(given, own, 2, Layout.LINUX)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    group = dist.ProcessGroupGloo(given, own, 2, options)
    return lambda: perform(config["operation"], group, own, pattern)


def perform(operation: str, group: Any, own: int, pattern: Any) -> float:
    """One checked ``operation``. Returns its seconds, until both ranks have what they should."""
    import torch

    tensor, gate = pattern + own, torch.zeros(1)
    group.allreduce([gate]).wait()  # both are here
    started = time.perf_counter()
    if operation == "broadcast":
        group.broadcast(tensor, 0).wait()
        group.allreduce([gate]).wait()  # a sender is done before its receiver
    else:
        group.allreduce([tensor]).wait()
    seconds = time.perf_counter() - started
    if not torch.equal(tensor, pattern if operation == "broadcast" else 2 * pattern + 1):
        sys.exit(f"rank {own} got a wrong result")
    return seconds


class PyglooRank:
    """A rank on gloo's real ``uv`` transport, in a process of its own, whose store calls are served here."""

    def __init__(self, config: dict[str, Any], own: int, store: Any, stack: contextlib.ExitStack) -> None:
        self._process = subprocess.Popen(
            [config["pygloo"], str(PYGLOO_RANK), str(own), str(config["count"]), LOOPBACK, config["operation"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._end)
        # torch puts the device's number before gloo's keys.
        while (words := self._read())[0] != "ready":
            self._tell(self._serve(store, words[0], [f"0/{word}" for word in words[1:]]))

    def perform(self) -> float:
        self._tell("go")
        return float(self._read()[1])

    def _serve(self, store: Any, call: str, arguments: list[str]) -> str:
        if call == "set":
            key, value = arguments
            store.set(key, bytes.fromhex(value.removeprefix("0/")))
            return "ok"
        if call == "get":
            return f"ok {store.get(arguments[0]).hex()}"
        store.wait(arguments, TIMEOUT)
        return "ok"

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split() or sys.exit("the pygloo rank has ended")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def cpu_seconds(pids: list[int]) -> list[float]:
    import psutil

    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def with_children(pids: list[int]) -> list[int]:
    import psutil

    return [*pids, *(child.pid for pid in pids[1:] for child in psutil.Process(pid).children())]


def busy_seconds(pids: list[int]) -> float:
    """CPU seconds of all processes of this machine but those of the benchmark (what interrupts took is nobody's)."""
    import psutil

    whole = psutil.cpu_times()
    return float(whole.user + whole.nice + whole.system) - sum(cpu_seconds(pids))


def say(**fields: Any) -> None:
    # A line of its own, whatever torch wrote before.
    sys.stdout.write("\n" + json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"link": link, "member": member, "rank": rank}[sys.argv[1]](*sys.argv[2:])
