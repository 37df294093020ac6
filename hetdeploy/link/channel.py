"""A control connection: messages both ways, in one thread, until one side says goodbye or the connection is lost."""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from selectors import EVENT_READ, PollSelector
from typing import Any

from hetdeploy.link import frames
from hetdeploy.link.endpoint import End, EndFailed
from hetdeploy.link.interrupt import Wakeup

QUEUE_BYTES = 4 * 1024 * 1024
"""Messages waiting to be sent, beyond which send() waits."""

GOODBYE_SECONDS = 5.0
"""For what is queued, the goodbye behind it and the peer's hanging up."""

_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ended:
    """Why a channel is over; ``goodbye`` if one side said that it would be."""

    reason: str
    goodbye: bool


class Channel:
    """Owns the socket, an authenticated TLS connection, and closes it when run() ends.

    In a frame: ``{"message": {...}}``, or as the last one ``{"goodbye": reason}``.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.ended: Ended | None = None
        self._sock = sock
        self._end = End(sock)
        self._wakeup = Wakeup()
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._goodbye_at: float | None = None
        self._abort_reason: str | None = None

    def send(self, message: dict[str, Any], wait: float = 0.0) -> bool:
        """Queue a message. False if there was no room within ``wait`` seconds, or the channel is over.

        Raises FrameError for a message that is too large.
        """
        frame = frames.encode({"message": message})
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self._queued_bytes < QUEUE_BYTES, timeout=wait)
            if self.is_over or self._queued_bytes >= QUEUE_BYTES:
                return False
            self._push(frame)
        return True

    def close(self, reason: str) -> None:
        """Say goodbye, once all that is queued is sent. Does not wait."""
        with self._changed:
            if not self.is_over:
                self._push(frames.encode({"goodbye": reason}))
                self._goodbye_at = time.monotonic()

    def abort(self, reason: str) -> None:
        """Have run() end at once, with a reset. Callable from any thread, any number of times."""
        with self._changed:
            if self._abort_reason is None:
                self._abort_reason = reason
            self._changed.notify_all()
        self._wakeup.wake()

    def run(self, take: Callable[[dict[str, Any]], None]) -> Ended:
        """Hand each message to ``take``, in this thread, until the end. While ``take`` works no more are read."""
        ended = Ended("internal error", goodbye=False)
        try:
            ended = self._converse(take)
        finally:
            self._end.close(reset=not ended.goodbye)
            self._wakeup.close()
            with self._changed:
                self.ended = ended
                self._changed.notify_all()
        return ended

    def _converse(self, take: Callable[[dict[str, Any]], None]) -> Ended:
        try:
            self._end.prepare()
            with PollSelector() as selector:
                selector.register(self._wakeup.reader, EVENT_READ)
                selector.register(self._sock, EVENT_READ)
                return self._loop(selector, take)
        except (EndFailed, BrokenPipeError) as error:
            if self._goodbye_at is not None:
                return Ended("we said goodbye", goodbye=True)  # and the peer did not wait for more
            return Ended(f"the connection broke: {error}", goodbye=False)
        except frames.FrameError as error:
            return Ended(error.problem, goodbye=False)

    def _loop(self, selector: PollSelector, take: Callable[[dict[str, Any]], None]) -> Ended:
        reader = frames.FrameReader()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        outgoing: deque[memoryview] = deque()
        half_closed = False
        while True:
            if self._abort_reason is not None:
                return Ended(self._abort_reason, goodbye=self._goodbye_at is not None)
            if self._goodbye_at is not None and time.monotonic() > self._goodbye_at + GOODBYE_SECONDS:
                return Ended("we said goodbye", goodbye=True)
            flushed = self._send_queued(outgoing)
            if flushed and self._goodbye_at is not None and not half_closed:
                half_closed = flushed = self._end.half_close()
            interest = self._end.read_event if flushed else self._end.read_event | self._end.write_event
            selector.modify(self._sock, interest)
            selector.select(self._timeout())
            self._wakeup.clear()
            count = self._end.read(buffer)
            if count == 0:
                return Ended("the connection was closed", goodbye=self._goodbye_at is not None)
            for message in reader.feed(buffer[:count]) if count else ():
                if "goodbye" in message:
                    return Ended(str(message["goodbye"]), goodbye=True)
                if not isinstance(message.get("message"), dict):
                    raise frames.FrameError("a frame on the control connection holds no message")
                take(message["message"])

    def _send_queued(self, outgoing: deque[memoryview]) -> bool:
        """Send some, and not all there may ever be: reading has its turn too. True when nothing is left to be sent."""
        if not outgoing:
            taken = 0
            with self._changed:
                while self._queue and taken < _CHUNK_BYTES:
                    outgoing.append(memoryview(self._queue.popleft()))
                    taken += len(outgoing[-1])
                self._queued_bytes -= taken
                self._changed.notify_all()
        return self._end.write(outgoing) and not self._queue

    def _timeout(self) -> float | None:
        if self._end.readable_now:
            return 0.0
        if self._goodbye_at is not None:
            return max(0.0, self._goodbye_at + GOODBYE_SECONDS - time.monotonic())
        return None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent."""
        return self.ended is not None or self._goodbye_at is not None or self._abort_reason is not None

    def _push(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._wakeup.wake()
