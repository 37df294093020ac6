"""Checks and what comes of them. All run before any is reported: nobody should mend one thing to hear of the next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from hetdeploy.errors import PreflightError
from hetdeploy.preflight.facts import Facts

ONLY_FOR_DOCTOR = ("hostname",)
"""Checks whose subject misleads other programs and not this one: nothing to say on every run."""

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Result:
    """What one check found, in one line, and how to mend it."""

    name: str
    status: Status
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        return self.text if self.fix is None else f"{self.text}: {self.fix}"


class Check(Protocol):
    """One question about this machine. It reads nothing itself: all it may judge is in the facts."""

    name: ClassVar[str]

    def run(self, facts: Facts) -> Result | None:
        """The answer; None where the question does not arise."""


@dataclass(frozen=True)
class Report:
    """The results of all checks, in their order."""

    results: tuple[Result, ...]

    @property
    def warnings(self) -> list[str]:
        return [str(result) for result in self.results if result.status == "warning"]

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.status == "failure"]

    @property
    def summary(self) -> str:
        """``9 checks passed``, ``7 of 9 checks passed``"""
        passed = sum(result.status == "ok" for result in self.results)
        of_all = "" if passed == len(self.results) else f" of {len(self.results)}"
        return f"{passed}{of_all} checks passed"

    def raise_failures(self) -> None:
        """Raise one PreflightError for all failures; return if there are none."""
        failed = self.failures
        if not failed:
            return
        if len(failed) == 1:
            raise PreflightError(failed[0].text, failed[0].fix)
        lines = "".join(f"\n  {result.name:<16} {result}" for result in failed)
        raise PreflightError(f"this machine is not ready, {len(failed)} checks failed{lines}")

    def to_json(self) -> list[dict[str, Any]]:
        return [{"name": r.name, "status": r.status, "text": r.text, "fix": r.fix} for r in self.results]


def run_all(checks: Iterable[Check], facts: Facts, ignore: Collection[str] = ()) -> Report:
    """Run every check but those whose name is to be ignored."""
    results = [check.run(facts) for check in checks if check.name not in ignore]
    return Report(tuple(result for result in results if result is not None))
