"""Two joiners that meet: one bridge dials the other over the link and says which rank it wants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hetdeploy.errors import PeerUnreachable
from hetdeploy.gloo import bridge as bridge_module
from hetdeploy.gloo.bridge import BridgeService
from hetdeploy.gloo.control import BridgeClient
from hetdeploy.gloo.dialect import Dialect
from hetdeploy.gloo.wire import RECV_READY, Header

TIMEOUT = 10.0


@contextmanager
def joiner(node: str, dialect: Dialect, dial=None) -> Iterator[tuple[BridgeService, BridgeClient, socket.socket]]:
    """A bridge, a rank's connection to it, and the listener that plays this rank's gloo."""
    service = BridgeService(dial or (lambda host, port: pytest.fail("it must not dial")), dialect, node=node)
    service.start()
    client = BridgeClient(service.path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)
        yield service, client, listener
    client.close()
    service.close()


def offer(client: BridgeClient, rank: int, peer: int, listener: socket.socket, sequence: int) -> None:
    where = [*listener.getsockname(), 0, sequence]
    client.request("offer", token=f"of {rank}", rank=rank, size=2, peers={str(peer): where})


@pytest.mark.parametrize("second", Dialect)
def test_two_bridges_speak_tcp_between_them(second: Dialect) -> None:
    with joiner("linux", Dialect.TCP) as (low, low_rank, low_gloo):

        def dial(host: str, port: int) -> socket.socket:
            assert host == "node:linux"
            near, far = socket.socketpair()
            threading.Thread(target=low.meet, args=(far,)).start()
            return near

        with joiner("mac", second, dial) as (_, high_rank, high_gloo):
            offer(low_rank, 0, 1, low_gloo, 5)
            offer(high_rank, 1, 0, high_gloo, 6)
            high_rank.request("meet", token="of 1", peer=0, node="linux", peer_token="of 0")
            low_rank.request("await", token="of 0", peer=1, node="mac")
            with low_gloo.accept()[0] as left, high_gloo.accept()[0] as right:
                left.settimeout(TIMEOUT)
                right.settimeout(TIMEOUT)
                assert left.recv(8, socket.MSG_WAITALL) == b"\5" + bytes(7)
                width = 8 if second is Dialect.TCP else 4
                assert right.recv(width, socket.MSG_WAITALL) == b"\6" + bytes(width - 1)
                sent = Header(RECV_READY, 9, 100)
                left.sendall(sent.encode(Dialect.TCP))
                assert right.recv(64) == sent.encode(second)


def test_ranks_of_one_machine_need_no_link() -> None:
    with (
        joiner("mac", Dialect.UV) as (service, low_rank, low_gloo),
        socket.create_server(("127.0.0.1", 0)) as high_gloo,
    ):
        high_rank = BridgeClient(service.path)
        offer(low_rank, 0, 1, low_gloo, 5)
        offer(high_rank, 1, 0, high_gloo, 6)
        high_rank.request("meet", token="of 1", peer=0, node="mac", peer_token="of 0")
        low_rank.request("await", token="of 0", peer=1, node="mac")
        with low_gloo.accept()[0] as left, high_gloo.accept()[0] as right:
            assert left.recv(4, socket.MSG_WAITALL) == b"\5\0\0\0"
            assert right.recv(4, socket.MSG_WAITALL) == b"\6\0\0\0"
        high_rank.close()


def test_rank_that_nobody_awaits() -> None:
    """A record of a group that is gone, or somebody who guesses: the asker is told, and nothing else happens."""
    with joiner("linux", Dialect.TCP) as (service, rank, gloo):
        offer(rank, 0, 1, gloo, 5)
        for wish in ({"token": "guessed", "rank": 1}, {"token": "of 0", "rank": 7}, {"token": "of 0"}):
            near, far = socket.socketpair()
            with near:
                near.sendall(json.dumps(wish).encode() + b"\n")
                with pytest.raises(PeerUnreachable, match="no rank of linux awaits"):
                    service.meet(far)
                answer = json.loads(near.recv(4096))
                assert not answer["ok"]
        assert not service._threads - {thread for thread in service._threads if thread.name in ("bridge", "client")}


@pytest.mark.parametrize("sent", [b"", b"no json\n", b"[1]\n", b'{"rank": "x"}\n', b"[" * 4000 + b"\n", b"x" * 5000])
def test_preamble_that_makes_no_sense(sent: bytes) -> None:
    with joiner("linux", Dialect.TCP) as (service, _, _gloo):
        near, far = socket.socketpair()
        with near:
            near.sendall(sent)
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerUnreachable, match="meeting with another joiner failed"):
                service.meet(far)
        assert far.fileno() == -1


def test_peer_that_never_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "MEETING_TIMEOUT", 0.1)
    with joiner("linux", Dialect.TCP) as (_, rank, gloo):
        offer(rank, 0, 1, gloo, 5)
        with pytest.raises(PeerUnreachable, match=r"rank 1 on mac is there but did not dial rank 0 within 0.1 s"):
            rank.request("await", token="of 0", peer=1, node="mac")


def test_closing_ends_a_wait() -> None:
    with joiner("linux", Dialect.TCP) as (service, rank, gloo):
        offer(rank, 0, 1, gloo, 5)
        refused = threading.Event()

        def ask() -> None:
            with pytest.raises(PeerUnreachable):
                rank.request("await", token="of 0", peer=1, node="mac")
            refused.set()

        threading.Thread(target=ask, daemon=True).start()
        service.close()
        assert refused.wait(TIMEOUT)
