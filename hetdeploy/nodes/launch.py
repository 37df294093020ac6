"""What one node runs: torchrun's arguments and environment as data, then the process that carries them out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hetdeploy.errors import HetdeployError
from hetdeploy.nodes.job import Job
from hetdeploy.settings import scrubbed

TERMINATE_SECONDS = 8.0
"""How long a rank may take to end after SIGTERM before it is killed."""

CLOCK_TOLERANCE_SECONDS = 120
"""How far two nodes' clocks may differ: c10d compares wall clocks of different machines to find dead nodes."""

NODE_ALONE = "127.0.0.1"
"""In a crew: where the store of a node's own world listens, which nobody else needs."""

LAST_CALL_SECONDS = 10
"""With a range of nodes: how long the job waits for more once it has the least."""

_KEEP_ALIVE_SECONDS = 5
_SECONDS_A_DAY = 86_400

_RANK_LINE = re.compile(r"rank(\d+)\| ?")


@dataclass(frozen=True)
class Node:
    """What differs from node to node."""

    name: str
    role: str
    """``head`` or ``joiner``."""
    rendezvous: str
    """Where this node reaches the rendezvous store, ``host:port``."""
    local_address: str
    """Sorts the nodes: c10d gives rank 0 to the smallest, so a head has an IP literal and a joiner ``node-NAME``."""
    gloo_interface: str
    nproc_per_node: int
    accelerator: str
    dialect: str
    folder: Path
    bridge: str | None = None
    data: str | None = None
    threads: str | None = None


@dataclass(frozen=True)
class AgentSpec:
    """One torchrun call, as the agent process reads it."""

    arguments: list[str]
    env: dict[str, str]
    folder: str
    result: str


def agent_spec(job: Job, node: Node) -> AgentSpec:
    """The torchrun call of ``node`` for ``job``."""
    arguments = [
        *(_world_alone(job, node) if job.crew else _world_of_all(job, node)),
        f"--nproc-per-node={node.nproc_per_node}",
        "--rdzv-backend=c10d",
        "--max-restarts=0",
        f"--log-dir={node.folder / 'logs'}",
        "--tee=3",
        str(node.folder / "work" / job.script),
        *job.arguments,
    ]
    return AgentSpec(
        arguments=arguments,
        env=rank_environment(job, node),
        folder=str(node.folder / "work"),
        result=str(node.folder / "result.json"),
    )


def _world_of_all(job: Job, node: Node) -> list[str]:
    """All nodes meet in the job's store."""
    conf = {
        "is_host": "0",
        "join_timeout": f"{job.join_timeout:.0f}",
        "last_call_timeout": str(LAST_CALL_SECONDS),
        "keep_alive_interval": str(_KEEP_ALIVE_SECONDS),
        "keep_alive_max_attempt": str(CLOCK_TOLERANCE_SECONDS // _KEEP_ALIVE_SECONDS),
    }
    return [
        f"--nnodes={job.nodes}",
        f"--rdzv-endpoint={node.rendezvous}",
        f"--rdzv-id={job.id}",
        _rendezvous_conf(conf),
        f"--local-addr={node.local_address}",
    ]


def _world_alone(job: Job, node: Node) -> list[str]:
    """A node by itself: torchrun's ``--standalone``, but for a store that every machine on the LAN could reach.

    A file store only grows, by every heartbeat, and nobody looks for this one's.
    """
    conf = {"store_type": "file", "keep_alive_interval": str(_SECONDS_A_DAY)}
    return [
        "--nnodes=1",
        f"--rdzv-endpoint={node.folder / 'rendezvous'}",
        f"--rdzv-id={job.id}-{node.name}",
        _rendezvous_conf(conf),
        f"--local-addr={NODE_ALONE}",
    ]


def _rendezvous_conf(conf: dict[str, str]) -> str:
    return "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items())


def rank_environment(job: Job, node: Node) -> dict[str, str]:
    """What every rank of ``node`` finds in its environment besides torchrun's own variables."""
    env = {
        "HETDEPLOY_JOB": job.id,
        "HETDEPLOY_DIALECT": node.dialect,
        "HETDEPLOY_BACKEND": job.backend,
        "HETDEPLOY_METRICS_DIR": str(node.folder / "metrics"),
        "GLOO_SOCKET_IFNAME": node.gloo_interface,
        "NCCL_SOCKET_IFNAME": node.gloo_interface,
        "TP_SOCKET_IFNAME": node.gloo_interface,
        "PYTHONUNBUFFERED": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
    if job.crew:
        env["HETDEPLOY_CREW_ROLE"] = "leader" if node.role == "head" else "helper"
        env["HETDEPLOY_CREW_STORE"] = node.rendezvous
    if node.bridge is not None:
        env["HETDEPLOY_BRIDGE"] = node.bridge
    if node.accelerator == "mps":
        # Read once, when torch is imported: a script that sets it is too late.
        env["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"
    if node.data is not None:
        env["HETDEPLOY_DATA_DIR"] = node.data
    if node.threads is not None:
        env["OMP_NUM_THREADS"] = node.threads
    return env


def split_line(line: str) -> tuple[int | None, str]:
    """The rank that printed ``line`` (None for the launcher itself) and the text without torchrun's mark."""
    mark = _RANK_LINE.match(line)
    return (int(mark[1]), line[mark.end() :]) if mark else (None, line)


class Agent:
    """The agent process. ``start`` at any time; ``run`` when the specification is known."""

    def __init__(self) -> None:
        self.on_line: Callable[[int | None, str], None] = lambda rank, text: None
        self._process: subprocess.Popen[str] | None = None
        self._pump: threading.Thread | None = None
        self._result: Path | None = None
        self._had_workers = False

    def start(self) -> None:
        """Start the process, which imports torch and waits. In its own session: Ctrl-C reaches it through us alone."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetdeploy.nodes.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            env=scrubbed(os.environ),
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._pump_lines, name="agent-lines", daemon=True)
        self._pump.start()

    def run(self, spec: AgentSpec) -> None:
        """Hand the specification over; torchrun begins."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._result = Path(spec.result)
        self._result.unlink(missing_ok=True)
        try:
            self._process.stdin.write(json.dumps(asdict(spec)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise HetdeployError(
                f"the launcher process ended at once (exit code {self._process.wait()})",
                f"run `{sys.executable} -m hetdeploy.nodes.agent` to see why",
            ) from None

    def poll(self) -> int | None:
        """The exit code, or None while it runs. All lines have been delivered once there is a code."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None and self._pump is not None:
            self._pump.join(timeout=TERMINATE_SECONDS)
        return code

    def workers_finished(self) -> bool:
        """Whether this node's ranks have come and gone while torchrun still waits for the other nodes."""
        if self._process is None or self._process.poll() is not None:
            return False
        try:
            alive = any(
                child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(self._process.pid).children()
            )
        except psutil.NoSuchProcess:
            return False
        self._had_workers = self._had_workers or alive
        return self._had_workers and not alive

    def result(self) -> dict[str, Any]:
        """What the process left behind: failures by rank, and an error of the launcher itself."""
        if self._result is not None and self._result.exists():
            result: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
            return result
        code = self._process.poll() if self._process is not None else None
        return {"failures": [], "error": None if code == 0 else f"the launcher process ended with exit code {code}"}

    def terminate(self) -> None:
        """End torchrun and every rank below it: SIGTERM, then SIGKILL after TERMINATE_SECONDS."""
        if self._process is None:
            return
        tree = _tree(self._process.pid)
        for process in tree:
            _signal(process, "terminate")
        _, alive = psutil.wait_procs(tree, timeout=TERMINATE_SECONDS)
        for process in alive:
            _signal(process, "kill")
        psutil.wait_procs(alive, timeout=TERMINATE_SECONDS)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._pump is not None:
            self._pump.join(timeout=TERMINATE_SECONDS)

    def _pump_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.on_line(*split_line(line.rstrip("\n")))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, how: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        getattr(process, how)()
