"""How a connection to the link begins, on both sides.

    client -> server   TLS 1.3; the client compares the certificate with the pin before it says anything
    server -> client   {"link": 1, "nonce": hex, "time": Unix seconds}
    client -> server   {"kind", "proof", ...}: for control with "role", "key" and "hello", else with "session"
    server -> client   {"ok": true, ...} or {"ok": false, "error": code, "message": text}

The proof is an HMAC-SHA256 over nonce, pin and kind: keyed with the code's secret for a control connection, with the
session's key for all others. One nonce serves one connection, so a proof cannot be used again; the pin in it makes it
worthless to anybody who poses as the head.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hetdeploy.errors import HetdeployError, PeerUnreachable, UsageError, VersionMismatch
from hetdeploy.link import frames
from hetdeploy.link.credentials import pin_of, prove
from hetdeploy.link.endpoint import tune
from hetdeploy.network.connect import explain_connect_error
from hetdeploy.network.interfaces import Interface, interface_of

LINK_VERSION = 1
"""Of everything in this package that two machines have to agree on."""

CONTROL, HEARTBEAT, STREAM, FILE, MEETING = "control", "heartbeat", "stream", "file", "meeting"

NODE_PREFIX = "node:"
"""A stream to this prefix and a name leads to another joiner, whom the server asks to come and meet it."""

HANDSHAKE_SECONDS = 10.0
"""From the first byte of TLS to the client's proof."""

_NONCE_BYTES = 16


class Refused(Exception):
    """A request that the server answers with "no". ``code`` is for programs, ``message`` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def challenge(nonce: str, pin: bytes, kind: str) -> bytes:
    """What a proof is made over."""
    return b"\0".join((nonce.encode(), pin.hex().encode(), kind.encode()))


class _Socket(ssl.SSLSocket):
    """A TLS socket that can be made of a connection that is gone already; the handshake will find that out.

    ssl.SSLSocket asks for the peer while it is being made and, where there is none any more, may leave itself open.
    """

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            return ("gone", 0)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    # Nobody resumes sessions here, and a ticket that the client has not read turns its close into a reset.
    context.num_tickets = 0
    return context


def wrap(raw: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Server: the TLS socket, which takes over ``raw``'s descriptor. Nothing is sent or awaited yet."""
    return context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False)


def greet(sock: ssl.SSLSocket, deadline: float) -> str:
    """Server: TLS, then the first frame. Returns the nonce."""
    sock.settimeout(frames.remaining(deadline))
    sock.do_handshake()
    nonce = secrets.token_hex(_NONCE_BYTES)
    frames.send(sock, {"link": LINK_VERSION, "nonce": nonce, "time": time.time()}, deadline)
    return nonce


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _Socket
    return context


class Approach:
    """Client: the way to one server, for any number of connections.

    Errors say which address, and what became of it: PeerUnreachable is worth another try later, all else is not.
    """

    def __init__(self, host: str, port: int, pin: bytes, source_address: str | None = None) -> None:
        self.host = host
        self.port = port
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.pin = pin
        self._source = source_address
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False  # there is no authority to trust: the pin decides
        self._context.verify_mode = ssl.CERT_NONE

    def open(self, deadline: float) -> tuple[ssl.SSLSocket, str, float]:
        """Connect and compare the certificate. Returns socket, nonce, and how far the server's clock is ahead (s).

        The clock reading is off by half the round trip at most.
        """
        raw = self._connect(deadline)
        sock = self._context.wrap_socket(raw, do_handshake_on_connect=False, suppress_ragged_eofs=False)
        try:
            with self._explained("TLS handshake"):
                tune(sock)
                sock.settimeout(frames.remaining(deadline))
                sock.do_handshake()
            self._check_pin(sock)
            started = time.time()
            first = self.receive(sock, deadline)
            half_way = (started + time.time()) / 2
            if first.get("link") != LINK_VERSION:
                raise VersionMismatch(
                    f"the head at {self.where} speaks link protocol {first.get('link')!r}, this machine {LINK_VERSION}",
                    "install the same hetdeploy on both machines",
                )
        except BaseException:
            sock.close()
            raise
        return sock, str(first.get("nonce")), float(first.get("time", half_way)) - half_way

    def request(
        self, key: bytes, kind: str, fields: dict[str, Any], deadline: float
    ) -> tuple[ssl.SSLSocket, dict[str, Any], float]:
        """Open a connection of a kind. Returns socket, the server's answer and its clock's lead. Raises Refused too."""
        sock, nonce, skew = self.open(deadline)
        try:
            proof = prove(key, challenge(nonce, self.pin, kind)).hex()
            frame = frames.encode({"kind": kind, "proof": proof, **fields}, frames.LIMIT_BEFORE_AUTHENTICATION)
            with self._explained("request"):
                sock.settimeout(frames.remaining(deadline))
                sock.sendall(frame)
            answer = self.receive(sock, deadline)
            if answer.get("ok") is not True:
                raise Refused(str(answer.get("error")), str(answer.get("message")))
        except BaseException:
            sock.close()
            raise
        return sock, answer, skew

    def receive(self, sock: ssl.SSLSocket, deadline: float) -> dict[str, Any]:
        with self._explained("answer"):
            return frames.receive(sock, frames.LIMIT, deadline)

    def _connect(self, deadline: float) -> socket.socket:
        source = (self._source, 0) if self._source else None
        try:
            return socket.create_connection((self.host, self.port), frames.remaining(deadline), source)
        except OSError as error:
            raise explain_connect_error(error, self.host, self.port, self._interface()) from error

    def _interface(self) -> Interface | None:
        """The NIC that connections leave by, if it is asked for and still has its address."""
        with suppress(HetdeployError):
            return interface_of(self._source) if self._source else None
        return None

    def _check_pin(self, sock: ssl.SSLSocket) -> None:
        certificate = sock.getpeercert(binary_form=True)
        if certificate is None or not hmac.compare_digest(pin_of(certificate), self.pin):
            raise UsageError(
                f"{self.where} answers with another certificate than the one that the join code is for",
                "take the code that `hetdeploy code` prints there now; if it is that one, something poses as the head",
            )

    @contextmanager
    def _explained(self, step: str) -> Iterator[None]:
        """What goes wrong in a step, in terms of the peer."""
        try:
            yield
        except TimeoutError as error:
            raise PeerUnreachable(
                f"{self.where} accepted the connection and then went silent ({step})",
                "see whether the head is overloaded",
            ) from error
        except (ssl.SSLEOFError, ConnectionError) as error:
            raise self._hung_up(step, error) from error
        except (ssl.SSLError, frames.FrameError) as error:
            raise HetdeployError(
                f"what answers at {self.where} is not a hetdeploy link ({step}: {_name(error)})",
                "check address and port, and what listens there",
            ) from error
        except OSError as error:
            raise PeerUnreachable(f"the connection to {self.where} broke ({step}: {_name(error)})") from error

    def _hung_up(self, step: str, error: Exception) -> PeerUnreachable:
        return PeerUnreachable(
            f"{self.where} accepted the connection and closed it ({step}: {_name(error)})",
            "see `hetdeploy status` and `hetdeploy logs` on the head, which may be starting or stopping",
        )


def _name(error: Exception) -> str:
    if isinstance(error, HetdeployError):
        return error.problem
    if isinstance(error, ssl.SSLError):
        return error.reason or "end of stream"
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error))
    return str(error)
