"""What a rank behind the bridge sees, and what the bridge says, when its peer is not what it should be.

The rank is a real gloo group in this process, its store wrapped and bridged; the peer is played by the test.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from peers import plain_dial

from hetdeploy.errors import HetdeployError, PeerUnreachable, VersionMismatch
from hetdeploy.gloo import store as store_module
from hetdeploy.gloo.address import SockAddr
from hetdeploy.gloo.bridge import BridgeService
from hetdeploy.gloo.control import BridgeClient
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout
from hetdeploy.gloo.record import RankRecord
from hetdeploy.gloo.store import BridgedStore
from hetdeploy.gloo.wire import DATA, RECV_READY, SEND_READY, Header

TIMEOUT = timedelta(seconds=3)
PROMPT_SECONDS = 8.0
SEQUENCE = 17

# gloo itself, with or without a bridge, lets a receive whose payload has begun wait for its timeout when the connection
# goes: it no longer counts it among the pending ones, and not yet among the done.
GLOO_GIVES_UP = "Connection|Timed out"


@dataclass
class Stage:
    """A store, a bridge, and a listener that plays rank 0 of two."""

    store: dist.TCPStore
    bridge: BridgeService
    listener: socket.socket

    def publish(self, record: bytes) -> None:
        self.store.set("0/0", record)

    def record(self) -> RankRecord:
        return RankRecord(b"box", SockAddr("127.0.0.1", self.listener.getsockname()[1]), (0, SEQUENCE))

    def group(self) -> dist.ProcessGroupGloo:
        """Rank 1. Raises what the store wrapper raises."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        wrapped = BridgedStore(self.store, 1, 2, BridgeClient(self.bridge.path), Dialect.TCP, Layout.LINUX)
        try:
            return dist.ProcessGroupGloo(wrapped, 1, 2, options)
        finally:
            wrapped.close()

    def accept(self) -> socket.socket:
        peer, _ = self.listener.accept()
        peer.settimeout(PROMPT_SECONDS)
        assert peer.recv(8, socket.MSG_WAITALL) == struct.pack("<q", SEQUENCE)
        return peer


@pytest.fixture
def stage() -> Iterator[Stage]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    bridge = BridgeService(plain_dial, Dialect.TCP, node="mac")
    bridge.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PROMPT_SECONDS)
        yield Stage(store, bridge, listener)
    bridge.close()


@pytest.fixture
def short_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RENEWAL_TIMEOUT", 0.3)


def tcp_header(operation: int, slot: int, length: int, nbytes: int) -> bytes:
    return struct.pack("<6Q", nbytes, operation, slot, 0, length, 0)


@pytest.mark.parametrize(
    ("sent", "read", "meaning"),
    [
        (tcp_header(0, 5, 0, 48), "op 0, slot 0x5", "different torch versions"),
        (tcp_header(9, 5, 0, 48), "op 9, slot 0x5", "different torch versions"),
        (tcp_header(DATA, 5, 1 << 50, (1 << 50) + 48), f"length {1 << 50}", "different torch versions"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" + bytes(48), "begins with op", "is not gloo"),
        (Header(DATA, 5, 404).encode(Dialect.TCP), "404 bytes arrived where 400", "tensors of different sizes"),
        (Header(DATA, 5, 400).encode(Dialect.TCP) + bytes(99), "301 bytes of a payload missing", "died or was stopped"),
        (Header(DATA, 5, 400).encode(Dialect.TCP)[:30], "the rest of a header missing", "died or was stopped"),
    ],
    ids=["bound-buffer", "unknown-op", "absurd-length", "not-gloo", "too-long", "cut-payload", "cut-header"],
)
def test_broken_stream(stage: Stage, sent: bytes, read: str, meaning: str) -> None:
    stage.publish(stage.record().encode())
    group = stage.group()
    work = group.recv([torch.empty(100)], 0, 5)
    peer = stage.accept()
    with peer:
        assert peer.recv(48, socket.MSG_WAITALL) == Header(RECV_READY, 5, 400).encode(Dialect.TCP)
        started = time.monotonic()
        peer.sendall(Header(SEND_READY, 5, 400).encode(Dialect.TCP) + sent)
        with contextlib.suppress(OSError):  # it may be reset already
            peer.shutdown(socket.SHUT_WR)
        with pytest.raises(RuntimeError, match=GLOO_GIVES_UP):
            work.wait()
        assert time.monotonic() - started < PROMPT_SECONDS
        with pytest.raises(ConnectionResetError):
            peer.recv(1)
    (problem,) = wait_for_problems(stage.bridge)
    assert "pair rank 1 (this machine), rank 0 at 127.0.0.1:" in problem
    assert read in problem
    assert meaning in problem
    assert "\n" not in problem


def test_peer_reset_in_a_payload(stage: Stage) -> None:
    stage.publish(stage.record().encode())
    group = stage.group()
    work = group.recv([torch.empty(100)], 0, 5)
    with stage.accept() as peer:
        peer.recv(48, socket.MSG_WAITALL)
        peer.sendall(Header(DATA, 5, 400).encode(Dialect.TCP) + bytes(99))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with pytest.raises(RuntimeError, match=GLOO_GIVES_UP):
        work.wait()
    (problem,) = wait_for_problems(stage.bridge)
    assert "ECONNRESET" in problem


def test_peer_that_leaves_between_messages_is_no_problem(stage: Stage) -> None:
    stage.publish(stage.record().encode())
    group = stage.group()
    stage.accept().close()
    with pytest.raises(RuntimeError, match="Connection"):
        group.recv([torch.empty(100)], 0, 5).wait()
    assert not stage.bridge.problems


def test_record_of_an_unknown_format(stage: Stage) -> None:
    stage.publish(b"\x07" * 200)
    with pytest.raises(GlooProtocolError, match=r"record of rank 0 in the store \(200 bytes, key 0/0\).*another torch"):
        stage.group()


def test_record_of_a_larger_group(stage: Stage) -> None:
    stage.publish(RankRecord(b"box", stage.record().address, (0, 1, 2)).encode())
    with pytest.raises(GlooProtocolError, match=r"names 3 ranks where the group has 2.*same world size"):
        stage.group()


def test_peer_on_ipv6(stage: Stage) -> None:
    """Its own gloo refuses our IPv4 record: "ss1.ss_family == ss2.ss_family. 10 vs 2"."""
    stage.publish(RankRecord(b"box", SockAddr("2001:db8::1", 4000), (0, 1)).encode())
    with pytest.raises(GlooProtocolError, match=r"rank 0 listens at the IPv6 address \[2001:db8::1\]:4000"):
        stage.group()


def test_peer_on_a_mac_without_a_bridge(stage: Stage) -> None:
    stage.store.set("0/rank_0", "Mac.local")
    started = time.monotonic()
    with pytest.raises(VersionMismatch, match=r"rank 0 runs on macOS without a bridge.*hetdeploy join"):
        stage.group()
    assert time.monotonic() - started < PROMPT_SECONDS


@pytest.mark.usefixtures("short_renewal")
def test_peer_that_cannot_be_reached(stage: Stage) -> None:
    record = stage.record()
    stage.listener.close()
    stage.publish(record.encode())
    with pytest.raises(
        PeerUnreachable, match=rf"cannot reach rank 0 at 127.0.0.1 port {record.address.port} .*refused"
    ):
        stage.group()


def test_record_that_an_earlier_gloo_left_is_replaced(stage: Stage) -> None:
    """Its port is closed, so the wrapper looks again until the peer's new gloo has published."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        left = RankRecord(b"box", SockAddr("127.0.0.1", gone.getsockname()[1]), (0, 1))
    stage.publish(left.encode())
    asked = threading.Event()

    def dial(host: str, port: int) -> socket.socket:
        asked.set()
        return plain_dial(host, port)

    stage.bridge._dial = dial
    renew = threading.Thread(target=lambda: (asked.wait(PROMPT_SECONDS), stage.publish(stage.record().encode())))
    renew.start()
    stage.group()
    renew.join()
    stage.accept().close()


@pytest.mark.usefixtures("short_renewal")
def test_link_that_refuses(stage: Stage) -> None:
    def dial(host: str, port: int) -> socket.socket:
        raise PeerUnreachable("the link to the head is gone", "start `hetdeploy join` again")

    stage.bridge._dial = dial
    stage.publish(stage.record().encode())
    with pytest.raises(PeerUnreachable, match="link to the head is gone: start"):
        stage.group()


def test_bridge_that_is_gone(stage: Stage) -> None:
    stage.bridge.close()
    with pytest.raises(PeerUnreachable, match=r"bridge of this machine does not answer at .*hetdeploy join"):
        stage.group()


def test_no_path_for_a_socket(tmp_path) -> None:
    folder = tmp_path / ("x" * 100)
    with pytest.raises(HetdeployError, match="too long"):
        BridgeService(plain_dial, Dialect.TCP, folder).start()


def wait_for_problems(bridge: BridgeService) -> list[str]:
    """The relay's thread may still be writing it down when gloo has raised already."""
    deadline = time.monotonic() + PROMPT_SECONDS
    while not bridge.problems and time.monotonic() < deadline:
        time.sleep(0.01)
    return list(bridge.problems)
