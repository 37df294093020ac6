"""What the tests of the link share: connected sockets, a served link, an echo."""

from __future__ import annotations

import queue
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetdeploy.link.credentials import Credentials
from hetdeploy.link.server import LinkServer, Member, Refused

WAIT_SECONDS = 10.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    client.settimeout(WAIT_SECONDS)
    server.settimeout(WAIT_SECONDS)
    return client, server


def tls_pair(credentials: Credentials) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Two connected TLS sockets, the client's first. An end of stream without close_notify is an error on both."""
    raw_client, raw_server = tcp_pair()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(credentials.certificate, credentials.key)
    server_context.num_tickets = 0
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    server = server_context.wrap_socket(
        raw_server, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
    )
    handshake = threading.Thread(target=server.do_handshake)
    handshake.start()
    client = client_context.wrap_socket(raw_client, suppress_ragged_eofs=False)
    handshake.join()
    return client, server


def reset(sock: socket.socket) -> None:
    """Close with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def receive_all(sock: socket.socket) -> bytes:
    """Everything until the end of the stream."""
    data = bytearray()
    while chunk := sock.recv(1 << 16):
        data += chunk
    return bytes(data)


class Recorder:
    """A handler that lets everybody in, echoes messages, and keeps what it was told."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.files: dict[str, Path] = {}
        self.named: dict[str, Member] = {}
        """Who can be met, by name."""
        self.refusal: Refused | None = None
        self.gate = threading.Event()
        """While this is not set messages are not taken."""
        self.gate.set()

    def admit(self, role: str, hello: dict[str, Any], peer: str) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        return {"role": role, "hello": hello, "peer": peer}

    def connected(self, member: Member) -> None:
        self.events.put(("connected", member))

    def message(self, member: Member, msg: dict[str, Any]) -> None:
        assert self.gate.wait(WAIT_SECONDS * 3)
        if msg.get("break"):
            raise KeyError("a bug of the handler")
        if not msg.get("quiet"):
            member.send({"echo": msg})

    def lost(self, member: Member, reason: str) -> None:
        self.events.put(("lost", member, reason))

    def dial_address(self, member: Member, host: str, port: int) -> tuple[str, int]:
        if host != "inside":
            raise Refused("dial", f"{host}:{port} does not belong to this job")
        return "127.0.0.1", port

    def meeting(self, member: Member, name: str) -> Member:
        try:
            return self.named[name]
        except KeyError:
            raise Refused("dial", f"no other joiner of this job is called {name}") from None

    def file(self, member: Member, digest: str) -> Path:
        if digest not in self.files:
            raise Refused("file", f"no file has the digest {digest[:12]}")
        return self.files[digest]

    def next_event(self, kind: str, seconds: float = WAIT_SECONDS) -> tuple[Any, ...]:
        event = self.events.get(timeout=seconds)
        assert event[0] == kind
        return event


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[tuple[LinkServer, Recorder]]:
    """A link server on loopback with the credentials in ``folder``."""
    handler = Recorder()
    server = LinkServer(folder, ("127.0.0.1", 0), handler, **options)
    server.start()
    try:
        yield server, handler
    finally:
        server.close()


@contextmanager
def echo_port() -> Iterator[int]:
    """A port that answers each connection with what it sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo(sock: socket.socket) -> None:
            with sock:
                try:
                    while data := sock.recv(1 << 16):
                        sock.sendall(data)
                except ConnectionError:
                    pass

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=echo, args=(sock,)))
                threads[-1].start()

        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(WAIT_SECONDS)
