"""How a job ended, and which failure came first.

When one rank dies, every other rank soon reports a lost connection. Those reports are consequences; the cause is the
failure that no lost connection explains. ``decide`` puts it first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset) by peer|broken pipe|connection refused|sigterm|socket closed|"
    r"the (head|link) (stopped|is gone)|the client socket has failed",
    re.IGNORECASE,
)

_EXPLANATIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes"),
        "two ranks called a collective with tensors of different size or dtype",
    ),
    (
        re.compile(r"OutOfMemoryError|out of memory|Cannot allocate memory", re.IGNORECASE),
        "out of memory: use a smaller batch",
    ),
    (
        re.compile(r"is not currently implemented for the MPS device"),
        "an operator that MPS lacks and that was called before the fallback could be switched on",
    ),
    (
        re.compile(r"terminate called without an active exception"),
        "torch aborted while Python was ending; call torch.distributed.destroy_process_group() at the script's end",
    ),
    (re.compile(r"Bus error"), "shared memory is full: raise HETDEPLOY_SHM_SIZE"),
    (
        re.compile(r"Failed to initialize NVML"),
        "the container lost its GPU (the host reloaded systemd): `hetdeploy down`, then `hetdeploy up` again",
    ),
)


Kind = Literal["rank", "node", "bridge"]


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well, a node that is gone, or a connection that the bridge had to cut."""

    node: str
    rank: int | None
    code: int
    """Exit code; negative for a signal, as subprocess gives it."""
    text: str
    """One line: what happened."""
    time: float
    lines: tuple[str, ...] = ()
    """The last lines that it printed."""
    kind: Kind = "rank"

    @property
    def is_consequence(self) -> bool:
        """Whether a failure elsewhere explains this one."""
        if self.kind != "rank":
            return False
        if self.code == -signal.SIGTERM:
            return True
        return any(_CONSEQUENCE.search(line) for line in (self.text, *self.lines[-12:]))


@dataclass(frozen=True)
class Outcome:
    """The end of a job."""

    exit_code: int
    summary: str
    failures: tuple[Failure, ...] = field(default=())
    """The cause first, then its consequences in the order in which they were seen."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        failures = tuple(Failure(**{**entry, "lines": tuple(entry["lines"])}) for entry in fields["failures"])
        return cls(fields["exit_code"], fields["summary"], failures)

    def report(self) -> list[str]:
        """What to show a user: the summary, the first failure's last lines, then the others in one line each."""
        if not self.failures:
            return [self.summary]
        first, *others = self.failures
        report = [self.summary, *(f"    {line}" for line in first.lines[-12:])]
        report += [f"  then {other.text}" for other in others]
        return report


def decide(failures: Sequence[Failure], finished: str) -> Outcome:
    """The outcome of a job with ``failures``; ``finished`` is the summary when there are none."""
    if not failures:
        return Outcome(0, finished)
    # A connection that was cut explains the ranks that lost it, and is itself explained by a rank that died.
    ordered = sorted(failures, key=lambda failure: (failure.is_consequence, failure.kind == "bridge", failure.time))
    first = ordered[0]
    return Outcome(shell_code(first.code), f"failed first: {_described(first)}", tuple(ordered))


def decide_part(failures: Sequence[Failure], finished: str) -> Outcome:
    """The outcome for a node that ended before the job did, and whose end is not the job's."""
    part = decide(failures, finished)
    text = _described(part.failures[0]) if part.failures else finished
    return replace(part, summary=f"{text}; the job goes on without it")


def describe_exit(node: str, rank: int, code: int) -> str:
    """One line for a rank's end: ``rank 1 on studio exited with code 3``."""
    if code >= 0:
        return f"rank {rank} on {node} exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} on {node} was ended by {name}"


def explain(failure: Failure) -> str | None:
    """What a failure's last lines mean in the user's terms, where that is known."""
    for line in reversed(failure.lines):
        for pattern, meaning in _EXPLANATIONS:
            if pattern.search(line):
                return meaning
    if failure.code == -signal.SIGABRT:
        return "aborted inside gloo, most often because two ranks called different collectives or sizes"
    if failure.code == -signal.SIGKILL:
        return "killed from outside, most often for want of memory"
    return None


def _described(failure: Failure) -> str:
    cause = explain(failure)
    return f"{failure.text} ({cause})" if cause else failure.text


def shell_code(code: int) -> int:
    """An exit code as a shell shows it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code
