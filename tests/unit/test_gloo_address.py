"""The address layouts byte by byte, from the facts of both systems and of gloo."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetdeploy.gloo.address import UNREACHABLE, PairAddress, SockAddr
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout

# A long run: HETDEPLOY_TEST_EXAMPLES=30000.
fuzz = settings(deadline=None, max_examples=int(os.environ.get("HETDEPLOY_TEST_EXAMPLES", "100")))

IPV6 = "2001:db8::5"
IPV6_BYTES = bytes.fromhex("20010db8000000000000000000000005")

addresses = st.builds(SockAddr, st.ip_addresses(v=4).map(str), st.integers(0, 65535)) | st.builds(
    SockAddr, st.ip_addresses(v=6).map(str), st.integers(0, 65535), st.integers(0, 2**32 - 1)
)


@pytest.mark.parametrize(
    ("layout", "address", "start"),
    [
        (Layout.LINUX, SockAddr("10.77.0.2", 0x1234), bytes.fromhex("0200 1234 0a4d0002")),
        (Layout.DARWIN, SockAddr("10.77.0.2", 0x1234), bytes.fromhex("1002 1234 0a4d0002")),
        (Layout.LINUX, SockAddr(IPV6, 443, 7), bytes.fromhex("0a00 01bb 00000000") + IPV6_BYTES + b"\7\0\0\0"),
        (Layout.DARWIN, SockAddr(IPV6, 443, 7), bytes.fromhex("1c1e 01bb 00000000") + IPV6_BYTES + b"\7\0\0\0"),
    ],
)
def test_sockaddr_layouts(layout: Layout, address: SockAddr, start: bytes) -> None:
    assert address.encode(layout) == start + bytes(128 - len(start))
    # gloo copies whatever its memory held behind the address.
    assert SockAddr.decode(start.ljust(28, b"\0") + b"\xaa" * 100, layout) == address


def test_address_as_the_system_itself_lays_it_out() -> None:
    """A record that stock torch 2.13 wrote on Linux, address 127.0.0.1:36559, with memory remains behind it."""
    written = bytes.fromhex("02008ecf7f0000010000000000000000306722f21f7f0000506a22f21f7f0000").ljust(128, b"\x55")
    assert SockAddr.decode(written, Layout.LINUX) == SockAddr("127.0.0.1", 0x8ECF)


@pytest.mark.parametrize(
    ("dialect", "tail"),
    [(Dialect.TCP, "feffffffffffffff"), (Dialect.UV, "feffffff00000000")],
)
def test_pair_address(dialect: Dialect, tail: str) -> None:
    pair = PairAddress(SockAddr("127.0.0.1", 80), -2)
    encoded = pair.encode(dialect, Layout.LINUX)
    assert len(encoded) == 136
    assert encoded[128:] == bytes.fromhex(tail)
    assert PairAddress.decode(encoded, dialect, Layout.LINUX) == pair


def test_padding_of_a_uv_pair_address_means_nothing() -> None:
    encoded = PairAddress(SockAddr("127.0.0.1", 80), 3).encode(Dialect.UV, Layout.DARWIN)
    assert PairAddress.decode(encoded[:132] + b"\xff" * 4, Dialect.UV, Layout.DARWIN).sequence == 3


@fuzz
@given(addresses, st.sampled_from(Layout), st.sampled_from(Dialect), st.integers(-(2**31), 2**31 - 1))
def test_round_trip(address: SockAddr, layout: Layout, dialect: Dialect, sequence: int) -> None:
    pair = PairAddress(address, sequence)
    assert PairAddress.decode(pair.encode(dialect, layout), dialect, layout) == pair


@fuzz
@given(addresses)
def test_unreachable_address_makes_every_gloo_listen(address: SockAddr) -> None:
    """gloo compares address bytes, then the port as stored, read little-endian; the end with the larger one dials."""
    unreachable = UNREACHABLE[address.family]

    def rank(one: SockAddr) -> tuple[bytes, int]:
        return socket.inet_pton(one.family, one.host), socket.htons(one.port)

    assert rank(unreachable) >= rank(address)
    assert unreachable.family == address.family


@pytest.mark.parametrize("layout", Layout)
def test_layouts_are_told_apart(layout: Layout) -> None:
    other = Layout.DARWIN if layout is Layout.LINUX else Layout.LINUX
    with pytest.raises(GlooProtocolError, match=f"{other.value} layout"):
        SockAddr.decode(SockAddr(IPV6, 1).encode(layout), other)


@fuzz
@given(st.binary(max_size=200), st.sampled_from(Layout), st.sampled_from(Dialect))
def test_arbitrary_bytes(data: bytes, layout: Layout, dialect: Dialect) -> None:
    try:
        pair = PairAddress.decode(data, dialect, layout)
    except GlooProtocolError:
        return
    assert len(data) == 136
    assert PairAddress.decode(pair.encode(dialect, layout), dialect, layout) == pair


def test_printed_as_one_writes_them() -> None:
    assert str(SockAddr("10.0.0.1", 5)) == "10.0.0.1:5"
    assert str(SockAddr("fe80::1", 5, 3)) == "[fe80::1%3]:5"
