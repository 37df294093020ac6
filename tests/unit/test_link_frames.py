"""Frames: what is taken apart, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from link_peers import tcp_pair

from hetdeploy.link import frames
from hetdeploy.link.frames import FrameError, FrameReader

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
messages = st.dictionaries(text, values, max_size=5)


@settings(max_examples=40)
@given(st.lists(messages, max_size=3), st.integers(1, 50))
def test_messages_survive_any_cutting(sent: list[dict[str, Any]], step: int) -> None:
    stream = b"".join(frames.encode(message) for message in sent)
    reader = FrameReader()
    got = []
    for start in range(0, len(stream), step):
        got += reader.feed(memoryview(stream)[start : start + step])
    assert got == sent


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_frame_error(data: bytes) -> None:
    for body in (data, b'{"a": "' + data + b'"}'):
        try:
            message = frames.decode(body)
        except FrameError:
            continue
        assert isinstance(message, dict)
        json.dumps(message, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b'"text"',
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"\\uDC00": 1}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": ' + b"1" * 10_000 + b"}",
    ],
)
def test_what_is_no_proper_object_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        frames.decode(body)


@pytest.mark.parametrize("prefix", [b"\0\0\0\0", b"\0\0\x10\x01", b"GET ", b"\xff\xff\xff\xff"])
def test_a_length_out_of_bounds_is_refused_before_anything_is_held(prefix: bytes) -> None:
    with pytest.raises(FrameError, match="announces"):
        FrameReader(4096).feed(memoryview(prefix))


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        frames.encode({"text": "x" * frames.LIMIT})


def test_receive_takes_one_frame_and_not_a_byte_more() -> None:
    left, right = tcp_pair()
    with left, right:
        deadline = time.monotonic() + 5
        left.sendall(frames.encode({"a": 1}) + b"and then a stream")
        assert frames.receive(right, 100, deadline) == {"a": 1}
        assert right.recv(100) == b"and then a stream"


def test_the_deadline_holds_against_a_trickle() -> None:
    left, right = tcp_pair()
    stop = threading.Event()

    def trickle() -> None:
        for byte in frames.encode({"text": "x" * 1000}):
            if stop.wait(0.02):
                return
            left.sendall(bytes((byte,)))

    thread = threading.Thread(target=trickle)
    with left, right:
        thread.start()
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            frames.receive(right, 4096, started + 0.3)
        assert time.monotonic() - started < 5
        stop.set()
        thread.join()


def test_a_peer_that_closes_in_a_frame_is_a_connection_error() -> None:
    left, right = tcp_pair()
    with right:
        left.sendall(frames.encode({"a": 1})[:-1])
        left.close()
        with pytest.raises(ConnectionError, match="in a frame"):
            frames.receive(right, 100, time.monotonic() + 5)
