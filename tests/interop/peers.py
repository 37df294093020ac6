"""Runs groups of real gloo ranks, each a process of its own, some of them behind the real store wrapper and bridge."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hetdeploy.gloo.bridge import MEETING_PREFIX, BridgeService
from hetdeploy.gloo.control import BridgeClient
from hetdeploy.gloo.dialect import Dialect, Layout
from hetdeploy.gloo.store import BridgedStore, PassingStore
from hetdeploy.gloo.wire import DATA, HEADER_BYTES, Header
from hetdeploy.link.relay import Relay

HERE = Path(__file__).parent
COLLECTIVES = HERE.parents[1] / "scripts" / "check_collectives.py"
LARGEST_BYTES = int(os.environ.get("HETDEPLOY_TEST_MAX_MB", "64")) * 1_000_000
DEADLINE_SECONDS = 150
GRACE_SECONDS = 20
"""For the ranks that outlive a failed one to say what they saw of it."""
PYGLOO = "pygloo==0.2.1"
PYGLOO_SEND_PREFIX = 0x09


@dataclass
class Result:
    """How the ranks of a group ended."""

    codes: list[int]
    outputs: list[str]
    problems: list[str]

    def check(self) -> None:
        said = "\n".join([*self.outputs, *self.problems])
        assert self.codes == [0] * len(self.codes), said
        assert not self.problems, said


def plain_dial(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=5)


@dataclass
class Job:
    """A store and the bridges of its joiners; ranks are started one by one and waited for together."""

    size: int
    store: dist.TCPStore = field(init=False)
    bridges: list[BridgeService] = field(default_factory=list)
    ranks: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def __enter__(self) -> Job:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for bridge in self.bridges:
            bridge.close()

    def group_store(self) -> dist.PrefixStore:
        """The group's part of the store, by a connection of its own: a client serves one waiting caller at a time."""
        client = dist.TCPStore("127.0.0.1", self.store.port, wait_for_workers=False, timeout=timedelta(seconds=60))
        return dist.PrefixStore("group", client)

    def bridge(self, dialect: Dialect, node: str = "mac", dial=plain_dial) -> BridgeService:
        """The bridge of one more joiner; it reaches the other joiners of this job by name, the rest with ``dial``."""

        def reach(host: str, port: int) -> socket.socket:
            return self._meet(host) if host.startswith(MEETING_PREFIX) else dial(host, port)

        service = BridgeService(reach, dialect, node=node)
        service.start()
        self.bridges.append(service)
        return service

    def start(self, rank: int, *command: str, **environ: str) -> subprocess.Popen[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HETDEPLOY_", "GLOO_"))}
        own |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.ranks[rank] = subprocess.Popen(
            command, env=own | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self.ranks[rank]

    def start_bridged(self, rank: int, bridge: BridgeService, *command: str, **environ: str) -> subprocess.Popen[str]:
        """A torch rank of a joiner, with what `hetdeploy join` puts into its environment."""
        own = {"HETDEPLOY_BRIDGE": str(bridge.path), "HETDEPLOY_DIALECT": bridge.dialect.value, "HETDEPLOY_JOB": "test"}
        return self.start(rank, *command, **(own | environ))

    def wait(self, seconds: float = DEADLINE_SECONDS) -> Result:
        """Until all ranks have ended. What runs beyond the deadline, or on after a failure, is killed."""
        outputs: dict[int, str] = {}
        timers = [threading.Timer(seconds, self._kill)]

        def drain(rank: int) -> None:
            outputs[rank] = self.ranks[rank].communicate()[0]
            if self.ranks[rank].returncode:
                timers.append(threading.Timer(GRACE_SECONDS, self._kill))
                timers[-1].start()

        readers = [threading.Thread(target=drain, args=(rank,)) for rank in self.ranks]
        for thread in (*timers, *readers):
            thread.start()
        for reader in readers:
            reader.join()
        for timer in timers:
            timer.cancel()
        ordered = sorted(self.ranks)
        problems = [problem for bridge in self.bridges for problem in bridge.problems]
        return Result([self.ranks[rank].returncode for rank in ordered], [outputs[rank] for rank in ordered], problems)

    def _meet(self, host: str) -> socket.socket:
        """What the link does between joiners: the far end is handed to the other joiner's bridge."""
        (other,) = [bridge for bridge in self.bridges if MEETING_PREFIX + bridge.node == host]
        near, far = socket.socketpair()
        threading.Thread(target=other.meet, args=(far,), daemon=True).start()
        return near

    def _kill(self) -> None:
        for process in self.ranks.values():
            process.kill()


def bridged_store(job: Job, bridge: BridgeService, rank: int) -> BridgedStore:
    """What the gloo of a uv rank on this Linux machine is given."""
    return BridgedStore(job.group_store(), rank, job.size, BridgeClient(bridge.path), Dialect.UV, Layout.LINUX)


class LineStore:
    """Serves the store calls of one pygloo rank, by way of a wrapper as torch ranks' gloos are given."""

    def __init__(self, store: PassingStore) -> None:
        self._store = store
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_SECONDS)
        self._store.close()

    def _serve(self) -> None:
        with self._listener:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as lines:
                for line in lines:
                    lines.write(self._answer(*line.decode().split()).encode() + b"\n")
                    lines.flush()

    def _answer(self, call: str, *arguments: str) -> str:
        # torch puts the device's number before gloo's keys.
        keys = [f"0/{argument}" for argument in arguments]
        try:
            if call == "set":
                self._store.set(keys[0], bytes.fromhex(arguments[1]) if len(arguments) > 1 else b"")
                return "ok"
            if call == "get":
                return f"ok {self._store.get(keys[0]).hex()}"
            self._store.wait(keys, timedelta(seconds=60))
            return "ok"
        except Exception as error:
            return f"error {error}"


def run_operations(
    uv_ranks: list[int], size: int, script: list[dict], uv_host: str, tcp_host: str, joiners: int = 1, dial=plain_dial
) -> Result:
    """A group of pygloo and stock torch ranks that all perform ``script``, the pygloo ranks spread over ``joiners``.

    ``dial`` is how the bridges reach the stock ranks.
    """
    text = json.dumps(script)
    stores: list[LineStore] = []
    with Job(size) as job:
        bridges = [job.bridge(Dialect.UV, f"mac{number}", renaming(dial)) for number in range(joiners)]
        try:
            for rank in range(size):
                if rank in uv_ranks:
                    stores.append(LineStore(bridged_store(job, bridges[len(stores) % joiners], rank)))
                    program = [str(pygloo_python()), str(HERE / "uv_rank.py"), str(stores[-1].port)]
                    host = uv_host
                else:
                    program = [sys.executable, str(HERE / "tcp_rank.py"), str(job.store.port)]
                    host = tcp_host
                job.start(rank, *program, str(rank), str(size), host, text)
            return job.wait()
        finally:
            for store in stores:
                store.close()


def renaming(dial):
    """Connections by ``dial`` on which pygloo's send and recv meet those of torch.

    torch uses the tag itself as the slot of a point-to-point message. pygloo (its own code, not gloo's) puts the tag
    where collectives have theirs, with a prefix of its own. Nothing else is touched.
    """

    def through_renamer(host: str, port: int) -> socket.socket:
        far = dial(host, port)
        near, bridge = socket.socketpair()
        Relay(near, far, SlotRenamer(to_pygloo=False, skip=8), SlotRenamer(to_pygloo=True)).start("renamer")
        return bridge

    return through_renamer


class SlotRenamer:
    """Rewrites the slots of point-to-point messages in a ``tcp`` stream, behind ``skip`` bytes of greeting."""

    def __init__(self, to_pygloo: bool, skip: int = 0) -> None:
        self._to_pygloo = to_pygloo
        self._passing = skip
        self._header = b""

    def feed(self, data: memoryview) -> list[memoryview | bytes]:
        output: list[memoryview | bytes] = []
        while data:
            if self._passing:
                output.append(data[: self._passing])
                data, self._passing = data[len(output[-1]) :], self._passing - len(output[-1])
                continue
            lacking = HEADER_BYTES[Dialect.TCP] - len(self._header)
            self._header, data = self._header + bytes(data[:lacking]), data[lacking:]
            if len(self._header) == HEADER_BYTES[Dialect.TCP]:
                header = Header.decode(self._header, Dialect.TCP)
                output.append(header._replace(slot=self._rename(header.slot)).encode(Dialect.TCP))
                self._header, self._passing = b"", header.length if header.operation == DATA else 0
        return output

    def finish(self) -> None:
        pass

    def _rename(self, slot: int) -> int:
        if self._to_pygloo:
            return PYGLOO_SEND_PREFIX << 56 | slot << 24 if slot < 1 << 32 else slot
        return slot >> 24 & 0xFFFFFFFF if slot >> 56 == PYGLOO_SEND_PREFIX else slot


def pygloo_python() -> Path:
    """A Python with pygloo, in a virtual environment that is made once and kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hetdeploy-tests"
    cache.mkdir(parents=True, exist_ok=True)
    environment = cache / PYGLOO.replace("==", "-")
    python = environment / "bin" / "python"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / "complete").exists():
            shutil.rmtree(environment, ignore_errors=True)
            subprocess.run([_base_python(), "-m", "venv", environment], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", "numpy<2", PYGLOO], check=True)
            subprocess.run([python, "-c", "import pygloo, numpy; pygloo.transport.uv"], check=True)
            (environment / "complete").touch()
    return python


def _base_python() -> str:
    """A Python that pygloo has wheels for: PYTHON_FOR_PYGLOO, one on PATH, or one of pyenv's."""
    named = os.environ.get("PYTHON_FOR_PYGLOO")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(python) for version in ("3.10", "3.9") for python in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in [named] if named else [*found, "python3.10", "python3.9"]:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    raise AssertionError("pygloo needs Python 3.10 or 3.9: set PYTHON_FOR_PYGLOO to one")
