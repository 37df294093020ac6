"""The job's coordinator: who belongs to the job, what its members report, when it is over and how it ended.

In a fixed world the job is over when all nodes are, or soon after the first failure of any. In a crew it is over when
the head is: a joiner that ends earlier is told how its own part ended, and the job goes on (``Job.is_decided_by``).

It lives beside the link server on the head and is the journal's only writer. Every member, the head's own included,
speaks the same small protocol of JSON messages to it.

Member to coordinator:

    {"type": "state", "state": "running" | "finished"}
    {"type": "log", "lines": [[rank | null, text], ...]}
    {"type": "exit", "code": n, "failures": [{"rank", "code"}], "error": null | text, "problems": [text, ...]}
    {"type": "leave", "reason": text, "code": n}

Coordinator to member:

    {"type": "stop", "reason": text}
    {"type": "outcome", ...Outcome}
"""

from __future__ import annotations

import json
import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetdeploy import __version__
from hetdeploy.files import write_atomic
from hetdeploy.link.server import Member, Refused
from hetdeploy.nodes import outcome, progress
from hetdeploy.nodes.job import Job, RunFolder
from hetdeploy.nodes.journal import Journal
from hetdeploy.nodes.outcome import Failure, Outcome

PROTOCOL = 2
"""Of the messages above and of what a welcome holds. Members with another number are refused."""

REPORT_SECONDS = 5.0
"""After a first failure, or the end of a crew's head: how long the others may take to report theirs before they are
told to stop. In a crew also how long a joiner whose rank is over is kept: the head's end may be what ended it."""

STOP_SECONDS = 15.0
"""How long members may take to stop before the job is declared over without them."""

_LAST_LINES = 40
_STATUS_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass
class Node:
    """One member and what is known of it."""

    name: str
    role: str
    member: Member
    hello: dict[str, Any]
    state: str = "starting"
    ended: bool = False
    failures: tuple[Failure, ...] = ()
    part_at: float | None = None
    """When to tell it that the job goes on without it, on the monotonic clock; None again once it was told."""
    parted: str | None = None
    """What it was told then."""
    progress: dict[int, progress.Progress] = field(default_factory=dict)
    lines: dict[int | None, deque[str]] = field(default_factory=dict)


class Coordinator:
    """Implements the link server's ``Handler``.

    ``store`` is where the job's store listens. ``port_allowed(pid, port)`` says, on a native head, whether a port
    belongs to the member with that process id: there, ranks share their address with everything else on the machine.
    """

    def __init__(
        self,
        job: Job,
        run: RunFolder,
        files: Path,
        *,
        store: tuple[str, int],
        port_allowed: Callable[[int, int], bool] | None = None,
    ) -> None:
        self.job = job
        self.outcome: Outcome | None = None
        self.over = threading.Event()
        self._run = run
        self._files = files
        self._store = store
        self._port_allowed = port_allowed
        self._journal = Journal(run.journal)
        self._nodes: dict[str, Node] = {}
        self._failures: list[Failure] = []
        self._stopping: str | None = None
        self._deadline: float | None = None
        self._deadline_text = ""
        self._lock = threading.RLock()
        self._digests = {file.sha256 for file in job.bundle.files}
        self._write_status()
        self._watch = threading.Thread(target=self._watch_deadlines, name="coordinator", daemon=True)
        self._watch.start()

    # What the link server asks.

    def admit(self, role: str, hello: dict[str, Any], peer: str) -> dict[str, Any]:
        """Let a member in, or raise Refused with the reason."""
        with self._lock:
            if self.outcome is not None or self._stopping or self._is_decided():
                raise Refused("over", f"the job is over ({self._summary()})")
            self._compare_versions(hello)
            alive = [node for node in self._nodes.values() if not node.ended]
            self._require_place(role, hello, alive)
            name = "head" if role == "head" else self._free_name(str(hello.get("name") or "joiner"))
            return {
                "protocol": PROTOCOL,
                "name": name,
                "hetdeploy": __version__,
                "python": platform.python_version(),
                "job": self.job.to_json(),
                "members": [node.name for node in alive],
            }

    def connected(self, member: Member) -> None:
        with self._lock:
            name = str(member.welcome["name"])
            if name in self._nodes and not self._nodes[name].ended:
                member.close("another node took the same name")
                return
            node = Node(name, member.role, member, member.hello)
            self._nodes[name] = node
            facts = {key: member.hello.get(key) for key in ("os", "arch", "torch", "python", "accelerator", "nproc")}
            self._journal.write(name, "joined", peer=member.peer, role=member.role, **facts)

    def message(self, member: Member, message: dict[str, Any]) -> None:
        node = self._node_of(member)
        if node is None:
            return
        kind = message.get("type")
        if kind == "log":
            self._log_lines(node, message["lines"])
        elif kind == "state":
            self._set_state(node, str(message["state"]))
        elif kind == "exit":
            self._node_exited(node, message)
        elif kind == "leave":
            self._node_left(node, str(message.get("reason", "left")), int(message.get("code", 1)))
        else:
            log.warning("unknown message %r from %s", kind, node.name)

    def lost(self, member: Member, reason: str) -> None:
        node = self._node_of(member)
        if node is None or node.ended:
            return
        with self._lock:
            self._journal.write(node.name, "lost", reason=reason)
            self._end_node(node, [_node_failure(node, 4, f"{node.name} is gone: {reason}")], is_gone=True)

    def dial_address(self, member: Member, host: str, port: int) -> tuple[str, int]:
        """Where a joiner's stream may lead: the job's store, and ports of the head's own ranks. Nothing else."""
        if (host, port) == ("store", self.job.store_port):
            return self._store
        with self._lock:
            head = next((node for node in self._nodes.values() if node.role == "head" and not node.ended), None)
        if head is None or host != head.hello.get("address"):
            raise Refused("dial", f"{host}:{port} does not belong to this job")
        if self._port_allowed is not None and not self._port_allowed(int(head.hello.get("pid", 0)), port):
            raise Refused("dial", f"no rank of this job listens on {host}:{port}")
        return host, port

    def meeting(self, member: Member, name: str) -> Member:
        with self._lock:
            node = self._nodes.get(name)
        if node is None or node.ended or node.role != "joiner" or node.member is member:
            raise Refused("dial", f"no other joiner of this job is called {name}")
        return node.member

    def file(self, member: Member, digest: str) -> Path:
        if digest not in self._digests:
            raise Refused("file", f"no file of this job has the digest {digest[:12]}")
        return self._files / digest

    # What the process around it asks.

    def stop(self, reason: str, code: int = 130) -> None:
        """End the job on all machines."""
        with self._lock:
            if self._stopping or self.outcome:
                return
            if self._is_decided():  # a crew's head has ended, and how: the others are told now instead of soon
                self._begin_stop(self._deadline_text)
                return
            self._failures.append(Failure("head", None, code, reason, 0.0, (), "node"))
            self._begin_stop(reason)

    def close(self) -> None:
        self._journal.close()

    # Members' reports.

    def _compare_versions(self, hello: dict[str, Any]) -> None:
        theirs = hello.get("protocol")
        if theirs != PROTOCOL or hello.get("hetdeploy") != __version__:
            raise Refused(
                "version",
                f"the head runs hetdeploy {__version__} (protocol {PROTOCOL}), this machine {hello.get('hetdeploy')} "
                f"(protocol {theirs}): install the same version on both",
            )
        torch = str(hello.get("torch"))
        if release(torch) != release(self.job.torch):
            raise Refused(
                "version",
                f"the head runs torch {release(self.job.torch)}, this machine {torch}: "
                f"pip install torch=={release(self.job.torch)}",
            )

    def _require_place(self, role: str, hello: dict[str, Any], alive: list[Node]) -> None:
        """Raise Refused where there is no place for a node of this role. The head's own is kept for it."""
        same = [node for node in alive if node.role == role]
        if len(same) >= (1 if role == "head" else self.job.max_nodes - 1):
            text = f"the job has its {self.job.max_nodes} nodes already ({', '.join(node.name for node in alive)})"
            if self.job.crew and same:  # a place becomes free when somebody leaves: worth waiting for
                raise Refused("busy", f"{text}; `hetdeploy up --nodes {self.job.max_nodes + 1}` would take one more")
            raise Refused("full", text)
        if self.job.crew and (ranks := int(hello.get("nproc", 1))) > 1:
            raise Refused("usage", f"a crew has one rank on each machine, not {ranks}: join with --nproc-per-node 1")

    def _free_name(self, wanted: str) -> str:
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in wanted.split(".")[0])[:40] or "joiner"
        taken = {node.name for node in self._nodes.values()} | {"head"}
        return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if n not in taken)

    def _node_of(self, member: Member) -> Node | None:
        with self._lock:
            return next((node for node in self._nodes.values() if node.member is member), None)

    def _log_lines(self, node: Node, lines: list[tuple[int | None, str]]) -> None:
        self._journal.write(node.name, "log", lines=lines)
        with self._lock:
            for rank, text in lines:
                node.lines.setdefault(rank, deque(maxlen=_LAST_LINES)).append(text)
                if rank is not None and (found := progress.parse(text)):
                    node.progress[rank] = found

    def _set_state(self, node: Node, state: str) -> None:
        with self._lock:
            node.state = state
            self._journal.write(node.name, "state", state=state)
            if state == "finished" and self._deadline is None and not self.job.crew:
                self._set_deadline(
                    self.job.exit_timeout, f"{node.name} finished, and the others did not within the exit timeout"
                )

    def _node_exited(self, node: Node, message: dict[str, Any]) -> None:
        code = int(message["code"])
        self._journal.write(node.name, "exit", code=code, failures=message["failures"], error=message.get("error"))
        with self._lock:
            now = time.time()
            failures = [
                Failure(
                    node.name,
                    int(entry["rank"]),
                    int(entry["code"]),
                    outcome.describe_exit(node.name, int(entry["rank"]), int(entry["code"])),
                    now,
                    tuple(node.lines.get(int(entry["rank"]), ())),
                )
                for entry in message["failures"]
            ]
            # A node that was told to stop has nothing to add.
            if code and not failures and not message["problems"] and not self._stopping:
                text = f"{node.name}: {message.get('error') or f'ended with code {code}'}"
                failures = [Failure(node.name, None, code, text, now, tuple(node.lines.get(None, ())), "node")]
            if code:
                problems = [f"the bridge on {node.name}: {problem}" for problem in message["problems"]]
                failures += [Failure(node.name, None, 1, problem, now, (), "bridge") for problem in problems]
            self._end_node(node, failures)

    def _node_left(self, node: Node, reason: str, code: int) -> None:
        with self._lock:
            self._journal.write(node.name, "lost", reason=reason)
            self._end_node(node, [_node_failure(node, code, f"{node.name} left: {reason}")], is_gone=True)

    def _end_node(self, node: Node, failures: list[Failure], *, is_gone: bool = False) -> None:
        if node.ended:
            return
        node.ended = True
        node.state = "failed" if failures else "finished"
        node.failures = tuple(failures)
        decides = self.job.is_decided_by(node.role)
        if decides:
            self._failures += failures
        if self._is_over():
            self._finish()
        elif self._stopping:
            return
        elif not decides:
            node.state = "gone" if is_gone else node.state
            node.part_at = time.monotonic() + (0.0 if is_gone else REPORT_SECONDS)
        elif failures or self._is_decided():
            self._set_deadline(REPORT_SECONDS, failures[0].text if failures else self._summary())

    # The end.

    def _is_decided(self) -> bool:
        """Whether all that decide over the job have come and ended."""
        deciding = [node for node in self._nodes.values() if self.job.is_decided_by(node.role)]
        return len(deciding) >= self.job.min_nodes and all(node.ended for node in deciding)

    def _is_over(self) -> bool:
        if not all(node.ended for node in self._nodes.values()):
            return False
        return bool(self._failures or self._stopping or self._is_decided())

    def _part_with(self, node: Node) -> None:
        """Tell a node how its part ended: the job goes on."""
        part = outcome.decide_part(node.failures, f"{node.name} finished")
        node.part_at, node.parted = None, part.summary
        self._journal.write(node.name, "parted", code=part.exit_code, text=part.summary)
        node.member.send({"type": "outcome", **part.to_json()})

    def _set_deadline(self, seconds: float, text: str) -> None:
        self._deadline = time.monotonic() + seconds
        self._deadline_text = text

    def _begin_stop(self, reason: str) -> None:
        self._stopping = reason
        alive = [node for node in self._nodes.values() if not node.ended]
        for node in alive:
            node.member.send({"type": "stop", "reason": reason})
        self._set_deadline(STOP_SECONDS, reason)
        if not alive:
            self._finish()

    def _finish(self) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome.decide(self._failures, self._summary())
        self._journal.write("", "outcome", **self.outcome.to_json())
        self._write_status()
        for node in self._nodes.values():
            if node.parted is None:
                node.member.send({"type": "outcome", **self.outcome.to_json()})
        self.over.set()

    def _summary(self) -> str:
        if self.outcome is not None:
            return self.outcome.summary
        if self.job.crew and not self._stopping:
            joiners = sum(node.role != "head" for node in self._nodes.values())
            return f"the head finished, {f'{joiners} joined on the way' if joiners else 'alone'}"
        ranks = sum(int(node.hello.get("nproc", 1)) for node in self._nodes.values())
        return self._stopping or f"{_count(ranks, 'rank')} on {_count(len(self._nodes), 'node')} finished"

    def _watch_deadlines(self) -> None:
        while not self.over.wait(_STATUS_SECONDS / 2):
            with self._lock:
                if not self._stopping and not self._is_decided():
                    for node in self._nodes.values():
                        if node.part_at is not None and time.monotonic() >= node.part_at:
                            self._part_with(node)
                self._write_status()
                if self._deadline is None or time.monotonic() < self._deadline:
                    continue
                if self._stopping:
                    self._finish()
                    continue
                if not self._failures and not self._is_decided():
                    waiting = ", ".join(node.name for node in self._nodes.values() if not node.ended)
                    text = f"{self._deadline_text} ({self.job.exit_timeout:.0f} s): {waiting}"
                    self._failures.append(Failure("", None, 1, text, time.time(), (), "node"))
                self._begin_stop(self._deadline_text)

    def _write_status(self) -> None:
        with self._lock:
            status = {
                "schema_version": 1,
                "job": self.job.id,
                "command": self.job.command,
                "state": "over" if self.outcome else "stopping" if self._stopping else self._job_state(),
                "nodes": [_node_status(node) for node in self._nodes.values()],
                "awaited": max(0, self.job.min_nodes - len(self._nodes)),
                "outcome": self.outcome.to_json() if self.outcome else None,
                "t": round(time.time(), 1),
            }
        write_atomic(self._run.status, json.dumps(status).encode())

    def _job_state(self) -> str:
        return "waiting" if len(self._nodes) < self.job.min_nodes else "running"


def release(version: str) -> str:
    """A torch version without its build tag: ``2.13.0+cpu`` is ``2.13.0``."""
    return version.split("+")[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _node_failure(node: Node, code: int, text: str) -> Failure:
    return Failure(node.name, None, code, text, time.time(), (), "node")


def _node_status(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "role": node.role,
        "peer": node.member.peer,
        "state": node.state,
        "parted": node.parted,
        "accelerator": node.hello.get("accelerator"),
        "progress": {str(rank): figures for rank, figures in sorted(node.progress.items())},
    }
