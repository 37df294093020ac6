"""What a job is, and where its state lies on the disk.

.hetdeploy/                of the folder that `up` or `join` was called in
    head.env, joiner.env   the settings in force, generated
    job.json               the job (head only)
    link/                  certificate, key and secrets of the link (head only)
    member/code            the head's own ticket to the link (head only)
    files/                 the job's files by digest (head only)
    runs/<job>/            what a run leaves: journal, status, one folder a node with the ranks' output
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetdeploy.errors import UsageError
from hetdeploy.files import write_atomic
from hetdeploy.nodes.bundle import Bundle


@dataclass(frozen=True)
class Job:
    """One training job, as the head describes it to every member."""

    id: str
    script: str
    """Path of the script inside the bundle."""
    arguments: tuple[str, ...]
    nodes: str
    """How many nodes, as torchrun writes it: ``2`` or ``1:4``. In a crew the highest number counts."""
    nproc_per_node: int
    """Ranks on the head; a joiner has a setting of its own."""
    backend: str
    link: str
    """``tunnel`` or ``direct``."""
    head_address: str
    """The chosen NIC's IPv4 address on the head."""
    link_port: int
    store_port: int
    join_timeout: float
    """Seconds that the rendezvous waits for all nodes."""
    exit_timeout: float
    """Seconds that a finished node waits for the others."""
    torch: str
    bundle: Bundle
    runtime: str = "compose"
    """``compose`` (containers) or ``native`` (processes)."""
    crew: bool = False
    """Whether joiners come and go while the head trains: every node's rank is then a torchrun world of its own.
    Otherwise all nodes are one world."""

    def is_decided_by(self, role: str) -> bool:
        """Whether the end of a node of this role is the job's, and its failure the job's failure.

        The one difference between the two kinds of job: in a fixed world every node decides, in a crew the head alone.
        """
        return not self.crew or role == "head"

    @property
    def min_nodes(self) -> int:
        """How many it takes to start."""
        return 1 if self.crew else int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """How many there may be at a time."""
        return int(self.nodes.split(":")[-1])

    @property
    def command(self) -> str:
        return " ".join([self.script, *self.arguments])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "arguments": list(self.arguments), "bundle": self.bundle.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        return cls(
            **{
                **fields,
                "arguments": tuple(fields["arguments"]),
                "bundle": Bundle.from_json(fields["bundle"]),
            }
        )

    def same_work(self, other: Job) -> bool:
        """Whether both jobs run the same bytes with the same settings."""
        mine, theirs = self.to_json(), other.to_json()
        return all(mine[key] == theirs[key] for key in mine if key != "id")


def new_job_id(now: float | None = None) -> str:
    """A name that sorts by time and does not repeat: ``20260114-093205-5f2c``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(2)}"


class StateFolder:
    """The ``.hetdeploy`` folder of ``project``."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.path = project / ".hetdeploy"

    @property
    def head_env(self) -> Path:
        return self.path / "head.env"

    @property
    def joiner_env(self) -> Path:
        return self.path / "joiner.env"

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def link(self) -> Path:
        return self.path / "link"

    @property
    def member_code(self) -> Path:
        return self.path / "member" / "code"

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def processes(self) -> Path:
        """Process ids of a native head."""
        return self.path / "processes.json"

    def create(self) -> None:
        """Make the folder; nothing in it belongs into version control."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ignore = self.path / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def save_job(self, job: Job) -> None:
        write_atomic(self.job_file, json.dumps(job.to_json(), indent=1).encode())

    def load_job(self) -> Job | None:
        """The job that `up` made here last, or None."""
        return load_job(self.job_file) if self.job_file.exists() else None


def load_job(path: Path) -> Job:
    """Read a job file. Raises UsageError when it is damaged."""
    try:
        return Job.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is damaged ({error})", f"remove {path} and call `hetdeploy up` again") from error


class RunFolder:
    """``runs/<job>`` of one machine."""

    def __init__(self, runs: Path, job_id: str) -> None:
        self.path = runs / job_id

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    def node(self, name: str) -> Path:
        """The folder that node ``name`` works in; the script runs in its ``work``."""
        return self.path / name
