"""Watching a job from the head's terminal: lines as they come, the outcome at the end, Ctrl-C on the way."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetdeploy.errors import HetdeployError
from hetdeploy.nodes.head import Started
from hetdeploy.nodes.job import RunFolder
from hetdeploy.nodes.journal import Event, JournalReader
from hetdeploy.nodes.outcome import Outcome
from hetdeploy.nodes.runtime import RENDEZVOUS

STOP_SECONDS = 40.0
"""After Ctrl-C: how long all machines may take to stop before the head's own processes are ended all the same."""

_POLL_SECONDS = 0.1
_PROBE_SECONDS = 1.0


def follow(started: Started, on_event: Callable[[Event], None], on_interrupt: Callable[[], None]) -> Outcome:
    """Hand every event of the job to ``on_event`` until it is over. The first Ctrl-C stops the job on all machines.

    Raises HetdeployError when the head's processes end without an outcome.
    """
    with _interrupts() as interrupted:
        return _follow(started, on_event, on_interrupt, interrupted)


def watch(started: Started, on_event: Callable[[Event], None]) -> Outcome:
    """The same without a hand on the job: Ctrl-C ends the watching alone."""
    return _follow(started, on_event, lambda: None, threading.Event())


def stop(started: Started) -> Outcome | None:
    """End a running job on all machines and wait for the outcome; None when it does not run."""
    if not started.runtime.is_running() or started.runtime.ended():
        return None
    asked = threading.Event()
    asked.set()
    return _follow(started, lambda event: None, lambda: None, asked)


def _follow(
    started: Started,
    on_event: Callable[[Event], None],
    on_interrupt: Callable[[], None],
    interrupted: threading.Event,
) -> Outcome:
    reader = JournalReader(started.run.journal)
    next_probe = time.monotonic() + _PROBE_SECONDS
    stop_by = float("inf")
    gone = False
    while True:
        for event in reader.new_events():
            on_event(event)
            if event["event"] == "outcome":
                return Outcome.from_json({key: event[key] for key in ("exit_code", "summary", "failures")})
        if gone:
            last = " / ".join(started.runtime.last_lines(RENDEZVOUS)[-3:])
            raise HetdeployError(f"the rendezvous ended without telling how the job did: {last}")
        if interrupted.is_set() and stop_by == float("inf"):
            on_interrupt()
            started.runtime.interrupt()
            stop_by = time.monotonic() + STOP_SECONDS
        if time.monotonic() > stop_by:
            return Outcome(130, f"not all machines confirmed within {STOP_SECONDS:.0f} s that they stopped")
        if time.monotonic() > next_probe:
            # One more look at the journal follows: the outcome may have been written just before the end.
            gone = not started.runtime.is_running()
            next_probe = time.monotonic() + _PROBE_SECONDS
        time.sleep(_POLL_SECONDS)


def read_status(run: RunFolder) -> dict[str, Any] | None:
    """The coordinator's newest snapshot, or None before there is one."""
    try:
        status: dict[str, Any] = json.loads(run.status.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return status


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM as an event. A second Ctrl-C acts at once."""
    event = threading.Event()

    def interrupt(_signum: int, _frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
