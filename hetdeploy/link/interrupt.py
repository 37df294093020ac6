"""Getting at a thread that waits on a socket, from another thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Wakeup:
    """Ends another thread's wait in a selector: that thread registers ``reader`` and clears it when it is readable."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()

    def wake(self) -> None:
        """From any thread; does nothing after close()."""
        with self._lock:
            if self._writer.fileno() >= 0:
                with suppress(BlockingIOError):  # full of wake-ups that nobody has noticed yet
                    self._writer.send(b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            self.reader.recv(4096)

    def close(self) -> None:
        with self._lock:
            self.reader.close()
            self._writer.close()


class Breaker:
    """What to cut when something ends that many threads take part in, such as a session with its streams."""

    def __init__(self) -> None:
        self.tripped: str | None = None
        """The reason, once it has been tripped."""
        self._cuts: dict[object, Callable[[str], None]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def guard(self, cut: Callable[[str], None]) -> Iterator[None]:
        """While this is held a trip calls ``cut(reason)``, from the tripping thread; at once if it tripped before.

        ``cut`` must not wait. It is never called after the guard is left, so what it cuts may be closed then.
        """
        token = object()
        with self._lock:
            self._cuts[token] = cut
            if self.tripped is not None:
                cut(self.tripped)
        try:
            yield
        finally:
            with self._lock:
                self._cuts.pop(token, None)

    def trip(self, reason: str) -> None:
        """Cut all that is guarded, and all that will be."""
        with self._lock:
            if self.tripped is None:
                self.tripped = reason
                for cut in self._cuts.values():
                    cut(reason)

    def cut_oldest(self, reason: str, keep: int) -> None:
        """Cut what has been guarded longest, if that is more than ``keep`` in number."""
        with self._lock:
            if len(self._cuts) > keep:
                self._cuts.pop(next(iter(self._cuts)))(reason)


def hang_up(sock: socket.socket) -> None:
    """End both directions, so that whoever waits on the socket, in whatever call, is woken. It stays open."""
    # Not sock.shutdown: on a TLS socket that drops the TLS state under the feet of the thread that uses it.
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
