"""A port of this machine's loopback that leads to an address on the head's side."""

from __future__ import annotations

import logging
import socket
from collections import deque
from types import TracebackType

from hetdeploy.errors import HetdeployError
from hetdeploy.link.client import LinkClient
from hetdeploy.link.endpoint import close_with_reset
from hetdeploy.link.interrupt import Breaker
from hetdeploy.link.listener import Listener
from hetdeploy.link.relay import Relay

LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 5.0
PROBLEMS_KEPT = 20

log = logging.getLogger(__name__)


class Forward:
    """Each connection to 127.0.0.1:``port`` becomes a stream to ``host``:``target_port`` over the link.

    If the stream cannot be opened the connection is reset, and the reason is kept in ``problems`` and logged.
    """

    def __init__(self, client: LinkClient, host: str, port: int) -> None:
        self.problems: deque[HetdeployError] = deque(maxlen=PROBLEMS_KEPT)
        self._client = client
        self._target = (host, port)
        self._breaker = Breaker()
        self._listener = Listener((LOOPBACK, 0), f"forward-{host}:{port}", self._serve)
        self.port = self._listener.port
        """The port on 127.0.0.1."""
        self._listener.start()

    def close(self) -> None:
        """Close the port, reset its connections and join its threads."""
        self._listener.stop()
        self._breaker.trip("the forward is closed")
        self._listener.join(JOIN_SECONDS)

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        name = f"forward of {peer} to {self._target[0]}:{self._target[1]}"
        try:
            stream = self._client.dial(*self._target)
        except HetdeployError as problem:
            log.warning("%s: %s", name, problem)
            self.problems.append(problem)
            close_with_reset(sock)
            return
        try:
            relay = Relay(sock, stream)
        except OSError as error:
            log.warning("%s: %s", name, error)
            return
        with self._breaker.guard(relay.abort):
            log.info("%s: %s", name, relay.run())
