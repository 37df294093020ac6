"""Greetings, headers and codecs: exact bytes, any cut of the stream, and streams that make no sense."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetdeploy.gloo.dialect import Dialect, GlooProtocolError
from hetdeploy.gloo.wire import (
    DATA,
    HEADER_BYTES,
    LONGEST_MESSAGE,
    MOST_ANNOUNCEMENTS,
    RECV_READY,
    SEND_READY,
    Codec,
    Header,
    codecs,
    greeting,
)

# A long run: HETDEPLOY_TEST_EXAMPLES=30000.
fuzz = settings(deadline=None, max_examples=int(os.environ.get("HETDEPLOY_TEST_EXAMPLES", "100")))

TCP, UV = Dialect.TCP, Dialect.UV
both_ways = pytest.mark.parametrize(("source", "target"), [(TCP, TCP), (TCP, UV), (UV, TCP), (UV, UV)])


def test_greetings() -> None:
    assert greeting(TCP, -2) == bytes.fromhex("feffffffffffffff")
    assert greeting(UV, -2) == bytes.fromhex("feffffff")
    with pytest.raises(GlooProtocolError, match="does not fit the uv greeting"):
        greeting(UV, 2**31)


@pytest.mark.parametrize(
    ("header", "tcp", "uv"),
    [
        (Header(DATA, 0x600 << 48, 10), (58, 1, 0x600 << 48, 0, 10, 0), (42, 1, 0x600 << 48, 10)),
        (Header(DATA, 1, 0), (48, 1, 1, 0, 0, 0), (32, 1, 1, 0)),
        (Header(SEND_READY, 7, 10), (48, 2, 7, 0, 10, 0), (32, 2, 7, 10)),
        (Header(RECV_READY, 7, 10), (48, 3, 7, 0, 10, 0), (32, 3, 7, 10)),
    ],
)
def test_headers(header: Header, tcp: tuple[int, ...], uv: tuple[int, ...]) -> None:
    assert header.encode(TCP) == struct.pack("<6Q", *tcp)
    assert header.encode(UV) == struct.pack("<4Q", *uv)
    assert Header.decode(struct.pack("<6Q", *tcp), TCP) == header
    assert Header.decode(struct.pack("<4Q", *uv), UV) == header


@pytest.mark.parametrize(
    "fields",
    [
        (48, 0, 7, 0, 0, 0),  # op 0: bound buffers, which no torch collective uses
        (48, 4, 7, 0, 0, 0),
        (58, 1, 7, 0, 11, 0),  # payload beyond the announced length
        (47, 1, 7, 0, 0, 0),
        (58, 2, 7, 0, 10, 0),  # a notice has no payload
        (58, 1, 7, 8, 10, 0),  # offsets do not exist in uv
        (58, 1, 7, 0, 10, 8),
        (48 + LONGEST_MESSAGE + 1, 1, 7, 0, LONGEST_MESSAGE + 1, 0),
        (0x5353_4820_3220_5448, 1, 7, 0, 10, 0),
    ],
)
def test_headers_that_make_no_sense(fields: tuple[int, ...]) -> None:
    codec, _ = codecs(TCP, UV, "rank 0 at 10.77.0.1:5", "rank 1")
    with pytest.raises(GlooProtocolError, match=rf"read from rank 0 at 10.77.0.1:5: .* op {fields[1]}, slot 0x7"):
        codec.feed(memoryview(struct.pack("<6Q", *fields)))


def test_payload_is_passed_on_and_not_copied() -> None:
    codec = pair_awaiting(TCP, UV, {5: [4]})
    data = memoryview(Header(DATA, 5, 4).encode(TCP) + b"abcd")
    header, payload = codec.feed(data)
    assert header == Header(DATA, 5, 4).encode(UV)
    assert isinstance(payload, memoryview)
    assert payload.obj is data.obj


def test_payload_longer_than_its_receiver_awaits() -> None:
    """gloo would abort the receiving process."""
    codec = pair_awaiting(UV, TCP, {5: [400]})
    with pytest.raises(GlooProtocolError, match=r"404 bytes arrived where 400 bytes are awaited.*tensors of different"):
        codec.feed(memoryview(Header(DATA, 5, 404).encode(UV)))


def test_payload_that_nobody_awaits() -> None:
    codec = pair_awaiting(UV, TCP, {5: [400]})
    codec.feed(memoryview(Header(DATA, 5, 400).encode(UV) + bytes(400)))
    with pytest.raises(GlooProtocolError, match="nobody awaits"):
        codec.feed(memoryview(Header(DATA, 5, 400).encode(UV)))


def test_announcements_do_not_grow_without_bound() -> None:
    near, far = codecs(TCP, UV, "a", "b")
    notice = memoryview(Header(RECV_READY, 1, 8).encode(TCP))
    for _ in range(MOST_ANNOUNCEMENTS + 10):
        near.feed(notice)
    assert not near._announcements._awaited
    far.feed(memoryview(Header(DATA, 1, 9).encode(UV)))  # no longer compared, still passed on


@pytest.mark.parametrize(
    ("cut", "missing"), [(20, "the rest of a header"), (HEADER_BYTES[TCP] + 3, "7 bytes of a payload")]
)
def test_stream_that_ends_in_a_message(cut: int, missing: str) -> None:
    codec = pair_awaiting(TCP, UV, {1: [10]})
    codec.feed(memoryview((Header(DATA, 1, 10).encode(TCP) + bytes(10))[:cut]))
    assert codec.in_message
    with pytest.raises(GlooProtocolError, match=missing):
        codec.finish()


messages = st.lists(
    st.tuples(
        st.sampled_from([DATA, SEND_READY, RECV_READY]),
        st.integers(0, 3) | st.integers(0, 2**64 - 1),
        st.binary(max_size=120),
    ),
    max_size=12,
)
cuts = st.lists(st.integers(1, 200), min_size=1, max_size=20)


@both_ways
@fuzz
@given(messages=messages, cuts=cuts)
def test_any_cut_of_the_stream_gives_the_same(
    source: Dialect, target: Dialect, messages: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    codec = pair_awaiting(source, target, awaited(messages))
    assert fed(codec, stream(messages, source), cuts) == stream(messages, target)
    assert not codec.in_message
    codec.finish()


@both_ways
@fuzz
@given(messages=messages, cuts=cuts, data=st.data())
def test_altered_stream(
    source: Dialect, target: Dialect, messages: list[tuple[int, int, bytes]], cuts: list[int], data: st.DataObject
) -> None:
    """An error or other messages, the same however the stream is cut, and never more kept than one header."""
    altered = bytearray(stream(messages, source))
    for _ in range(data.draw(st.integers(0, 4)) if altered else 0):
        altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
    outcomes = []
    for way in (cuts, [len(altered) + 1]):
        codec = pair_awaiting(source, target, awaited(messages))
        try:
            outcomes.append(fed(codec, bytes(altered), way))
        except GlooProtocolError as error:
            outcomes.append(str(error).encode())
        assert len(codec._partial) <= HEADER_BYTES[source]
    assert outcomes[0] == outcomes[1]


@both_ways
@fuzz
@given(data=st.binary(max_size=300), cuts=cuts)
def test_arbitrary_bytes(source: Dialect, target: Dialect, data: bytes, cuts: list[int]) -> None:
    codec = pair_awaiting(source, target, {})
    try:
        fed(codec, data, cuts)
        codec.finish()
    except GlooProtocolError:
        return


def pair_awaiting(source: Dialect, target: Dialect, awaited: dict[int, list[int]]) -> Codec:
    """The codec of a direction whose receiver has announced what it awaits, by slot."""
    codec, back = codecs(source, target, "the writer", "the reader")
    for slot, lengths in awaited.items():
        for length in lengths:
            back.feed(memoryview(Header(RECV_READY, slot, length).encode(target)))
    return codec


def awaited(messages: list[tuple[int, int, bytes]]) -> dict[int, list[int]]:
    slots: dict[int, list[int]] = {}
    for operation, slot, payload in messages:
        if operation == DATA:
            slots.setdefault(slot, []).append(len(payload))
    return slots


def stream(messages: list[tuple[int, int, bytes]], dialect: Dialect) -> bytes:
    return b"".join(
        Header(operation, slot, len(payload)).encode(dialect) + (payload if operation == DATA else b"")
        for operation, slot, payload in messages
    )


def fed(codec: Codec, data: bytes, cuts: list[int]) -> bytes:
    """What comes out when ``data`` is read in pieces of the lengths ``cuts``, over and over."""
    output = bytearray()
    at = turn = 0
    while at < len(data):
        buffer = bytearray(data[at : at + cuts[turn % len(cuts)]])
        for chunk in codec.feed(memoryview(buffer)):
            output += chunk
        at += len(buffer)
        turn += 1
        buffer[:] = b"\xee" * len(buffer)  # the relay reads into the same buffer again
    return bytes(output)
