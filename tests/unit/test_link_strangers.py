"""Whatever is sent to the port costs its sender the connection, and nobody else anything."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_peers import WAIT_SECONDS, Recorder, reset, served

from hetdeploy.link import frames, handshake
from hetdeploy.link.client import LinkClient
from hetdeploy.link.credentials import JOINER, Credentials, key_id, prove
from hetdeploy.link.handshake import Approach
from hetdeploy.link.server import LinkServer

HANDSHAKE_SECONDS = 3.0
LATE_SECONDS = 5.0
"""How much longer a busy machine may take over what is measured."""
MAX_STRANGERS = 8


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.create(tmp_path_factory.mktemp("link"), 600)


@pytest.fixture(scope="module")
def link(credentials: Credentials) -> Iterator[tuple[LinkServer, Recorder]]:
    options = {"handshake_seconds": HANDSHAKE_SECONDS, "max_strangers": MAX_STRANGERS}
    with served(credentials.folder, **options) as serving:
        yield serving


@pytest.fixture
def port(link: tuple[LinkServer, Recorder], credentials: Credentials) -> Iterator[int]:
    """The port of a server that has to work after the test as before."""
    yield link[0].port
    client = LinkClient.connect(credentials.invitation(JOINER, "127.0.0.1", link[0].port), JOINER, {})
    client.send({"are you": "well"})
    assert client.receive(WAIT_SECONDS) == {"echo": {"are you": "well"}}
    client.close()
    for kind in ("connected", "lost"):
        link[1].next_event(kind)
    assert link[1].events.empty()
    assert link[0].members == []


def knock(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)


def shake_hands(port: int, credentials: Credentials) -> tuple[ssl.SSLSocket, str]:
    """As far as anybody comes who knows no code: TLS, and the nonce."""
    approach = Approach("127.0.0.1", port, credentials.pin)
    sock, nonce, _ = approach.open(time.monotonic() + WAIT_SECONDS)
    sock.settimeout(WAIT_SECONDS)
    return sock, nonce


def hears_the_end(sock: socket.socket) -> bool:
    """Whether the server hangs up, having said what it has to say."""
    with suppress(ConnectionError, ssl.SSLError):
        while sock.recv(4096):
            pass
    return True


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=3000), is_abrupt=st.booleans())
def test_any_bytes(link: tuple[LinkServer, Recorder], data: bytes, is_abrupt: bool) -> None:
    sock = knock(link[0].port)
    sock.sendall(data)
    if is_abrupt:
        reset(sock)
        return
    with sock:
        with suppress(OSError):  # the server may have hung up by now
            sock.shutdown(socket.SHUT_WR)
        assert hears_the_end(sock)


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=6000))
def test_any_bytes_within_tls(link: tuple[LinkServer, Recorder], credentials: Credentials, data: bytes) -> None:
    sock, _ = shake_hands(link[0].port, credentials)
    with sock:
        with suppress(ConnectionError, ssl.SSLError):
            sock.sendall(data)
            socket.socket.shutdown(sock, socket.SHUT_WR)
        assert hears_the_end(sock)


fields = st.sampled_from(["kind", "role", "key", "proof", "hello", "session", "host", "port", "digest"])
anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["control", "stream", "file", "heartbeat", "joiner", "head", "00" * 32]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text("ab", max_size=2), st.integers(), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(request_=st.dictionaries(fields, anything))
def test_any_request(link: tuple[LinkServer, Recorder], credentials: Credentials, request_: dict[str, Any]) -> None:
    sock, _ = shake_hands(link[0].port, credentials)
    with sock:
        deadline = time.monotonic() + WAIT_SECONDS
        frames.send(sock, request_, deadline)
        answer = frames.receive(sock, frames.LIMIT, deadline)
        assert answer["ok"] is False
        assert answer["error"] in ("kind", "request", "secret", "session")
        assert hears_the_end(sock)


def test_the_fuzzed_server_still_serves(port: int) -> None:
    """The fixture's checks after the test are the test."""


def test_a_port_scan(port: int) -> None:
    for round_ in range(200):
        sock = knock(port)
        (reset if round_ % 2 else socket.socket.close)(sock)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x02\x00\x01" + b"\0" * 100,
        b"\xff" * 100_000,
    ],
)
def test_other_protocols(port: int, data: bytes) -> None:
    with knock(port) as sock:
        with suppress(ConnectionError):
            sock.sendall(data)
        assert hears_the_end(sock)


def test_an_older_tls_is_refused(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with knock(port) as sock, pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        context.wrap_socket(sock)


@pytest.mark.parametrize("within_tls", [False, True])
def test_a_slow_loris_is_cut_off_at_the_deadline(port: int, credentials: Credentials, within_tls: bool) -> None:
    sock: socket.socket = shake_hands(port, credentials)[0] if within_tls else knock(port)
    started = time.monotonic()
    bytes_ = b"\0\0\x0f\0" if within_tls else b"\x16\x03\x01\x02\x00"
    with sock, suppress(ConnectionError, ssl.SSLError):
        for byte in bytes_ + b"{" * 1000:
            sock.sendall(bytes((byte,)))
            time.sleep(0.02)
    assert HANDSHAKE_SECONDS * 0.5 < time.monotonic() - started < HANDSHAKE_SECONDS + LATE_SECONDS


def test_one_who_sends_half_and_waits_is_cut_off_at_the_deadline(port: int, credentials: Credentials) -> None:
    sock, _ = shake_hands(port, credentials)
    with sock:
        sock.sendall(b"\0\0\0\x09{")
        started = time.monotonic()
        assert hears_the_end(sock)
        assert time.monotonic() - started < HANDSHAKE_SECONDS + LATE_SECONDS


def test_a_frame_over_the_limit_for_strangers_is_not_read(port: int, credentials: Credentials) -> None:
    sock, _ = shake_hands(port, credentials)
    with sock:
        sock.sendall((frames.LIMIT_BEFORE_AUTHENTICATION + 1).to_bytes(4, "big"))
        started = time.monotonic()
        assert hears_the_end(sock)
        assert time.monotonic() - started < HANDSHAKE_SECONDS


def test_squatters_lose_their_places_to_newcomers(
    port: int, link: tuple[LinkServer, Recorder], credentials: Credentials
) -> None:
    before = threading.active_count()
    squatters = [knock(port) for _ in range(5 * MAX_STRANGERS)]
    started = time.monotonic()
    LinkClient.connect(credentials.invitation(JOINER, "127.0.0.1", port), JOINER, {}).close()
    assert time.monotonic() - started < HANDSHAKE_SECONDS
    for kind in ("connected", "lost"):
        link[1].next_event(kind)
    assert threading.active_count() - before <= MAX_STRANGERS + 1
    for sock in squatters:
        with sock:
            assert hears_the_end(sock)


def test_a_proof_serves_once(port: int, credentials: Credentials, link: tuple[LinkServer, Recorder]) -> None:
    secret = credentials.joiner_secret
    request = {"kind": "control", "role": JOINER, "key": key_id(secret), "hello": {}}
    for nonce_of_now, verdict in ((True, True), (False, False)):
        sock, nonce = shake_hands(port, credentials)
        with sock:
            if nonce_of_now:
                proof = prove(secret, handshake.challenge(nonce, credentials.pin, "control")).hex()
            deadline = time.monotonic() + WAIT_SECONDS
            frames.send(sock, {**request, "proof": proof}, deadline)
            answer = frames.receive(sock, frames.LIMIT, deadline)
            assert answer["ok"] is verdict
    assert answer["error"] == "secret"
    # The first was let in, and no heartbeat followed: nobody ever heard of it.
    deadline = time.monotonic() + WAIT_SECONDS
    while link[0].members and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_session_is_nobody_elses(port: int, credentials: Credentials, link: tuple[LinkServer, Recorder]) -> None:
    client = LinkClient.connect(credentials.invitation(JOINER, "127.0.0.1", port), JOINER, {})
    for kind in ("stream", "file", "heartbeat"):
        sock, nonce = shake_hands(port, credentials)
        with sock:
            proof = prove(b"k" * 32, handshake.challenge(nonce, credentials.pin, kind)).hex()
            deadline = time.monotonic() + WAIT_SECONDS
            frames.send(sock, {"kind": kind, "session": client.session, "proof": proof}, deadline)
            assert frames.receive(sock, frames.LIMIT, deadline)["error"] == "session"
    client.close()
    for kind in ("connected", "lost"):
        link[1].next_event(kind)


def test_the_log_says_who_came_and_why_he_went(
    tmp_path: Path, credentials: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), served(credentials.folder) as (server, _):
        with knock(server.port) as sock:
            http = sock.getsockname()[1]
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert hears_the_end(sock)
        with knock(server.port) as sock:
            probe = sock.getsockname()[1]
        deadline = time.monotonic() + WAIT_SECONDS
        while f":{probe}:" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = {record.getMessage(): record.levelno for record in caplog.records if "hetdeploy.link" in record.name}
    (refused,) = [line for line in lines if f":{http}:" in line]
    assert "accepted" in refused
    assert "not TLS as it should be (HTTP_REQUEST)" in refused
    (probed,) = [line for line in lines if f":{probe}:" in line]
    assert lines[probed] == logging.DEBUG, "a health check every few seconds must not fill the log"
