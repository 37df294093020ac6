"""What a joiner is told when the head is not there, not yet there, or something else is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from link_peers import WAIT_SECONDS, reset, served

from hetdeploy.errors import HetdeployError, PeerUnreachable, PreflightError, UsageError, VersionMismatch
from hetdeploy.link import frames, handshake
from hetdeploy.link.client import LinkClient
from hetdeploy.link.credentials import JOINER, Credentials
from hetdeploy.link.server import LinkServer


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.create(tmp_path_factory.mktemp("link"), 600)


def connect(credentials: Credentials, host: str, port: int, source: str | None = None, timeout: float = 10.0) -> None:
    LinkClient.connect(credentials.invitation(JOINER, host, port), JOINER, {}, source, timeout).close()


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port where one connection is given to ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, suppress(OSError):
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(WAIT_SECONDS)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_nobody_there(credentials: Credentials) -> None:
    port = closed_port()
    with pytest.raises(PeerUnreachable, match=rf"cannot reach 127\.0\.0\.1:{port} .*\(ECONNREFUSED\): .*hetdeploy up"):
        connect(credentials, "127.0.0.1", port)


def test_no_way_there(credentials: Credentials) -> None:
    with pytest.raises(PeerUnreachable, match=r"cannot reach 255\.255\.255\.255:29400.* \(E[A-Z]+\): "):
        connect(credentials, "255.255.255.255", 29400)


def test_a_name_that_nobody_knows(credentials: Credentials) -> None:
    with pytest.raises(PeerUnreachable, match=r"cannot reach no-such-mac\.invalid:29400: no such host"):
        connect(credentials, "no-such-mac.invalid", 29400)


def test_an_own_address_that_is_none(credentials: Credentials) -> None:
    with pytest.raises(PeerUnreachable, match=r"\(EADDRNOTAVAIL\): the NIC lost its address"):
        connect(credentials, "127.0.0.1", closed_port(), source="192.0.2.7")


def test_the_own_address_is_used_for_all_connections(credentials: Credentials) -> None:
    with served(credentials.folder) as (server, handler):
        invitation = credentials.invitation(JOINER, "127.0.0.1", server.port)
        client = LinkClient.connect(invitation, JOINER, {}, source_address="127.0.0.99")
        assert handler.next_event("connected")[1].peer.startswith("127.0.0.99:")
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            client.dial("inside", listener.getsockname()[1]) as stream,
        ):
            assert stream.getsockname()[0] == "127.0.0.99"
        client.close()


def test_one_who_accepts_and_says_nothing(credentials: Credentials) -> None:
    silence = threading.Event()
    with answering(lambda sock: silence.wait(WAIT_SECONDS)) as port:
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match=r"accepted the connection and then went silent \(TLS handshake\)"):
            connect(credentials, "127.0.0.1", port, timeout=0.5)
        assert time.monotonic() - started < 5
        silence.set()


def test_a_full_backlog_is_no_answer(credentials: Credentials) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(address)
        with pytest.raises(PeerUnreachable, match=r"no answer \(ETIMEDOUT\).*firewall"):
            connect(credentials, *address, timeout=0.5)
        for sock in waiting:
            sock.close()


@pytest.mark.parametrize("close", [socket.socket.close, reset])
def test_one_who_hangs_up_at_once(credentials: Credentials, close: Callable[[socket.socket], None]) -> None:
    """As Docker's proxy does for a published port while its container is not up yet: worth another try."""
    with (
        answering(close) as port,
        pytest.raises(PeerUnreachable, match=r"accepted the connection and closed it|ECONNRESET"),
    ):
        connect(credentials, "127.0.0.1", port)


@pytest.mark.parametrize("banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(100)])
def test_another_service(credentials: Credentials, banner: bytes) -> None:
    def answer(sock: socket.socket) -> None:
        sock.sendall(banner)
        while sock.recv(4096):
            pass

    with answering(answer) as port:
        with pytest.raises(HetdeployError, match=r"is not a hetdeploy link \(TLS handshake: \w+\)") as raised:
            connect(credentials, "127.0.0.1", port)
        assert type(raised.value) is HetdeployError


def test_another_certificate_stops_it_before_anything_is_said(
    credentials: Credentials, tmp_path_factory: pytest.TempPathFactory
) -> None:
    imposter = Credentials.create(tmp_path_factory.mktemp("imposter"), 60)
    heard: list[bytes] = []

    def answer(sock: socket.socket) -> None:
        with handshake.wrap(sock, handshake.server_context(imposter.certificate, imposter.key)) as tls:
            tls.do_handshake()
            tls.settimeout(WAIT_SECONDS)
            with suppress(OSError):
                heard.append(tls.recv(4096))

    with answering(answer) as port, pytest.raises(UsageError, match="another certificate"):
        connect(credentials, "127.0.0.1", port)
    assert b"".join(heard) == b""


@pytest.mark.parametrize(
    ("first", "error", "complaint"),
    [
        (b"HTTP/1.1 200 OK\r\n", HetdeployError, "is not a hetdeploy link .*announces"),
        (frames.encode({"link": 2, "nonce": "00"}), VersionMismatch, "speaks link protocol 2, this machine 1"),
        (frames.encode({}), VersionMismatch, "speaks link protocol None"),
        (b"", PeerUnreachable, "closed it"),
    ],
)
def test_a_head_that_speaks_otherwise(
    credentials: Credentials, first: bytes, error: type[HetdeployError], complaint: str
) -> None:
    def answer(sock: socket.socket) -> None:
        with handshake.wrap(sock, handshake.server_context(credentials.certificate, credentials.key)) as tls:
            tls.do_handshake()
            tls.sendall(first)

    with answering(answer) as port, pytest.raises(error, match=complaint) as raised:
        connect(credentials, "127.0.0.1", port)
    assert type(raised.value) is error


def test_a_port_that_is_taken_is_named(credentials: Credentials) -> None:
    with served(credentials.folder) as (server, handler):
        second = LinkServer(credentials.folder, ("127.0.0.1", server.port), handler)
        with pytest.raises(PreflightError, match=rf"127\.0\.0\.1:{server.port} \(EADDRINUSE.*HETDEPLOY_PORT|--port"):
            second.start()
        second.close()


def test_ipv6_works_alike(credentials: Credentials) -> None:
    with served(credentials.folder) as (_, handler):
        server = LinkServer(credentials.folder, ("::1", 0), handler)
        server.start()
        client = LinkClient.connect(credentials.invitation(JOINER, "::1", server.port), JOINER, {})
        assert handler.next_event("connected")[1].peer.startswith("[::1]:")
        client.close()
        server.close()
