"""A member of a job: takes its orders from the coordinator, runs torchrun, reports lines and exit codes.

The head's rank container and a joiner run the same code; what differs is the role and where the store is reached.
Run as a module it is the head's member:

    python -m hetdeploy.nodes.member --code-file FILE --runs FOLDER
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetdeploy import __version__
from hetdeploy.errors import HetdeployError, PeerUnreachable, PreflightError
from hetdeploy.gloo.bridge import MEETING_PREFIX, BridgeService
from hetdeploy.gloo.dialect import Dialect, dialect_here
from hetdeploy.link.client import LinkClient
from hetdeploy.link.forward import Forward
from hetdeploy.link.invitation import Invitation
from hetdeploy.network.interfaces import interface_of, source_address
from hetdeploy.nodes import bundle, launch
from hetdeploy.nodes.coordinator import PROTOCOL
from hetdeploy.nodes.job import Job, RunFolder
from hetdeploy.nodes.outcome import Outcome

LOOPBACK = "127.0.0.1"
OUTCOME_SECONDS = 30.0
"""How long a member waits for the job's outcome after its own ranks have ended badly."""

CUT_OFF_SECONDS = 5.0
"""How long ranks may take to fail by themselves after the bridge has cut their connection."""

DIAL_SECONDS = 10.0
"""How long a rank of the head may take to answer in direct mode."""

_POLL_SECONDS = 0.2
LONGEST_LINE = 8_000
"""Characters; what a rank prints beyond them in one line is cut, so that a message never outgrows the link's limit."""

_BATCH_CHARACTERS = 64_000

log = logging.getLogger(__name__)

LineSink = Callable[[int | None, str], None]


@dataclass(frozen=True)
class Machine:
    """What a member knows of its own machine."""

    role: str
    """``head`` or ``joiner``."""
    runs: Path
    accelerator: str
    nproc_per_node: int
    address: str
    """This machine's own: the compose network's, or the chosen NIC's."""
    store_host: str | None = None
    """Where the store is reached; None for a joiner, whom the link or the job tells."""
    data: str | None = None
    threads: str | None = None


def is_bridged(job: Job, machine: Machine) -> bool:
    """Whether the ranks of ``machine`` meet the others through a bridge: a Mac's do in direct mode too."""
    return machine.role == "joiner" and (job.link == "tunnel" or dialect_here() is Dialect.UV)


def gloo_address(job: Job, machine: Machine) -> str:
    """Where the gloo of ``machine`` listens."""
    return LOOPBACK if is_bridged(job, machine) else machine.address


def hello(machine: Machine) -> dict[str, Any]:
    """What a member tells of itself when it knocks. Raises PreflightError when torch is not installed."""
    return {
        "protocol": PROTOCOL,
        "name": socket.gethostname(),
        "hetdeploy": __version__,
        "torch": installed_torch(),
        "python": platform.python_version(),
        "os": platform.system().lower(),
        "arch": platform.machine(),
        "dialect": dialect_here().value,
        "accelerator": machine.accelerator,
        "nproc": machine.nproc_per_node,
        "pid": os.getpid(),
        "address": machine.address,
    }


def installed_torch() -> str:
    """The version of torch that ranks on this machine will import; torch itself is not imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise PreflightError(
            f"torch is not installed in this environment ({sys.prefix})", "pip install 'hetdeploy[rank]'"
        ) from None


class JobMember:
    """Runs one node's part of a job over an open link. ``run`` returns the whole job's outcome."""

    def __init__(self, client: LinkClient, machine: Machine, show: LineSink, agent: launch.Agent | None = None) -> None:
        self.job = Job.from_json(client.welcome["job"])
        self.name = str(client.welcome["name"])
        self._client = client
        self._machine = machine
        self._show = show
        self._lines: queue.Queue[tuple[int | None, str]] = queue.Queue(maxsize=10_000)
        self._agent = agent or launch.Agent()
        self._agent.on_line = self.take_line
        self._folder = RunFolder(machine.runs, self.job.id).node(self.name)
        self._has_files = False
        self._bridge: BridgeService | None = None
        self._cut_off_at: float | None = None
        self._interrupts = 0
        self._reported_finished = False

    def fetch_files(self) -> None:
        """Write the job's files into this node's folder, once."""
        if self._has_files:
            return
        (self._folder / "work").mkdir(parents=True, exist_ok=True)
        bundle.unpack(self.job.bundle, self._folder / "work", self._client.fetch)
        self._has_files = True

    def take_line(self, rank: int | None, text: str) -> None:
        """A line that a rank, or torchrun, printed. Blocks when the head takes lines more slowly than they come."""
        text = text[:LONGEST_LINE]
        self._show(rank, text)
        self._lines.put((rank, text))

    def run(self) -> Outcome:
        """Fetch the files if that is not done, open the ways to the head, run the ranks, and wait for the job's end.

        Raises PeerUnreachable when the head goes away before it told how the job ended.
        """
        with ExitStack() as stack:
            stack.callback(self._agent.terminate)
            node = self._prepare(stack)
            stack.enter_context(self._catch_signals())
            self._agent.run(launch.agent_spec(self.job, node))
            self._client.send({"type": "state", "state": "running"})
            return self._watch()

    def _prepare(self, stack: ExitStack) -> launch.Node:
        self.fetch_files()
        is_joiner = self._machine.role == "joiner"
        store_host, store_port = self._machine.store_host or self.job.head_address, self.job.store_port
        if is_joiner and self.job.link == "tunnel":
            forward = stack.enter_context(Forward(self._client, "store", self.job.store_port))
            store_host, store_port = LOOPBACK, forward.port
        if is_bridged(self.job, self._machine):
            dial = self._client.dial if self.job.link == "tunnel" else self._dial_plainly
            self._bridge = BridgeService(dial, dialect_here(), node=self.name)
            self._bridge.start()
            stack.callback(self._bridge.close)
        return launch.Node(
            name=self.name,
            role=self._machine.role,
            rendezvous=f"{store_host}:{store_port}",
            local_address=f"node-{self.name}" if is_joiner else self._machine.address,
            gloo_interface=interface_of(gloo_address(self.job, self._machine)).name,
            nproc_per_node=self._machine.nproc_per_node,
            accelerator=self._machine.accelerator,
            dialect=dialect_here().value,
            folder=self._folder,
            bridge=str(self._bridge.path) if self._bridge else None,
            data=self._machine.data,
            threads=self._machine.threads,
        )

    def _dial_plainly(self, host: str, port: int) -> socket.socket:
        """Direct mode: the head's ranks listen on the LAN. Another joiner with a bridge listens nowhere."""
        if host.startswith(MEETING_PREFIX):
            return self._client.dial(host, port)
        sock = socket.create_connection((host, port), DIAL_SECONDS, (self._machine.address, 0))
        sock.settimeout(None)
        return sock

    def _watch(self) -> Outcome:
        """The loop around the running ranks. Every wait in it ends: by an outcome, a lost link or a deadline."""
        ended: float | None = None
        while True:
            message = self._client.receive(timeout=_POLL_SECONDS)
            self._send_lines()
            if message is not None and message["type"] == "outcome":
                return Outcome.from_json({key: message[key] for key in ("exit_code", "summary", "failures")})
            if message is not None and message["type"] == "meet":
                threading.Thread(target=self._meet, args=(str(message["id"]),), name="meet", daemon=True).start()
            if message is not None and message["type"] == "stop" and ended is None:
                self._agent.terminate()
            # What the head said before it went comes first.
            if message is None and self._client.lost.is_set():
                raise PeerUnreachable(
                    f"the head at {self._client.host} is gone ({self._client.lost_reason})",
                    "see `hetdeploy status` there; the ranks here were stopped",
                )
            if ended is None and self._is_cut_off():
                self._agent.terminate()
            if self._interrupts and ended is None:
                ended = time.monotonic()
                self._leave()
            if ended is None:
                ended = self._report_end()
            elif time.monotonic() - ended > OUTCOME_SECONDS + self.job.exit_timeout:
                raise PeerUnreachable("the head did not tell how the job ended", "see `hetdeploy status` there")

    def _meet(self, meeting: str) -> None:
        """Another joiner's rank wants to reach one of ours."""
        if self._bridge is None:
            return
        try:
            self._bridge.meet(self._client.meet(meeting))
        except HetdeployError as error:
            log.warning("%s", error)

    def _is_cut_off(self) -> bool:
        """Whether the bridge had to cut a pair and the ranks have not ended of it.

        gloo 2.13 never fails a receive whose payload has begun: such a rank would hang until its own timeout.
        """
        if self._bridge is None or not self._bridge.problems:
            return False
        if self._cut_off_at is None:
            self._cut_off_at = time.monotonic()
        return time.monotonic() - self._cut_off_at > CUT_OFF_SECONDS

    def _report_end(self) -> float | None:
        code = self._agent.poll()
        if code is None:
            if not self._reported_finished and self._agent.workers_finished():
                self._reported_finished = True
                self._client.send({"type": "state", "state": "finished"})
            return None
        self._send_lines()
        result = self._agent.result()
        problems = list(self._bridge.problems) if self._bridge else []
        self._client.send({"type": "exit", "code": code, "problems": problems, **result})
        return time.monotonic()

    def _leave(self) -> None:
        self._show(None, "interrupted: ending the ranks here and telling the head")
        self._client.send({"type": "leave", "reason": "interrupted", "code": 130})
        self._agent.terminate()

    def _send_lines(self) -> None:
        while not self._lines.empty():
            batch: list[tuple[int | None, str]] = []
            characters = 0
            while characters < _BATCH_CHARACTERS and not self._lines.empty():
                batch.append(self._lines.get())
                characters += len(batch[-1][1]) + 1
            self._client.send({"type": "log", "lines": batch})

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM become a clean leave; a second Ctrl-C does not wait for anybody."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(signum: int, _frame: object) -> None:
            self._interrupts += 1
            if self._interrupts > 1 and signum == signal.SIGINT:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main() -> int:
    """The head's own member, started by Compose or by a native head."""
    parser = argparse.ArgumentParser(prog="python -m hetdeploy.nodes.member")
    parser.add_argument("--code-file", type=Path, default=Path("/member/code"))
    parser.add_argument("--runs", type=Path, default=Path("/runs"))
    parser.add_argument("--store", default="rendezvous", help="host that the store listens on")
    parser.add_argument("--address", help="where gloo listens; by default the address that reaches the rendezvous")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        return _run_head_member(options).exit_code
    except HetdeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run_head_member(options: argparse.Namespace) -> Outcome:
    invitation = Invitation.decode(options.code_file.read_text(encoding="utf-8"))
    machine = Machine(
        role="head",
        runs=options.runs,
        accelerator=os.environ.get("HETDEPLOY_ACCELERATOR", "cpu"),
        nproc_per_node=int(os.environ.get("HETDEPLOY_NPROC_PER_NODE", "1")),
        address=options.address or source_address(invitation.host),
        store_host=options.store,
        data=os.environ.get("HETDEPLOY_DATA_DIR") or None,
        threads=os.environ.get("HETDEPLOY_OMP_NUM_THREADS") or None,
    )
    client = LinkClient.connect(invitation, "head", hello(machine))
    try:
        return JobMember(client, machine, _print_line).run()
    finally:
        client.close()


def _print_line(rank: int | None, text: str) -> None:
    print(text if rank is None else f"rank {rank}| {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
