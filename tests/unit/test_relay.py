"""The relay between real sockets, plain and TLS on either side."""

from __future__ import annotations

import hashlib
import os
import select
import selectors
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_peers import WAIT_SECONDS, receive_all, reset, tcp_pair, tls_pair

from hetdeploy.errors import HetdeployError
from hetdeploy.link import endpoint
from hetdeploy.link import relay as relay_module
from hetdeploy.link.credentials import Credentials
from hetdeploy.link.relay import Outcome, Relay

KINDS = ("plain", "tls")
BLOB = os.urandom(1 << 20) * 8


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.create(tmp_path_factory.mktemp("link"), 0)


class Rig:
    """A relay in a thread, and the two sockets at its outer ends."""

    def __init__(self, credentials: Credentials, left: str = "plain", right: str = "plain", **options: object) -> None:
        # The relay serves one TLS leg as a server and opens the other one as a client, as a tunnel's two ends do.
        self.left, inner_left = tls_pair(credentials) if left == "tls" else tcp_pair()
        inner_right, self.right = tls_pair(credentials) if right == "tls" else tcp_pair()
        self.inner = (inner_left, inner_right)
        self.relay = Relay(inner_left, inner_right, **options)  # type: ignore[arg-type]
        self.relay.start("relay")

    def end(self) -> Outcome:
        outcome = self.relay.join(WAIT_SECONDS)
        assert outcome is not None, "the relay does not end"
        assert all(sock.fileno() == -1 for sock in self.inner)
        return outcome

    def close(self) -> None:
        self.relay.abort("the test is over")
        self.left.close()
        self.right.close()
        self.relay.join(WAIT_SECONDS)


@pytest.fixture
def rig(credentials: Credentials) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*arguments: str, **options: object) -> Rig:
        rigs.append(Rig(credentials, *arguments, **options))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


def finish_sending(sock: socket.socket) -> None:
    """Half-close: plain by FIN, TLS by close_notify."""
    end = endpoint.End(sock)
    end.prepare()
    while not end.half_close():
        select.select([], [sock], [], WAIT_SECONDS)
    sock.settimeout(WAIT_SECONDS)


def expect_reset(sock: socket.socket) -> None:
    """The connection below, TLS or not, was reset: not merely closed."""
    with pytest.raises(ConnectionResetError):
        socket.socket.recv(sock, 1)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def read_to_end(sock: socket.socket) -> bytes:
    """Like receive_all, on a TLS socket that has sent its close_notify already too."""
    data = bytearray()
    with suppress(ssl.SSLZeroReturnError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return bytes(data)


@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
class TestEveryPairOfKinds:
    def test_bytes_arrive_in_order_both_ways_at_once(self, rig: Callable[..., Rig], left: str, right: str) -> None:
        it = rig(left, right)
        got: dict[str, bytes] = {}

        def receive(name: str, sock: socket.socket) -> None:
            data = bytearray()
            while len(data) < len(BLOB):
                data += sock.recv(1 << 16)
            got[name] = hashlib.sha256(data).digest()

        # A TLS socket must not be used by two threads at once, so each end sends and receives by turns.
        def converse(name: str, sock: socket.socket, first: bool) -> None:
            if first:
                sock.sendall(BLOB)
                receive(name, sock)
            else:
                receive(name, sock)
                sock.sendall(BLOB)

        threads = [
            in_thread(lambda: converse("left", it.left, True)),
            in_thread(lambda: converse("right", it.right, False)),
        ]
        for thread in threads:
            thread.join(WAIT_SECONDS * 3)
        assert got == dict.fromkeys(("left", "right"), hashlib.sha256(BLOB).digest())

    def test_a_half_close_is_passed_on_and_the_other_way_stays_open(
        self, rig: Callable[..., Rig], left: str, right: str
    ) -> None:
        it = rig(left, right)
        it.left.sendall(b"question")
        finish_sending(it.left)
        assert receive_all(it.right) == b"question"
        sender = in_thread(lambda: (it.right.sendall(BLOB), finish_sending(it.right)))
        assert read_to_end(it.left) == BLOB
        sender.join()
        outcome = it.end()
        assert (outcome.left_bytes, outcome.right_bytes) == (8, len(BLOB))
        assert (outcome.left, outcome.right, outcome.reason) == ("closed", "closed", None)

    def test_a_reset_is_passed_on_as_a_reset(self, rig: Callable[..., Rig], left: str, right: str) -> None:
        it = rig(left, right)
        it.left.sendall(b"hello")
        assert it.right.recv(5) == b"hello"
        reset(it.left)
        expect_reset(it.right)
        outcome = it.end()
        assert outcome.right == "open"
        assert outcome.reason == f"the left end broke: {outcome.left}"
        # Python's ssl module takes a reset for a stream cut short, before version 3.13.
        assert outcome.left in ("ECONNRESET (Connection reset by peer)", "TLS stream cut short")

    def test_abort_resets_both_ends_at_once(self, rig: Callable[..., Rig], left: str, right: str) -> None:
        it = rig(left, right)
        it.left.sendall(b"hello")
        assert it.right.recv(5) == b"hello"
        it.relay.abort("the heart stopped")
        it.relay.abort("and again")
        for sock in (it.left, it.right):
            expect_reset(sock)
        outcome = it.end()
        assert outcome.reason == "aborted: the heart stopped"
        assert (outcome.left, outcome.right, outcome.left_bytes) == ("open", "open", 5)

    def test_a_reader_that_waits_makes_the_writer_wait(self, rig: Callable[..., Rig], left: str, right: str) -> None:
        it = rig(left, right)
        for sock in (it.left, it.inner[1]):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        total = 64 << 20
        data = memoryview(bytes(range(256)) * (total // 256))
        sent = _send_until_stuck(it.left, data)
        assert sent < 16 << 20
        before = _cpu_seconds(it.relay)
        time.sleep(0.3)
        assert _cpu_seconds(it.relay) - before < 0.1, "the relay spins while it has to wait"

        it.left.settimeout(WAIT_SECONDS)
        sender = in_thread(lambda: (it.left.sendall(data[sent:]), finish_sending(it.left)))
        digest, count = hashlib.sha256(), 0
        while chunk := it.right.recv(1 << 18):
            digest.update(chunk)
            count += len(chunk)
        sender.join()
        assert count == total
        assert digest.digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("round_", range(5))
@pytest.mark.parametrize("quiet", KINDS)
def test_a_half_close_against_a_stream_of_data_loses_none_of_it(
    rig: Callable[..., Rig], quiet: str, round_: int
) -> None:
    """OpenSSL gives a connection up on which data comes in while it waits for the answer to its close_notify."""
    it = rig(quiet, "tls")
    sender = in_thread(lambda: it.right.sendall(BLOB))
    data = bytearray(it.left.recv(1 << 16))
    finish_sending(it.left)
    while len(data) < len(BLOB):
        data += it.left.recv(1 << 16)
    sender.join()
    assert hashlib.sha256(data).digest() == hashlib.sha256(BLOB).digest()
    assert receive_all(it.right) == b""


def _send_until_stuck(sock: socket.socket, data: memoryview) -> int:
    """Bytes taken until nothing was taken for half a second; for TLS that is a whole number of sends."""
    sock.setblocking(False)
    sent = 0
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        while sent < len(data):
            try:
                sent += sock.send(data[sent : sent + 16384])
            except (BlockingIOError, ssl.SSLWantWriteError):
                if not selector.select(0.5):
                    break
    return sent


def _cpu_seconds(relay: Relay) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return 0.0
    assert relay._thread is not None
    assert relay._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(relay._thread.ident))


def test_a_tls_stream_cut_short_is_a_reset_and_no_end(rig: Callable[..., Rig]) -> None:
    it = rig("tls", "plain")
    it.left.sendall(b"half of it")
    assert it.right.recv(100) == b"half of it"
    it.left.close()  # a FIN, and no close_notify before it: anybody on the way could have sent that
    with pytest.raises(ConnectionResetError):
        it.right.recv(1)
    assert it.end().left == "TLS stream cut short"


def test_what_is_left_in_the_tls_layer_is_not_forgotten(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "BUFFER_BYTES", 1000)  # a record of 16 KiB takes 17 reads, and one event
    it = rig("tls", "tls")
    it.left.sendall(BLOB[:16384])
    data = b""
    while len(data) < 16384:
        data += it.right.recv(16384)
    assert data == BLOB[:16384]


def test_what_was_decrypted_before_the_relay_began_is_passed_on(credentials: Credentials) -> None:
    (left, inner_left), (inner_right, right) = tls_pair(credentials), tcp_pair()
    left.sendall(b"greeting and more")
    assert inner_left.recv(8) == b"greeting"  # one record, and the rest of it stays in the TLS layer
    right.shutdown(socket.SHUT_WR)  # which is no time to answer the end of the other direction without a thought
    relay = Relay(inner_left, inner_right)
    relay.start("relay")
    assert right.recv(100) == b" and more"
    assert left.recv(1) == b""
    finish_sending(left)
    outcome = relay.join(WAIT_SECONDS)
    assert outcome is not None
    assert outcome.reason is None
    left.close()
    right.close()


def test_an_answer_given_before_hanging_up_arrives(rig: Callable[..., Rig]) -> None:
    """As with a server that refuses, says why and closes, while the client is still sending."""
    it = rig()
    sender = in_thread(lambda: _send_regardless(it.left))
    assert it.right.recv(1)
    it.right.sendall(b"no, because ...")
    it.right.shutdown(socket.SHUT_WR)
    assert it.left.recv(100) == b"no, because ..."
    it.right.close()
    assert it.end().right == "closed"
    sender.join(WAIT_SECONDS)
    assert not sender.is_alive()


def _send_regardless(sock: socket.socket) -> None:
    with suppress(OSError):
        while True:
            sock.sendall(BLOB)


def test_the_idle_limit_resets_a_silent_relay_only(rig: Callable[..., Rig]) -> None:
    it = rig("plain", "plain", idle=0.4)
    for _ in range(4):
        time.sleep(0.2)
        it.left.sendall(b".")
        assert it.right.recv(1) == b"."
    with pytest.raises(ConnectionResetError):
        it.right.recv(1)
    assert it.end().reason == "no data either way for 0.4 s"


def test_abort_before_the_start_ends_it_at_once(credentials: Credentials) -> None:
    (left, inner_left), (inner_right, right) = tcp_pair(), tcp_pair()
    relay = Relay(inner_left, inner_right)
    relay.abort("never mind")
    assert relay.run().reason == "aborted: never mind"
    relay.abort("too late")
    for sock in (left, right):
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        sock.close()


def test_an_end_that_is_closed_already_is_an_outcome_and_no_crash(credentials: Credentials) -> None:
    (left, inner_left), (inner_right, right) = tcp_pair(), tcp_pair()
    inner_right.close()
    assert "EBADF" in Relay(inner_left, inner_right).run().right
    with pytest.raises(ConnectionResetError):
        left.recv(1)
    left.close()
    right.close()


class Splitter:
    """Hands on what it gets in pieces of the given sizes by turns, each with a byte of its own before it."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.plain = bytearray()
        self.sent = bytearray()
        self.finished = False

    def feed(self, data: memoryview) -> list[memoryview | bytes]:
        self.plain += data
        chunks: list[memoryview | bytes] = []
        start = turn = 0
        while start < len(data):
            size = self.sizes[turn % len(self.sizes)]
            chunks += [b"", b"|", data[start : start + size]]
            start += size
            turn += 1
        for chunk in chunks:
            self.sent += chunk
        return chunks

    def finish(self) -> None:
        self.finished = True


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=5), length=st.integers(1, 1 << 20), tls=st.booleans()
)
def test_a_transform_may_cut_the_stream_up_as_it_likes(
    credentials: Credentials, sizes: list[int], length: int, tls: bool
) -> None:
    sizes[0] += length // 500  # not millions of pieces
    splitter = Splitter(sizes)
    it = Rig(credentials, "plain", "tls" if tls else "plain", left_to_right=splitter)
    try:
        sender = in_thread(lambda: (it.left.sendall(BLOB[:length]), it.left.shutdown(socket.SHUT_WR)))
        data = receive_all(it.right)
        sender.join()
        assert splitter.plain == BLOB[:length]
        assert data == splitter.sent
        assert splitter.finished
    finally:
        it.close()


class Failing:
    """A transform that dislikes what it reads, or the way it ends."""

    def __init__(self, error: Exception, *, at_end: bool) -> None:
        self.error = error
        self.at_end = at_end

    def feed(self, data: memoryview) -> list[memoryview | bytes]:
        if not self.at_end:
            raise self.error
        return [data]

    def finish(self) -> None:
        raise self.error


@pytest.mark.parametrize("at_end", [False, True])
def test_a_malformed_stream_resets_both_ends_and_says_why(rig: Callable[..., Rig], at_end: bool) -> None:
    error = HetdeployError("opcode 7 is unknown", "use the same torch on both machines")
    it = rig(left_to_right=Failing(error, at_end=at_end))
    it.left.sendall(b"nonsense")
    with suppress(OSError):  # the reset may be here already
        it.left.shutdown(socket.SHUT_WR)
    for sock in (it.left, it.right):
        with pytest.raises(ConnectionResetError):
            receive_all(sock)
    outcome = it.end()
    assert outcome.error is error
    assert outcome.reason == "opcode 7 is unknown: use the same torch on both machines"


def test_a_bug_in_a_transform_closes_both_ends_too(credentials: Credentials) -> None:
    (left, inner_left), (inner_right, right) = tcp_pair(), tcp_pair()
    left.sendall(b"data")
    relay = Relay(inner_left, inner_right, Failing(ZeroDivisionError("oops"), at_end=False))
    with pytest.raises(ZeroDivisionError):
        relay.run()
    assert relay.outcome is not None
    assert "oops" in str(relay.outcome)
    with pytest.raises(ConnectionResetError):
        right.recv(1)
    left.close()
    right.close()


def test_a_key_update_in_mid_stream_does_no_harm(credentials: Credentials) -> None:
    """OpenSSL's own client renews both sides' keys (its command K) between two lines."""
    if shutil.which("openssl") is None or sys.platform == "darwin":
        pytest.skip("needs OpenSSL's s_client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.certificate, credentials.key)
    inner_right, right = tcp_pair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = subprocess.Popen(
            ["openssl", "s_client", "-quiet", "-no_ign_eof", "-connect", f"127.0.0.1:{listener.getsockname()[1]}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        raw, _ = listener.accept()
    relay = Relay(context.wrap_socket(raw, server_side=True), inner_right)
    relay.start("relay")
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        for line in (b"one\n", b"two\n"):
            client.stdin.write(line)
            assert right.recv(10) == line
            right.sendall(line.upper())
            assert client.stdout.readline() == line.upper()
            client.stdin.write(b"K\n")  # s_client takes a K at the start of what it reads for the command
            time.sleep(0.2)
    finally:
        client.kill()
        client.wait()
        client.stdin.close()
        client.stdout.close()
        relay.join(WAIT_SECONDS)
        right.close()


def test_a_dead_peer_is_noticed_within_ten_seconds_by_the_kernels_settings() -> None:
    left, right = tcp_pair()
    with left, right:
        endpoint.tune(left)
        options = {
            name: left.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_NODELAY", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        }
        idle = left.getsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE)
        assert left.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert options["TCP_NODELAY"]
        assert idle + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"] <= 10
