"""The head's end of the link: one TCP port, a thread for every connection.

Whatever a stranger sends may cost him his connection and nothing else: the number of strangers is capped, what they may
send is small, and they have a few seconds for it.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hetdeploy.errors import HetdeployError, PreflightError
from hetdeploy.link import frames, handshake, heartbeat
from hetdeploy.link.credentials import HEAD, JOINER, Credentials, Verdict, prove
from hetdeploy.link.endpoint import close_with_reset, tune
from hetdeploy.link.handshake import CONTROL, FILE, HEARTBEAT, MEETING, NODE_PREFIX, STREAM, Refused
from hetdeploy.link.interrupt import Breaker, hang_up
from hetdeploy.link.listener import Listener
from hetdeploy.link.meeting import Meetings
from hetdeploy.link.member import Handler, Member
from hetdeploy.link.relay import Relay

__all__ = ["Handler", "LinkServer", "Member", "Refused"]

MAX_STRANGERS = 64
"""Connections that have not proved anything yet. One more, and the oldest of them is closed: an honest peer needs
milliseconds, so it gets through even while somebody opens connections to sit on them."""

DIAL_SECONDS = 10.0
FILE_STALL_SECONDS = 30.0
"""How long a member may take no byte of a file that it has asked for."""
CLOSE_SECONDS = 5.0
ANSWER_SECONDS = 2.0
"""For telling somebody why he is refused."""

_FILE_CHUNK_BYTES = 256 * 1024
_STRANGER = "a stranger"
_STRANGER_BY_TLS = "a stranger who speaks TLS"
_HUNG_UP = "it hung up"

_VERDICTS = {
    Verdict.WRONG: "this join code is not one of this head's",
    Verdict.EXPIRED: "this join code has expired",
    Verdict.ROTATED: "this join code was replaced by a newer one",
}

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LinkServer:
    """Serves from start() until close(). ``credentials``: the folder that Credentials.create() filled.

    ``heartbeat_seconds``: the interval, and the silence after which a member is lost.
    """

    def __init__(
        self,
        credentials: Path,
        address: tuple[str, int],
        handler: Handler,
        *,
        handshake_seconds: float = handshake.HANDSHAKE_SECONDS,
        heartbeat_seconds: tuple[float, float] = (heartbeat.INTERVAL_SECONDS, heartbeat.SILENCE_SECONDS),
        dial_seconds: float = DIAL_SECONDS,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._folder = credentials
        self._address = address
        self._handler = handler
        self._handshake_seconds = handshake_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._dial_seconds = dial_seconds
        self._max_strangers = max_strangers
        self._strangers = Breaker()
        self._members: dict[str, Member] = {}
        self._meetings = Meetings()
        self._lock = threading.Lock()
        self._admission = threading.Lock()
        self._closing = False
        self._listener: Listener | None = None

    def start(self) -> None:
        """Listen, and accept in a thread. Raises PreflightError if the port cannot be had, or as Credentials.load()."""
        self._credentials, self._version = Credentials.load(self._folder), self._file_version()
        self._pin = self._credentials.pin
        self._context = handshake.server_context(self._credentials.certificate, self._credentials.key)
        try:
            self._listener = Listener(self._address, "link", self._serve)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "error")
            raise PreflightError(
                f"the link cannot listen on {self._address[0]}:{self._address[1]} ({name}: {error.strerror})",
                "choose another with --port, or see who has it: `ss -ltnp` (macOS: `lsof -iTCP -sTCP:LISTEN`)",
            ) from error
        self._listener.start()

    @property
    def port(self) -> int:
        """The port that it listens on; chosen by the system if 0 was asked for."""
        assert self._listener is not None, "not started"
        return self._listener.port

    @property
    def members(self) -> list[Member]:
        """Everybody whose session is open."""
        with self._lock:
            return list(self._members.values())

    def close(self, reason: str = "the head has closed the link") -> None:
        """Say goodbye to all members, end all connections and join all threads."""
        if self._listener is None or self._closing:
            return
        self._closing = True
        self._listener.stop()
        self._strangers.trip(reason)
        for member in self.members:
            member.close(reason)
        self._listener.join(CLOSE_SECONDS)
        for member in self.members:
            member.cut(reason)
        self._listener.join(CLOSE_SECONDS)

    def _serve(self, raw: socket.socket, peer: str) -> None:
        """All of one connection's life."""
        started = time.monotonic()
        try:
            raw.setblocking(True)
            tune(raw)
            connection = _Connection(handshake.wrap(raw, self._context), peer)
        except (OSError, ValueError) as error:  # gone before it said anything
            raw.close()
            log.debug("%s: accepted, and gone: %s", peer, error)
            return
        try:
            outcome = self._converse(connection)
        except Refused as no:
            outcome = f"refused: {no.message}"
            connection.answer({"ok": False, "error": no.code, "message": no.message})
        except (OSError, HetdeployError) as error:
            outcome = connection.cut_reason or _describe(error)
        except Exception:  # whatever it is, it concerns this connection alone
            log.exception("%s: internal error", peer)
            outcome = "internal error"
        finally:
            connection.sock.close()
        # Whoever merely looks whether the port is open, as a health check does every few seconds, is not worth a line.
        level = logging.DEBUG if outcome == _HUNG_UP and connection.kind == _STRANGER else logging.INFO
        seconds = time.monotonic() - started
        log.log(level, "%s: accepted, %s, closed after %.1f s: %s", peer, connection.kind, seconds, outcome)

    def _converse(self, connection: _Connection) -> str:
        """From TLS to the end. Returns how it ended; raises Refused, OSError, HetdeployError."""
        deadline = time.monotonic() + self._handshake_seconds
        with self._strangers.guard(connection.cut):
            self._strangers.cut_oldest("too many connections that prove nothing", keep=self._max_strangers)
            nonce = handshake.greet(connection.sock, deadline)
            connection.kind = _STRANGER_BY_TLS
            request = frames.receive(connection.sock, frames.LIMIT_BEFORE_AUTHENTICATION, deadline)
            kind = request.get("kind")
            proof = _bytes(request.get("proof"))
            if kind == CONTROL:
                self._check_code(request, proof, handshake.challenge(nonce, self._pin, kind))
            elif kind in (HEARTBEAT, STREAM, FILE, MEETING):
                member = self._check_session(request, proof, handshake.challenge(nonce, self._pin, kind))
            else:
                raise Refused("kind", f"there are no connections of the kind {kind!r}")
        connection.kind = kind
        if kind == CONTROL:
            return self._control(connection, request)
        with member.breaker.guard(connection.cut):
            if kind == HEARTBEAT:
                return self._heartbeat(connection, member)
            if kind == FILE:
                return self._file(connection, member, request)
            if kind == MEETING:
                return self._come_to_meeting(connection, member, request)
            if str(request.get("host")).startswith(NODE_PREFIX):
                return self._meet(connection, member, request)
            relay, name = self._open_stream(connection, member, request)
        return self._carry(member, relay, name)

    def _check_code(self, request: dict[str, Any], proof: bytes, challenge: bytes) -> None:
        role = request.get("role")
        if role not in (JOINER, HEAD) or not isinstance(request.get("hello"), dict):
            raise Refused("request", "a control connection has a role, joiner or head, and a hello")
        verdict = self._current_credentials().judge(role, str(request.get("key")), proof, challenge)
        if verdict is not Verdict.GOOD:
            raise Refused(verdict.value, _VERDICTS[verdict])

    def _check_session(self, request: dict[str, Any], proof: bytes, challenge: bytes) -> Member:
        with self._lock:
            member = self._members.get(str(request.get("session")))
        if member is None or not hmac.compare_digest(proof, prove(member.key, challenge)):
            raise Refused("session", "this session is over")
        return member

    def _current_credentials(self) -> Credentials:
        """Codes are rotated by another process while this one runs."""
        with self._lock:
            try:
                version = self._file_version()
                if version != self._version:
                    self._credentials, self._version = Credentials.load(self._folder), version
            except (OSError, HetdeployError) as error:
                log.warning("codes cannot be checked: %s", error)
                raise Refused("server", "the head cannot read its codes; its log says why") from error
            return self._credentials

    def _file_version(self) -> tuple[int, int]:
        status = (self._folder / "secrets.json").stat()
        return status.st_ino, status.st_mtime_ns

    def _control(self, connection: _Connection, request: dict[str, Any]) -> str:
        deadline = time.monotonic() + self._handshake_seconds
        if not self._admission.acquire(timeout=self._handshake_seconds):
            raise Refused("busy", "another member is being admitted, and takes its time")
        try:
            role, hello = request["role"], request["hello"]
            welcome = self._ask(self._handler.admit, role, hello, connection.peer)
            member = Member(role, hello, connection.peer, welcome, connection.sock)
            try:
                self._welcome(connection, member, deadline)
            except BaseException as error:
                member.cut(f"it was not admitted: {error}")
                self._end(member)
                raise
        finally:
            self._admission.release()
        log.info("%s: accepted, %s, session %s", connection.peer, role, member.session[:8])
        reason = self._end(member)
        self._ask(self._handler.lost, member, reason)
        return reason

    def _welcome(self, connection: _Connection, member: Member, deadline: float) -> None:
        with self._lock:
            self._members[member.session] = member
        if self._closing:
            raise Refused("over", "the head is closing the link")
        answer = {"ok": True, "session": member.session, "key": member.key.hex(), "welcome": member.welcome}
        frames.send(connection.sock, answer, deadline)
        if not member.beating.wait(frames.remaining(deadline)):
            raise TimeoutError("no heartbeat connection followed")
        self._ask(self._handler.connected, member)

    def _end(self, member: Member) -> str:
        """Take the member's messages until its session is over, then cut all that belongs to it. Returns the reason."""

        def take(message: dict[str, Any]) -> None:
            try:
                self._handler.message(member, message)
            except Exception:  # the handler's fault or a malformed message: it costs this member only
                log.exception("%s: a message could not be handled", member.peer)
                member.cut("a message of it could not be handled (see the head's log)")

        ended = member.channel.run(take)
        member.said_goodbye = ended.goodbye
        with self._lock:
            self._members.pop(member.session, None)
        member.breaker.trip(ended.reason)
        return ended.reason

    def _heartbeat(self, connection: _Connection, member: Member) -> str:
        if member.beating.is_set():
            raise Refused("session", "this session has its heartbeat already")
        frames.send(connection.sock, {"ok": True}, time.monotonic() + self._handshake_seconds)
        member.beating.set()
        reason = heartbeat.beat(connection.sock, *self._heartbeat_seconds)
        member.cut(reason)
        return reason

    def _file(self, connection: _Connection, member: Member, request: dict[str, Any]) -> str:
        digest = request.get("digest")
        if not isinstance(digest, str):
            raise Refused("request", "a file is asked for by its digest")
        path = self._ask(self._handler.file, member, digest)
        try:
            file = path.open("rb")
        except OSError as error:
            raise Refused("file", f"the head cannot read the file {digest[:12]} ({error.strerror})") from error
        with file:
            size = os.fstat(file.fileno()).st_size
            frames.send(connection.sock, {"ok": True, "size": size}, time.monotonic() + self._handshake_seconds)
            connection.sock.settimeout(FILE_STALL_SECONDS)
            while chunk := file.read(_FILE_CHUNK_BYTES):
                connection.sock.sendall(chunk)
        return f"sent {size} bytes of {digest[:12]}"

    def _meet(self, connection: _Connection, member: Member, request: dict[str, Any]) -> str:
        """A stream to another joiner, which is asked to come for it."""
        name = str(request["host"]).removeprefix(NODE_PREFIX)
        target = self._ask(self._handler.meeting, member, name)
        with self._meetings.arranged(target) as meeting:
            sock = meeting.wait(self._dial_seconds)
            try:
                frames.send(connection.sock, {"ok": True}, time.monotonic() + self._handshake_seconds)
            except BaseException:
                close_with_reset(sock)
                raise
            return self._carry(member, Relay(connection.sock, sock), f"stream to {name}")

    def _come_to_meeting(self, connection: _Connection, member: Member, request: dict[str, Any]) -> str:
        meeting = self._meetings.find(member, request.get("id"))
        frames.send(connection.sock, {"ok": True}, time.monotonic() + self._handshake_seconds)
        meeting.arrive(connection.sock)
        meeting.over.wait()
        return "met"

    def _carry(self, member: Member, relay: Relay, name: str) -> str:
        with member.breaker.guard(relay.abort):
            return f"{name}: {relay.run()}"

    def _open_stream(self, connection: _Connection, member: Member, request: dict[str, Any]) -> tuple[Relay, str]:
        host, port = request.get("host"), request.get("port")
        if not isinstance(host, str) or type(port) is not int or not 0 < port < 65536:
            raise Refused("request", "a stream leads to a host and a port")
        address = self._ask(self._handler.dial_address, member, host, port)
        try:
            target = socket.create_connection(address, self._dial_seconds)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "ETIMEDOUT" if isinstance(error, TimeoutError) else str(error))
            raise Refused("unreachable", f"{host}:{port} does not answer the head ({name})") from error
        try:
            frames.send(connection.sock, {"ok": True}, time.monotonic() + self._handshake_seconds)
            return Relay(connection.sock, target), f"stream to {host}:{port}"
        except BaseException:
            target.close()
            raise

    def _ask(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The handler's answer. Raises Refused, also for what the handler did not foresee."""
        try:
            return call(*arguments)
        except Refused:
            raise
        except Exception as error:
            log.exception("%s failed", call)
            raise Refused("server", "the head failed over this request; its log has the details") from error


class _Connection:
    """A socket that its own thread serves and any other may cut."""

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.kind = _STRANGER
        self.cut_reason: str | None = None

    def cut(self, reason: str) -> None:
        self.cut_reason = reason
        hang_up(self.sock)

    def answer(self, message: dict[str, Any]) -> None:
        """Send a last word, if that can be done."""
        with suppress(OSError):
            frames.send(self.sock, message, time.monotonic() + ANSWER_SECONDS)


def _bytes(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        return b""


def _describe(error: Exception) -> str:
    if isinstance(error, HetdeployError):
        return error.problem
    if isinstance(error, TimeoutError):
        return "took too long"
    if isinstance(error, (ssl.SSLEOFError, ConnectionError)):
        return _HUNG_UP
    if isinstance(error, ssl.SSLError):
        return f"not TLS as it should be ({error.reason})"
    return str(error)
