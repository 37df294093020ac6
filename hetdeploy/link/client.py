"""The joiner's end of the link."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import ssl
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any, BinaryIO

from hetdeploy.errors import HetdeployError, PeerUnreachable, UsageError, VersionMismatch
from hetdeploy.link import heartbeat
from hetdeploy.link.channel import GOODBYE_SECONDS, Channel
from hetdeploy.link.credentials import key_id
from hetdeploy.link.handshake import CONTROL, FILE, HEARTBEAT, MEETING, STREAM, Approach, Refused
from hetdeploy.link.interrupt import Breaker, hang_up
from hetdeploy.link.invitation import Invitation

CONNECT_SECONDS = 10.0
DIAL_SECONDS = 20.0
"""For a stream: the server has 10 s of its own to reach the other end, and its answer has to come back."""
SEND_SECONDS = 60.0
"""How long the head may take no messages before that counts as failure."""
FILE_STALL_SECONDS = 30.0
"""How long the head may send no byte of a file."""

_FILE_CHUNK_BYTES = 256 * 1024

_CODE_FIXES = {
    "secret": "take the code that `hetdeploy code` prints on the head now",
    "expired": "make a new one with `hetdeploy code --rotate` on the head",
    "rotated": "take the code that `hetdeploy code` prints on the head now",
}

log = logging.getLogger(__name__)


class LinkClient:
    """One session with the head. Made by connect(); ends with close(), or when the head is lost.

    ``receive`` and ``send`` are for one thread each, all else for any.
    """

    def __init__(self, approach: Approach, answer: dict[str, Any], control: ssl.SSLSocket, skew: float) -> None:
        self.host = approach.host
        self.port = approach.port
        self.session = str(answer["session"])
        self.welcome: dict[str, Any] = answer["welcome"]
        """What the head's coordinator said."""
        self.clock_skew = skew
        """Seconds that the head's clock is ahead of this machine's; right to half a round trip."""
        self.lost = threading.Event()
        """Set when the session is over, whoever ended it. What had come before is still there for receive()."""
        self.lost_reason: str | None = None
        self._approach = approach
        self._key = bytes.fromhex(answer["key"])
        self._channel = Channel(control)
        # Not a SimpleQueue: before Python 3.13 a signal near the end of get()'s timeout makes it wait for ever.
        self._received: queue.Queue[dict[str, Any]] = queue.Queue()
        self._breaker = Breaker()
        self._streams: weakref.WeakSet[ssl.SSLSocket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @classmethod
    def connect(
        cls,
        invitation: Invitation,
        role: str,
        hello: dict[str, Any],
        source_address: str | None = None,
        timeout: float = CONNECT_SECONDS,
        *,
        heartbeat_seconds: tuple[float, float] = (heartbeat.INTERVAL_SECONDS, heartbeat.SILENCE_SECONDS),
    ) -> LinkClient:
        """Reach the head, make sure of it, be admitted; all within ``timeout`` seconds.

        ``source_address``: own address to connect from, for this and all later connections.

        Raises PeerUnreachable (nobody there, or not yet: worth another try), UsageError (wrong, expired or rotated
        code, another certificate), VersionMismatch, HetdeployError (no link there, or the head says no).
        """
        deadline = time.monotonic() + timeout
        approach = Approach(invitation.host, invitation.port, invitation.pin, source_address)
        fields = {"role": role, "key": key_id(invitation.secret), "hello": hello}
        try:
            control, answer, skew = approach.request(invitation.secret, CONTROL, fields, deadline)
        except Refused as no:
            raise _refusal(no, approach.where) from no
        client = cls(approach, answer, control, skew)
        try:
            client._start(heartbeat_seconds, deadline)
        except BaseException:
            client._channel.abort("the heartbeat could not be set up")
            client._channel.run(lambda _message: None)
            raise
        return client

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; waits while the head takes them more slowly than they come.

        Raises PeerUnreachable when the session is over, FrameError for a message over 1 MiB.
        """
        if not self._channel.send(message, wait=SEND_SECONDS):
            raise (
                self._gone()
                if self._channel.is_over
                else PeerUnreachable(
                    f"the head at {self._approach.where} has taken no messages for {SEND_SECONDS:g} s",
                    "see `hetdeploy status` there",
                )
            )

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message of the head; None if none comes within ``timeout`` seconds."""
        try:
            return self._received.get(timeout=timeout)
        except queue.Empty:
            return None

    def dial(self, host: str, port: int) -> ssl.SSLSocket:
        """A stream to host:port on the head's side, or to the joiner NAME where the host is "node:NAME".

        The caller owns it; it is cut when the session ends.

        Raises PeerUnreachable if that address, or the head, does not answer; HetdeployError if the head will not.
        """
        return self._open_stream(STREAM, {"host": host, "port": port}, f"a stream to {host}:{port}")

    def meet(self, meeting: str) -> ssl.SSLSocket:
        """The other end of a stream that another joiner has asked for, as a message {"type": "meet", "id"} said.

        Owned and cut as with dial(), and the same errors.
        """
        return self._open_stream(MEETING, {"id": meeting}, "a meeting with another joiner")

    def _open_stream(self, kind: str, fields: dict[str, Any], what: str) -> ssl.SSLSocket:
        sock, _ = self._open(kind, fields, DIAL_SECONDS, what)
        with self._lock:
            self._streams.add(sock)
        if self.lost.is_set():
            hang_up(sock)
        sock.settimeout(None)
        return sock

    def fetch(self, digest: str, size: int, destination: Path) -> None:
        """Get the file with this SHA-256 (hex) and size (bytes); ``destination`` is there whole, or as it was before.

        Raises HetdeployError if the head has no such file or sends another; PeerUnreachable if it goes away.
        """
        fields = {"digest": digest}
        sock, answer = self._open(FILE, fields, CONNECT_SECONDS, f"the file {destination.name}")
        with sock, self._breaker.guard(lambda _reason: hang_up(sock)):
            if answer.get("size") != size:
                raise HetdeployError(
                    f"the head's file {destination.name} has {answer.get('size')} bytes where {size} were announced",
                    "start the job again with `hetdeploy up`",
                )
            try:
                self._save(sock, destination, size, digest)
            except OSError as error:
                raise HetdeployError(
                    f"{destination} cannot be written ({error.strerror})", "see to its folder and disk"
                ) from error

    def close(self, reason: str = "it said goodbye") -> None:
        """Say goodbye, after all that was sent is delivered, and end streams and threads. May be called again."""
        self._channel.close(reason)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GOODBYE_SECONDS + 1.0)

    def _start(self, heartbeat_seconds: tuple[float, float], deadline: float) -> None:
        sock, _, _ = self._request(HEARTBEAT, {}, deadline)

        def keep_beating() -> None:
            with sock, self._breaker.guard(lambda _reason: hang_up(sock)):
                self._channel.abort(heartbeat.beat(sock, *heartbeat_seconds))

        self._threads = [
            threading.Thread(target=self._take_messages, name="link-control", daemon=True),
            threading.Thread(target=keep_beating, name="link-heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _take_messages(self) -> None:
        ended = self._channel.run(self._received.put)
        log.info("link to %s ended: %s", self._approach.where, ended.reason)
        self.lost_reason = ended.reason
        self.lost.set()
        self._breaker.trip(ended.reason)
        with self._lock:
            for sock in self._streams:
                hang_up(sock)

    def _open(
        self, kind: str, fields: dict[str, Any], seconds: float, what: str
    ) -> tuple[ssl.SSLSocket, dict[str, Any]]:
        if self.lost.is_set():
            raise self._gone()
        try:
            sock, answer, _ = self._request(kind, fields, time.monotonic() + seconds)
        except Refused as no:
            raise _refusal(no, f"{what} over the link to {self._approach.where}") from no
        return sock, answer

    def _request(
        self, kind: str, fields: dict[str, Any], deadline: float
    ) -> tuple[ssl.SSLSocket, dict[str, Any], float]:
        return self._approach.request(self._key, kind, {"session": self.session, **fields}, deadline)

    def _save(self, sock: ssl.SSLSocket, destination: Path, size: int, digest: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                self._download(sock, file, size, digest, destination.name)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(destination)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _download(self, sock: ssl.SSLSocket, file: BinaryIO, size: int, digest: str, name: str) -> None:
        """Copy ``size`` bytes and check them."""
        seen, missing = hashlib.sha256(), size
        buffer = memoryview(bytearray(_FILE_CHUNK_BYTES))
        sock.settimeout(FILE_STALL_SECONDS)
        while missing:
            try:
                count = sock.recv_into(buffer[: min(missing, len(buffer))])
            except OSError as error:
                raise self._broken_off(name, size - missing, size, str(error)) from error
            if count == 0:
                raise self._broken_off(name, size - missing, size, "the head closed the connection")
            seen.update(buffer[:count])
            file.write(buffer[:count])
            missing -= count
        if seen.hexdigest() != digest:
            raise HetdeployError(
                f"the head's file {name} is not the one that was announced (its SHA-256 is {seen.hexdigest()[:12]}...)",
                "start the job again with `hetdeploy up`",
            )

    def _broken_off(self, name: str, got: int, size: int, reason: str) -> PeerUnreachable:
        return PeerUnreachable(
            f"the file {name} came to {got} of {size} bytes from {self._approach.where} ({reason})", "join again"
        )

    def _gone(self) -> PeerUnreachable:
        return PeerUnreachable(
            f"the link to the head at {self._approach.where} has ended ({self.lost_reason or 'it is closing'})",
            "see `hetdeploy status` there",
        )


def _refusal(no: Refused, where: str) -> HetdeployError:
    if no.code in _CODE_FIXES:
        return UsageError(f"{where}: {no.message}", _CODE_FIXES[no.code])
    if no.code == "usage":
        return UsageError(f"{where}: {no.message}")
    if no.code == "version":
        return VersionMismatch(no.message)
    if no.code in ("unreachable", "session", "busy"):
        return PeerUnreachable(f"{where}: {no.message}")
    return HetdeployError(f"{where}: {no.message}")
