"""Two joiners, of whom neither can be dialled, reach each other through the head."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from link_peers import WAIT_SECONDS, Recorder, served

from hetdeploy.errors import HetdeployError, PeerUnreachable
from hetdeploy.link.client import LinkClient
from hetdeploy.link.credentials import JOINER, Credentials


class Pair:
    """Two joiners at one head; ``other`` is known as "other"."""

    def __init__(self, credentials: Credentials, port: int, handler: Recorder) -> None:
        invitation = credentials.invitation(JOINER, "127.0.0.1", port)
        self.one = LinkClient.connect(invitation, JOINER, {})
        handler.next_event("connected")
        self.other = LinkClient.connect(invitation, JOINER, {})
        handler.named["other"] = handler.next_event("connected")[1]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    credentials = Credentials.create(tmp_path / "link", 60)
    with served(credentials.folder, dial_seconds=2.0) as (server, handler):
        both = Pair(credentials, server.port, handler)
        yield both
        both.one.close()
        both.other.close()


def answer(client: LinkClient, reply: bytes) -> threading.Thread:
    """Come to the next meeting that is asked for, send ``reply``, and stay until that has been read."""

    def meet() -> None:
        message = client.receive(WAIT_SECONDS)
        assert message is not None
        assert message["type"] == "meet"
        with client.meet(message["id"]) as sock:
            sock.sendall(reply)
            sock.settimeout(WAIT_SECONDS)
            assert sock.recv(100) == b"question"
            assert sock.recv(100) == b"thanks"

    thread = threading.Thread(target=meet)
    thread.start()
    return thread


def test_bytes_pass_both_ways(pair: Pair) -> None:
    thread = answer(pair.other, b"answer" * 100_000)
    with pair.one.dial("node:other", 0) as sock:
        sock.settimeout(WAIT_SECONDS)
        sock.sendall(b"question")
        expected = b"answer" * 100_000
        received = bytearray()
        while len(received) < len(expected):
            received += sock.recv(1 << 16)
        assert received == expected
        sock.sendall(b"thanks")
        thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_who_does_not_come_is_not_waited_for_for_ever(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(PeerUnreachable, match="did not come to meet within 2 s"):
        pair.one.dial("node:other", 0)
    assert time.monotonic() - started < WAIT_SECONDS
    message = pair.other.receive(WAIT_SECONDS)
    assert message is not None
    with pytest.raises(HetdeployError, match="this meeting is over"):
        pair.other.meet(message["id"])


def test_nobody_meets_a_stranger(pair: Pair) -> None:
    with pytest.raises(HetdeployError, match="no other joiner of this job is called nobody"):
        pair.one.dial("node:nobody", 0)
    with pytest.raises(HetdeployError, match="this meeting is over"):
        pair.one.meet("made up")


def test_a_meeting_ends_with_either_session(pair: Pair) -> None:
    met, ended = threading.Event(), threading.Event()

    def meet() -> None:
        message = pair.other.receive(WAIT_SECONDS)
        assert message is not None
        with pair.other.meet(message["id"]) as sock:
            met.set()
            ended.wait(WAIT_SECONDS)
            sock.close()

    thread = threading.Thread(target=meet)
    thread.start()
    with pair.one.dial("node:other", 0) as sock:
        assert met.wait(WAIT_SECONDS)
        pair.other.close()
        sock.settimeout(WAIT_SECONDS)
        with pytest.raises(OSError, match=r"reset|EOF|closed"):
            while sock.recv(100):
                pass
            raise ConnectionResetError("closed")
    ended.set()
    thread.join(WAIT_SECONDS)
