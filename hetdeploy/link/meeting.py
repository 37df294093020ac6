"""Two joiners cannot dial each other, but both can dial the head: one asks for the other, who comes to meet it."""

from __future__ import annotations

import queue
import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hetdeploy.link.handshake import Refused
from hetdeploy.link.member import Member


class Meeting:
    """One joiner's wish to speak to ``target``, until the connection that comes of it has ended."""

    def __init__(self, target: Member) -> None:
        self.id = secrets.token_hex(16)
        self.target = target
        self.over = threading.Event()
        self._arrived: queue.Queue[ssl.SSLSocket] = queue.Queue(maxsize=1)

    def arrive(self, sock: ssl.SSLSocket) -> None:
        """The target's end. Raises Refused for a second one."""
        try:
            self._arrived.put_nowait(sock)
        except queue.Full:
            raise Refused("meeting", "this meeting has taken place already") from None

    def wait(self, seconds: float) -> ssl.SSLSocket:
        """The target's connection. Raises Refused if it does not come."""
        try:
            return self._arrived.get(timeout=seconds)
        except queue.Empty:
            raise Refused("unreachable", f"{self.target.peer} did not come to meet within {seconds:g} s") from None


class Meetings:
    """The meetings that are on."""

    def __init__(self) -> None:
        self._by_id: dict[str, Meeting] = {}
        self._lock = threading.Lock()

    @contextmanager
    def arranged(self, target: Member) -> Iterator[Meeting]:
        """A meeting that ``target`` has been asked to; over when the block is left."""
        meeting = Meeting(target)
        with self._lock:
            self._by_id[meeting.id] = meeting
        try:
            target.send({"type": "meet", "id": meeting.id})
            yield meeting
        finally:
            meeting.over.set()
            with self._lock:
                self._by_id.pop(meeting.id, None)

    def find(self, member: Member, meeting_id: object) -> Meeting:
        """The meeting that ``member`` comes for. Raises Refused when there is none (any more)."""
        with self._lock:
            meeting = self._by_id.get(str(meeting_id))
        if meeting is None or meeting.target is not member:
            raise Refused("meeting", "this meeting is over")
        return meeting
