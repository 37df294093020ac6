"""The job's journal: one JSON object a line, appended by the coordinator alone, read by `up`, `status` and `logs`.

Every event has ``t`` (Unix seconds on the head's clock), ``node`` (a member's name, or "" for the job itself) and
``event``:

    joined   a member was admitted: peer, accelerator, nproc, os, torch
    state    a member's ranks changed state: state = starting | running | finished
    log      lines that a node's processes printed: lines = [[rank or null, text], ...]
    exit     a member's ranks are over: code, failures
    lost     a member went away without saying so: reason
    parted   a joiner's part in a crew is over, and the job goes on: code, text
    outcome  the job is over: exit_code, summary, and the failure that came first
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Appends events to ``path``. Safe for several threads; a reader sees whole lines only."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, node: str, event: str, **fields: Any) -> None:
        line = json.dumps({"t": round(time.time(), 3), "node": node, "event": event, **fields}) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)

    def close(self) -> None:
        with self._lock:
            self._file.close()


class JournalReader:
    """Reads the events that were appended since the last call. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return
        complete = chunk.rfind(b"\n") + 1
        self._offset += complete
        for line in chunk[:complete].splitlines():
            yield json.loads(line)
