"""How the head's processes are run: the interface that containers and native processes share."""

from __future__ import annotations

from typing import Protocol

from hetdeploy.nodes.stages import Stage

RENDEZVOUS = "rendezvous"
RANK = "rank"
TENSORBOARD = "tensorboard"
"""Beside the two that a job needs, when it is asked for: nothing depends on it."""


class Runtime(Protocol):
    """Starts and ends *rendezvous* and *rank*, and *tensorboard*. Each method has a deadline of its own."""

    name: str

    def prepare(self, stage: Stage) -> None:
        """Have ready what the processes are started from, building it if need be."""

    def start_rendezvous(self, stage: Stage) -> None:
        """Start the rendezvous and return when it answers. Raises PreflightError with its last lines if it does not."""

    def start_rank(self) -> None:
        """Start the head's member."""

    def start_tensorboard(self, stage: Stage) -> None:
        """Start TensorBoard over all runs and return when it answers. Raises PreflightError if it does not."""

    def ended(self) -> dict[str, int]:
        """The exit codes of those of *rendezvous* and *rank* that have ended."""

    def is_running(self) -> bool:
        """Whether the rendezvous of this folder runs, whoever started it."""

    def last_lines(self, service: str) -> list[str]:
        """The last lines that a service printed."""

    def interrupt(self) -> None:
        """Ask the rendezvous to end the job on all machines."""

    def remove(self) -> bool:
        """End what still runs and leave nothing behind. Returns whether there was anything."""
