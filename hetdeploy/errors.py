"""Every error a user can meet, in one tree.

    HetdeployError            1    something failed
    ├── UsageError            2    the command line, a setting or a file is wrong
    ├── PreflightError        3    this machine is not ready
    ├── PeerUnreachable       4    the other machine cannot be reached, or is gone
    ├── VersionMismatch       5    the machines run versions that do not go together
    └── Interrupted           130  Ctrl-C

An error is one line: what is wrong and where (``problem``), then how to mend it (``fix``). The command line prints that
line and exits with ``exit_code``; the trace is behind ``--debug``.
"""

from __future__ import annotations

from typing import ClassVar


class HetdeployError(Exception):
    """Something failed. ``problem`` names the cause; ``fix`` the command, flag or action that mends it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


class UsageError(HetdeployError):
    """The command line, a setting or a file is wrong."""

    exit_code = 2


class PreflightError(HetdeployError):
    """This machine is not ready."""

    exit_code = 3


class PeerUnreachable(HetdeployError):
    """The other machine cannot be reached, or is gone."""

    exit_code = 4


class VersionMismatch(HetdeployError):
    """The machines run versions that do not go together."""

    exit_code = 5


class Interrupted(HetdeployError):
    """Ctrl-C, or a SIGTERM from outside."""

    exit_code = 130
