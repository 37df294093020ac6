"""A port on which every connection gets a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from selectors import EVENT_READ, PollSelector

from hetdeploy.link.endpoint import close_with_reset
from hetdeploy.link.interrupt import Wakeup

BACKLOG = 128
FULL_SECONDS = 0.2
"""Pause after a connection that could not be taken for want of descriptors, memory or threads."""

log = logging.getLogger(__name__)


class Listener:
    """Listens from the start; accepts between start() and stop().

    ``serve(sock, peer)`` owns the socket; ``peer`` is "address:port". Raises OSError if the address cannot be had.
    """

    def __init__(self, address: tuple[str, int], name: str, serve: Callable[[socket.socket, str], None]) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._name = name
        self._serve = serve
        self._threads: set[threading.Thread] = set()
        self._stopped = False
        self._wakeup = Wakeup()
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def stop(self) -> None:
        """Close the port. Connections that were accepted go on."""
        self._stopped = True
        self._wakeup.wake()
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._socket.close()
        self._wakeup.close()

    def join(self, seconds: float) -> None:
        """After stop(): wait until all connections have ended, ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        with PollSelector() as selector:
            selector.register(self._socket, EVENT_READ)
            selector.register(self._wakeup.reader, EVENT_READ)
            while not self._stopped:
                selector.select()
                try:
                    sock, address = self._socket.accept()
                except (BlockingIOError, ConnectionError):  # it was the wake-up, or the peer is gone already
                    continue
                except OSError as error:
                    log.warning("%s: cannot accept connections at the moment: %s", self._name, error)
                    time.sleep(FULL_SECONDS)
                    continue
                self._spawn(sock, f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}")

    def _spawn(self, sock: socket.socket, peer: str) -> None:
        thread = threading.Thread(target=self._serve, args=(sock, peer), name=f"{self._name}-{peer}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("%s: no thread for %s: %s", self._name, peer, error)
            close_with_reset(sock)
            time.sleep(FULL_SECONDS)
            return
        self._threads = {other for other in self._threads if other.is_alive()} | {thread}
