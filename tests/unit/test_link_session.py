"""Server and client together: admission, messages, streams, files, leaving and being lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from link_peers import WAIT_SECONDS, Recorder, echo_port, receive_all, served

from hetdeploy.errors import HetdeployError, PeerUnreachable, UsageError, VersionMismatch
from hetdeploy.link import frames
from hetdeploy.link.client import LinkClient
from hetdeploy.link.credentials import HEAD, JOINER, Credentials, key_id
from hetdeploy.link.forward import Forward
from hetdeploy.link.frames import FrameError
from hetdeploy.link.handshake import Approach
from hetdeploy.link.server import LinkServer, Refused

QUICK = (0.2, 2.0)
"""Heartbeat interval and silence, for tests that wait for a loss."""

LATE_SECONDS = 5.0
"""How much longer a busy machine may take over what is measured."""

LARGE = os.urandom(1 << 20) * 16


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials.create(tmp_path / "link", 60)


@pytest.fixture
def link(credentials: Credentials) -> Iterator[tuple[LinkServer, Recorder]]:
    with served(credentials.folder) as serving:
        yield serving


@pytest.fixture
def quick_link(credentials: Credentials) -> Iterator[tuple[LinkServer, Recorder]]:
    with served(credentials.folder, heartbeat_seconds=QUICK) as serving:
        yield serving


Join = Callable[..., LinkClient]


@pytest.fixture
def join(credentials: Credentials, link: tuple[LinkServer, Recorder]) -> Iterator[Join]:
    """Connects to the served link; the client is closed at the end."""
    clients: list[LinkClient] = []

    def connect(role: str = JOINER, hello: dict[str, Any] | None = None, code: Credentials = credentials) -> LinkClient:
        invitation = code.invitation(role, "127.0.0.1", link[0].port)
        clients.append(LinkClient.connect(invitation, role, hello or {}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


class TestAdmission:
    def test_a_member_is_welcomed_and_announced(self, join: Join, link: tuple[LinkServer, Recorder]) -> None:
        client = join(hello={"name": "mac"})
        member = link[1].next_event("connected")[1]
        assert client.welcome == {"role": JOINER, "hello": {"name": "mac"}, "peer": member.peer}
        assert (member.role, member.hello, member.session) == (JOINER, {"name": "mac"}, client.session)
        assert member.welcome == client.welcome
        assert link[0].members == [member]
        assert abs(client.clock_skew) < 1

    def test_the_heads_own_code_is_for_the_head_alone(self, join: Join, link: tuple[LinkServer, Recorder]) -> None:
        join(HEAD)
        assert link[1].next_event("connected")[1].role == HEAD

    def test_a_wrong_code_is_told_so(self, join: Join, tmp_path: Path, credentials: Credentials) -> None:
        stranger = Credentials(credentials.folder, b"s" * 16, 0, b"h" * 16, ())
        for role in (JOINER, HEAD):
            with pytest.raises(UsageError, match="not one of this head's"):
                join(role, code=stranger)

    def test_an_expired_code_is_told_so(self, join: Join, credentials: Credentials) -> None:
        expired = credentials.rotate(ttl_seconds=-1)
        with pytest.raises(UsageError, match="expired"):
            join(code=expired)

    def test_rotation_counts_at_once_and_disturbs_nobody_who_is_in(self, join: Join, credentials: Credentials) -> None:
        inside = join()
        fresh = credentials.rotate(60)
        with pytest.raises(UsageError, match="replaced by a newer one"):
            join(code=credentials)
        join(code=fresh)
        inside.send({"still": "here"})
        assert inside.receive(WAIT_SECONDS) == {"echo": {"still": "here"}}

    @pytest.mark.parametrize(
        ("code", "error"), [("version", VersionMismatch), ("full", HetdeployError), ("over", HetdeployError)]
    )
    def test_the_handlers_no_comes_through_word_by_word(
        self, join: Join, link: tuple[LinkServer, Recorder], code: str, error: type[HetdeployError]
    ) -> None:
        link[1].refusal = Refused(code, "the head runs torch 2.13.0, this machine 2.12.0")
        with pytest.raises(error, match=r"the head runs torch 2\.13\.0, this machine 2\.12\.0") as raised:
            join()
        assert type(raised.value) is error
        assert link[0].members == []

    def test_a_failing_handler_refuses_and_the_server_lives_on(
        self, join: Join, link: tuple[LinkServer, Recorder], caplog: pytest.LogCaptureFixture
    ) -> None:
        link[1].refusal = ZeroDivisionError("a bug")  # type: ignore[assignment]
        with pytest.raises(HetdeployError, match="failed over this request"):
            join()
        assert "a bug" in caplog.text
        link[1].refusal = None
        join()

    def test_a_hello_over_the_limit_for_strangers_is_not_even_sent(self, join: Join) -> None:
        with pytest.raises(HetdeployError, match="over the limit of 4096"):
            join(hello={"x": "y" * frames.LIMIT_BEFORE_AUTHENTICATION})

    def test_damaged_secrets_refuse_and_are_logged(
        self, join: Join, credentials: Credentials, caplog: pytest.LogCaptureFixture
    ) -> None:
        (credentials.folder / "secrets.json").write_text("{")
        with pytest.raises(HetdeployError, match="cannot read its codes"):
            join()
        assert "secrets.json is damaged" in caplog.text


class TestMessages:
    def test_arrive_in_order_both_ways(self, join: Join) -> None:
        client = join()
        for number in range(2000):
            client.send({"n": number, "text": "ü" * 100})
        for number in range(2000):
            answer = client.receive(WAIT_SECONDS)
            assert answer is not None
            assert answer["echo"]["n"] == number

    def test_one_near_the_limit_passes_and_one_above_is_refused_here(self, join: Join) -> None:
        client = join()
        client.send({"x": "y" * (frames.LIMIT - 100)})
        assert client.receive(WAIT_SECONDS) is not None
        with pytest.raises(FrameError):
            client.send({"x": "y" * frames.LIMIT})

    def test_nothing_to_receive_is_none(self, join: Join) -> None:
        assert join().receive(0.01) is None

    def test_a_message_that_the_handler_cannot_take_costs_its_sender_the_session(
        self, join: Join, link: tuple[LinkServer, Recorder], caplog: pytest.LogCaptureFixture
    ) -> None:
        bad, good = join(), join()
        bad.send({"break": True})
        assert bad.lost.wait(WAIT_SECONDS)
        good.send({"a": 1})
        assert good.receive(WAIT_SECONDS) == {"echo": {"a": 1}}
        assert "a bug of the handler" in caplog.text

    def test_a_head_that_takes_none_makes_the_sender_wait(self, join: Join, link: tuple[LinkServer, Recorder]) -> None:
        client = join()
        link[1].gate.clear()
        sent: list[int] = []
        total = 64 << 20

        def send() -> None:
            while sum(sent) < total:
                client.send({"quiet": True, "x": "y" * (1 << 16)})
                sent.append(1 << 16)

        sender = threading.Thread(target=send)
        sender.start()
        before = -1
        while before != (before := sum(sent)):
            time.sleep(0.5)
        assert sum(sent) < total / 2, "nothing makes it wait"
        link[1].gate.set()
        sender.join(WAIT_SECONDS * 3)
        assert sum(sent) == total

    def test_a_member_that_takes_none_is_cut_off_and_holds_nobody_up(
        self, link: tuple[LinkServer, Recorder], credentials: Credentials
    ) -> None:
        approach = Approach("127.0.0.1", link[0].port, credentials.pin)
        deadline = time.monotonic() + WAIT_SECONDS
        secret = credentials.joiner_secret
        control, answer, _ = approach.request(
            secret, "control", {"role": JOINER, "key": key_id(secret), "hello": {}}, deadline
        )
        heart, _, _ = approach.request(
            bytes.fromhex(answer["key"]), "heartbeat", {"session": answer["session"]}, deadline
        )
        with control, heart:
            member = link[1].next_event("connected")[1]
            started = time.monotonic()
            for _ in range(200):
                member.send({"x": "y" * (1 << 19)})
            assert time.monotonic() - started < LATE_SECONDS
            assert link[1].next_event("lost")[2] == "it does not take its messages"


class TestStreams:
    def test_carry_data_both_ways_with_their_ends(self, join: Join) -> None:
        client = join()
        with echo_port() as port, Forward(client, "inside", port) as forward:
            sock = socket.create_connection(("127.0.0.1", forward.port), WAIT_SECONDS)
            with sock:
                sender = threading.Thread(target=lambda: (sock.sendall(LARGE), sock.shutdown(socket.SHUT_WR)))
                sender.start()
                data = receive_all(sock)
                sender.join()
            assert hashlib.sha256(data).digest() == hashlib.sha256(LARGE).digest()

    def test_a_dialled_stream_is_a_socket_like_any_other(self, join: Join) -> None:
        with echo_port() as port, join().dial("inside", port) as stream:
            stream.sendall(b"hello")
            assert stream.recv(10) == b"hello"

    def test_an_address_that_is_nobodys_business_is_refused(self, join: Join) -> None:
        with pytest.raises(HetdeployError, match=r"192\.168\.0\.1:22 does not belong to this job") as raised:
            join().dial("192.168.0.1", 22)
        assert type(raised.value) is HetdeployError

    def test_an_address_that_does_not_answer_is_named(self, join: Join) -> None:
        with pytest.raises(PeerUnreachable, match=r"inside:1 does not answer the head \(ECONNREFUSED\)"):
            join().dial("inside", 1)

    @pytest.mark.parametrize("port", [0, 65536, -1, True, "80", None])
    def test_a_port_that_is_none_is_refused(self, join: Join, port: Any) -> None:
        with pytest.raises(HetdeployError, match="leads to a host and a port"):
            join().dial("inside", port)

    def test_a_forward_that_cannot_open_its_stream_resets_and_says_why(self, join: Join) -> None:
        with Forward(join(), "elsewhere", 80) as forward:
            with (
                socket.create_connection(("127.0.0.1", forward.port), WAIT_SECONDS) as sock,
                pytest.raises(ConnectionResetError),
            ):
                sock.recv(1)
            assert "elsewhere:80 does not belong to this job" in str(forward.problems[0])

    def test_a_closed_forward_leaves_no_port_and_no_connection(self, join: Join) -> None:
        with echo_port() as port:
            forward = Forward(join(), "inside", port)
            with socket.create_connection(("127.0.0.1", forward.port), WAIT_SECONDS) as sock:
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
                forward.close()
                with pytest.raises(ConnectionResetError):
                    sock.recv(1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", forward.port), WAIT_SECONDS)

    def test_bulk_data_does_not_cost_the_heartbeat(
        self, quick_link: tuple[LinkServer, Recorder], credentials: Credentials
    ) -> None:
        invitation = credentials.invitation(JOINER, "127.0.0.1", quick_link[0].port)
        client = LinkClient.connect(invitation, JOINER, {}, heartbeat_seconds=QUICK)
        with echo_port() as port, client.dial("inside", port) as stream:
            until = time.monotonic() + 2 * QUICK[1]
            while time.monotonic() < until:
                stream.sendall(LARGE[: 1 << 18])
                got = 0
                while got < 1 << 18:
                    got += len(stream.recv(1 << 18))
        assert not client.lost.is_set()
        client.close()


class TestFiles:
    @pytest.fixture
    def blob(self, tmp_path: Path, link: tuple[LinkServer, Recorder]) -> tuple[str, Path]:
        path = tmp_path / "blob"
        path.write_bytes(LARGE)
        digest = hashlib.sha256(LARGE).hexdigest()
        link[1].files[digest] = path
        return digest, path

    def test_arrive_whole(self, join: Join, blob: tuple[str, Path], tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        join().fetch(blob[0], len(LARGE), tmp_path / "in" / "copy")
        assert (tmp_path / "in" / "copy").read_bytes() == LARGE
        assert [path.name for path in (tmp_path / "in").iterdir()] == ["copy"]

    def test_an_empty_one_too(self, join: Join, link: tuple[LinkServer, Recorder], tmp_path: Path) -> None:
        digest = hashlib.sha256(b"").hexdigest()
        link[1].files[digest] = Path(os.devnull)
        join().fetch(digest, 0, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b""

    def test_nothing_is_left_of_one_that_is_not_what_was_announced(
        self, join: Join, blob: tuple[str, Path], tmp_path: Path, link: tuple[LinkServer, Recorder]
    ) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "copy").write_text("as before")
        client = join()
        with pytest.raises(HetdeployError, match=f"{len(LARGE)} bytes where 5 were announced"):
            client.fetch(blob[0], 5, folder / "copy")
        link[1].files["0" * 64] = blob[1]
        with pytest.raises(HetdeployError, match="not the one that was announced"):
            client.fetch("0" * 64, len(LARGE), folder / "copy")
        with pytest.raises(HetdeployError, match="no file has the digest 111111111111"):
            client.fetch("1" * 64, 5, folder / "copy")
        link[1].files["2" * 64] = tmp_path / "missing"
        with pytest.raises(HetdeployError, match=r"cannot read the file 222222222222 \(No such file"):
            client.fetch("2" * 64, 5, folder / "copy")
        with pytest.raises(HetdeployError, match=r"nowhere/copy cannot be written \(No such file"):
            client.fetch(blob[0], len(LARGE), tmp_path / "nowhere" / "copy")
        assert [path.name for path in folder.iterdir()] == ["copy"]
        assert (folder / "copy").read_text() == "as before"

    def test_nothing_is_left_of_one_that_breaks_off(
        self, join: Join, link: tuple[LinkServer, Recorder], tmp_path: Path
    ) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        endless = tmp_path / "endless"
        with endless.open("wb") as file:
            file.truncate(1 << 40)
        link[1].files["3" * 64] = endless
        client = join()
        member = link[1].next_event("connected")[1]
        errors: list[HetdeployError] = []

        def fetch() -> None:
            try:
                client.fetch("3" * 64, 1 << 40, folder / "copy")
            except HetdeployError as error:
                errors.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        while not (found := list(folder.iterdir())) or found[0].stat().st_size == 0:
            time.sleep(0.01)
        member.cut("the cable was pulled")
        thread.join(WAIT_SECONDS)
        assert isinstance(errors[0], PeerUnreachable)
        assert "came to" in str(errors[0])
        assert list(folder.iterdir()) == []


class TestTheEnd:
    def test_a_client_that_closes_is_not_cut_off_in_mid_sentence(
        self, join: Join, link: tuple[LinkServer, Recorder]
    ) -> None:
        client = join()
        link[1].next_event("connected")
        for number in range(500):
            client.send({"n": number})
        client.close("done for today")
        _, member, reason = link[1].next_event("lost")
        assert (reason, member.said_goodbye) == ("done for today", True)
        assert client.lost.is_set()
        assert link[0].members == []
        with pytest.raises(PeerUnreachable, match="has ended"):
            client.send({})
        with pytest.raises(PeerUnreachable, match="has ended"):
            client.dial("inside", 80)
        client.close()

    def test_a_server_that_closes_delivers_what_it_sent_and_joins_its_threads(self, credentials: Credentials) -> None:
        before = set(threading.enumerate())
        with served(credentials.folder) as (server, handler), echo_port() as port:
            client = LinkClient.connect(credentials.invitation(JOINER, "127.0.0.1", server.port), JOINER, {})
            member = handler.next_event("connected")[1]
            stream = client.dial("inside", port)
            for number in range(500):
                member.send({"n": number})
            server.close("the job is over")
            assert client.lost.wait(WAIT_SECONDS)
            assert client.lost_reason == "the job is over"
            assert [client.receive(0.1) for _ in range(500)] == [{"n": number} for number in range(500)]
            assert handler.next_event("lost")[1].said_goodbye
            stream.settimeout(WAIT_SECONDS)
            with stream, pytest.raises(OSError):
                stream.recv(1)
            client.close()
        assert set(threading.enumerate()) <= before

    def test_a_member_can_be_sent_away_with_a_reason(self, join: Join, link: tuple[LinkServer, Recorder]) -> None:
        client = join()
        member = link[1].next_event("connected")[1]
        member.send({"last": "word"})
        member.close("another node took the same name")
        assert client.lost.wait(WAIT_SECONDS)
        assert client.lost_reason == "another node took the same name"
        assert client.receive(0.1) == {"last": "word"}
        member.send({"too": "late"})

    def test_losing_the_heartbeat_connection_alone_ends_the_session(
        self, join: Join, link: tuple[LinkServer, Recorder]
    ) -> None:
        client = join()
        link[1].next_event("connected")
        client._breaker.trip("the test")
        link[1].next_event("lost")
        assert client.lost.wait(WAIT_SECONDS)


PEER = """
import socket, sys, threading, time
from pathlib import Path
sys.path[:0] = {path!r}
from link_peers import Recorder, served
from hetdeploy.link.client import LinkClient
from hetdeploy.link.invitation import Invitation

def joiner(code, port):
    client = LinkClient.connect(Invitation.decode(code), "joiner", {{}}, heartbeat_seconds={quick!r})
    stream = client.dial("inside", int(port))
    stream.sendall(b"up")
    assert stream.recv(2) == b"up"
    print("ready", flush=True)
    client.lost.wait(60)
    print(client.lost_reason, flush=True)

def head(folder):
    with served(Path(folder), heartbeat_seconds={quick!r}) as (server, _):
        print(server.port, flush=True)
        sys.stdin.read()

globals()[sys.argv[1]](*sys.argv[2:])
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs one side of the link in a process of its own."""
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(path=[str(Path(__file__).parent)], quick=QUICK))
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_joiner_that_is_stopped_or_killed_is_lost_with_all_its_streams(
    peer: Callable[..., subprocess.Popen[str]],
    quick_link: tuple[LinkServer, Recorder],
    credentials: Credentials,
    how: signal.Signals,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_SECONDS)
        server, handler = quick_link
        code = credentials.invitation(JOINER, "127.0.0.1", server.port).encode()
        joiner = peer("joiner", code, str(listener.getsockname()[1]))
        target, _ = listener.accept()
        with target:
            target.settimeout(WAIT_SECONDS)
            target.sendall(target.recv(2))
            assert joiner.stdout is not None
            assert joiner.stdout.readline() == "ready\n"
            handler.next_event("connected")
            stopped = time.monotonic()
            joiner.send_signal(how)
            _, member, reason = handler.next_event("lost")
            assert time.monotonic() - stopped < QUICK[1] + LATE_SECONDS
            assert not member.said_goodbye
            with pytest.raises(ConnectionResetError):
                target.recv(1)
            if how == signal.SIGSTOP:
                assert reason == "no heartbeat for 2 s"
                joiner.send_signal(signal.SIGCONT)  # a Mac that wakes up learns that it was gone
                assert joiner.stdout.readline() != ""


def test_a_head_that_is_stopped_is_lost_with_all_streams(
    peer: Callable[..., subprocess.Popen[str]], credentials: Credentials
) -> None:
    head = peer("head", str(credentials.folder))
    assert head.stdout is not None
    port = int(head.stdout.readline())
    client = LinkClient.connect(credentials.invitation(JOINER, "127.0.0.1", port), JOINER, {}, heartbeat_seconds=QUICK)
    with echo_port() as echoing, Forward(client, "inside", echoing) as forward:
        with socket.create_connection(("127.0.0.1", forward.port), WAIT_SECONDS) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            stopped = time.monotonic()
            head.send_signal(signal.SIGSTOP)
            assert client.lost.wait(WAIT_SECONDS)
            assert time.monotonic() - stopped < QUICK[1] + LATE_SECONDS
            assert client.lost_reason == "no heartbeat for 2 s"
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
        head.send_signal(signal.SIGKILL)
    client.close()


@pytest.mark.timeout(30)
def test_a_signal_late_in_the_wait_does_not_make_it_endless(join: Join) -> None:
    """As Ctrl-C does on a busy machine: the handler is done when the time is up."""
    client = join()
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.3))
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        assert client.receive(0.2) is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_clocks_difference_is_measured(credentials: Credentials) -> None:
    """A head whose clock is 61 s ahead, as far as its first frame goes."""
    from hetdeploy.link import handshake

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def head() -> None:
            raw, _ = listener.accept()
            with handshake.wrap(raw, handshake.server_context(credentials.certificate, credentials.key)) as sock:
                sock.do_handshake()
                deadline = time.monotonic() + WAIT_SECONDS
                frames.send(sock, {"link": 1, "nonce": "00", "time": time.time() + 61}, deadline)
                json.dumps(frames.receive(sock, 4096, deadline))

        thread = threading.Thread(target=head)
        thread.start()
        approach = handshake.Approach("127.0.0.1", listener.getsockname()[1], credentials.pin)
        sock, _, skew = approach.open(time.monotonic() + WAIT_SECONDS)
        with sock:
            frames.send(sock, {}, time.monotonic() + WAIT_SECONDS)
            thread.join()
        assert skew == pytest.approx(61, abs=0.5)
