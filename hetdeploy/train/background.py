"""One daemon thread that runs jobs in the order they were given: what lets an exchange go on while the script
computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the job that is running. A job stuck in a dead peer's socket is left to the daemon
thread.
"""


class Background:
    """Runs jobs one after the other in a thread of its own. Order of submission is order of execution.

    Collectives are matched across ranks by the order in which they are started, so whatever starts them runs here.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue ``job``; its result, or what it raised, comes back through the future."""
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001  (belongs to whoever asks for the result)
                future.set_exception(error)
            # A future keeps its result, the loop variable would keep the buffers inside the job until the next one.
            del entry, future, job
