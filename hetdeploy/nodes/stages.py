"""The sequence that `up` and `join` go through, one line a stage with its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_NOTE_SECONDS = 5.0
"""A stage that waits says so again after this long."""


class Stage:
    """One step. ``done`` is what its line will say; ``waiting`` reports what is awaited, at most every few seconds."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._started = time.monotonic()
        self._noted = float("-inf")
        self.text = ""

    def done(self, text: str) -> None:
        self.text = text

    def waiting(self, text: str) -> None:
        now = time.monotonic()
        if now - self._noted >= WAIT_NOTE_SECONDS:
            self._noted = now
            self._say(f"{self._name:<11} waiting for {text}, {now - self._started:.0f} s")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


class Stages:
    """Prints stages, notes and warnings through ``say`` (a line at a time)."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        stage = Stage(name, self.say)
        yield stage
        self.say(f"{name:<11} {stage.text} ({stage.seconds:.1f} s)")

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")
