"""The store records of both dialects, byte by byte."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetdeploy.gloo.address import UNREACHABLE, PairAddress, SockAddr
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout
from hetdeploy.gloo.record import BridgeNote, RankRecord, bridged_record, decode_uv, encode_uv

# A long run: HETDEPLOY_TEST_EXAMPLES=30000.
fuzz = settings(deadline=None, max_examples=int(os.environ.get("HETDEPLOY_TEST_EXAMPLES", "100")))

ADDRESS = SockAddr("10.77.0.1", 40000)
NOTE = BridgeNote("mac", "ab12", Dialect.UV, "Mac.local")


def test_rank_record() -> None:
    encoded = RankRecord(b"box", ADDRESS, (5, 0, 7)).encode()
    assert encoded == (
        struct.pack("<Q", 3)
        + b"box"
        + struct.pack("<Q", 136)
        + ADDRESS.encode(Layout.LINUX)
        + struct.pack("<q", -1)
        + struct.pack("<3q", 5, 0, 7)
    )
    assert RankRecord.decode(encoded, 3) == RankRecord(b"box", ADDRESS, (5, 0, 7))


def test_uv_record_leaves_the_own_rank_out() -> None:
    pairs = {rank: PairAddress(ADDRESS, 10 + rank) for rank in (2, 0, 3)}
    encoded = encode_uv(pairs, Layout.DARWIN)
    assert len(encoded) == 3 * 136
    assert [encoded[start + 128] for start in (0, 136, 272)] == [10, 12, 13]
    assert decode_uv(encoded, 1, 4, Layout.DARWIN) == pairs


def test_note_of_a_bridge() -> None:
    record = RankRecord.decode(bridged_record(NOTE, (1, 2)).encode(), 2)
    assert record.note == NOTE
    assert record.address in UNREACHABLE.values()
    assert RankRecord(b"box", ADDRESS, ()).note is None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_record_of_another_world_size(size: int) -> None:
    encoded = RankRecord(b"box", ADDRESS, (0, 1, 2)).encode()
    with pytest.raises(GlooProtocolError, match=f"names 3 ranks where the group has {size}"):
        RankRecord.decode(encoded, size)


def test_record_of_the_other_dialect() -> None:
    pairs = {rank: PairAddress(ADDRESS, rank) for rank in (0, 2)}
    with pytest.raises(GlooProtocolError, match=r"host name of .* bytes, which cannot be"):
        RankRecord.decode(encode_uv(pairs, Layout.LINUX), 3)
    with pytest.raises(GlooProtocolError, match="not 2 pair addresses"):
        decode_uv(RankRecord(b"box", ADDRESS, (0, 1, 2)).encode(), 1, 3, Layout.LINUX)


def test_unreadable_note() -> None:
    with pytest.raises(GlooProtocolError, match="same hetdeploy"):
        _ = RankRecord(NOTE.encode()[:-1], ADDRESS, ()).note


@fuzz
@given(st.binary(max_size=400), st.integers(1, 4))
def test_arbitrary_bytes(data: bytes, size: int) -> None:
    for decode in (
        lambda: RankRecord.decode(data, size).note,
        lambda: decode_uv(data, 0, size, Layout.DARWIN),
    ):
        try:
            decode()
        except GlooProtocolError:
            continue


@fuzz
@given(st.data(), st.binary(max_size=64), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_altered_record(data: st.DataObject, hostname: bytes, sequences: list[int]) -> None:
    """One byte changed, or the end cut: another record or an error, never anything else."""
    encoded = bytearray(RankRecord(hostname, ADDRESS, tuple(sequences)).encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    altered = bytes(encoded[: data.draw(st.integers(0, len(encoded)))])
    try:
        record = RankRecord.decode(altered, len(sequences))
        assert len(record.sequences) == len(sequences)
        _ = record.note
    except GlooProtocolError:
        return
