"""A port of this machine's loopback that leads to an address on the head's side."""

from __future__ import annotations

import logging
import socket
import threading
from selectors import EVENT_READ, PollSelector
from types import TracebackType

from hetdeploy.errors import HetdeployError
from hetdeploy.link.client import LinkClient
from hetdeploy.link.endpoint import close_with_reset
from hetdeploy.link.interrupt import Breaker, Wakeup
from hetdeploy.link.relay import Relay

LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 5.0

log = logging.getLogger(__name__)


class Forward:
    """Each connection to 127.0.0.1:``port`` becomes a stream to ``host``:``target_port`` over the link.

    If the stream cannot be opened the connection is reset, and the reason is kept in ``problems`` and logged.
    """

    def __init__(self, client: LinkClient, host: str, port: int) -> None:
        self.problems: list[HetdeployError] = []
        self._client = client
        self._target = (host, port)
        self._breaker = Breaker()
        self._wakeup = Wakeup()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        """The port on 127.0.0.1."""
        self._acceptor = threading.Thread(target=self._accept, name=f"forward-{host}:{port}", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close the port, reset its connections and join its threads."""
        self._breaker.trip("the forward is closed")
        self._wakeup.wake()
        for thread in [self._acceptor, *self._threads]:
            thread.join(JOIN_SECONDS)
        self._listener.close()
        self._wakeup.close()

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with PollSelector() as selector:
            selector.register(self._listener, EVENT_READ)
            selector.register(self._wakeup.reader, EVENT_READ)
            while self._breaker.tripped is None:
                selector.select()
                try:
                    sock, peer = self._listener.accept()
                except OSError:  # it was a wake-up, or the peer is gone already
                    continue
                name = f"forward-{self._target[0]}:{self._target[1]}-{peer[1]}"
                thread = threading.Thread(target=self._serve, args=(sock, name), name=name, daemon=True)
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]
                thread.start()

    def _serve(self, sock: socket.socket, name: str) -> None:
        try:
            stream = self._client.dial(*self._target)
        except HetdeployError as problem:
            log.warning("%s: %s", name, problem)
            self.problems.append(problem)
            close_with_reset(sock)
            return
        relay = Relay(sock, stream)
        with self._breaker.guard(relay.abort):
            log.info("%s: %s", name, relay.run())
