"""The store that gloo is given, call by call, over a real store; and the guard of ranks that have no bridge."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from hetdeploy.errors import VersionMismatch
from hetdeploy.gloo import store as store_module
from hetdeploy.gloo.address import UNREACHABLE, PairAddress, SockAddr
from hetdeploy.gloo.bridge import BridgeService
from hetdeploy.gloo.control import BridgeClient
from hetdeploy.gloo.dialect import Dialect, Layout
from hetdeploy.gloo.record import RankRecord, decode_uv, encode_uv
from hetdeploy.gloo.store import BridgedStore, GuardedStore

SECOND = timedelta(seconds=1)
LONG = timedelta(seconds=30)
PROMPT_SECONDS = 5.0
TCP_RECORD = RankRecord(b"box", SockAddr("10.77.0.1", 4000), (0, 1)).encode()
UV_RECORD = encode_uv({0: PairAddress(SockAddr("10.77.0.2", 4000), 1)}, Layout.DARWIN)


@pytest.fixture
def inner() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def bridge() -> Iterator[BridgeService]:
    service = BridgeService(lambda host, port: socket.create_connection((host, port), 5), Dialect.UV, node="mac")
    service.start()
    yield service
    service.close()


def prompt(call, *arguments) -> None:
    started = time.monotonic()
    with pytest.raises(VersionMismatch, match=r"start the macOS rank with `hetdeploy join`") as raised:
        call(*arguments)
    assert "cannot talk to the gloo of this rank" in str(raised.value)
    assert time.monotonic() - started < PROMPT_SECONDS


def test_linux_rank_sees_that_its_peer_is_a_mac(inner: dist.HashStore) -> None:
    """macOS's gloo writes its host name and then waits for ours, which never comes: its record is never there."""
    guarded = GuardedStore(inner, 0, 2, Dialect.TCP)
    inner.set("0/rank_1", "Mac.local")
    prompt(guarded.wait, ["0/1"], LONG)


def test_linux_rank_reads_the_record_of_a_mac(inner: dist.HashStore) -> None:
    guarded = GuardedStore(inner, 1, 2, Dialect.TCP)
    inner.set("0/rank_0", "Mac.local")
    inner.set("0/0", UV_RECORD)
    guarded.wait(["0/0"], LONG)
    prompt(guarded.get, "0/0")


def test_mac_sees_that_its_peer_is_a_linux_rank(inner: dist.HashStore) -> None:
    guarded = GuardedStore(inner, 1, 2, Dialect.UV)
    inner.set("0/0", TCP_RECORD)
    prompt(guarded.wait, ["0/rank_0"], LONG)


def test_mac_reads_the_record_of_a_linux_rank(inner: dist.HashStore) -> None:
    guarded = GuardedStore(inner, 0, 2, Dialect.UV)
    inner.set("0/1", TCP_RECORD)
    guarded.wait(["0/1"], LONG)
    prompt(guarded.get, "0/1")


def test_guard_lets_a_rank_of_the_same_dialect_pass(inner: dist.HashStore) -> None:
    guarded = GuardedStore(inner, 0, 2, Dialect.TCP)
    threading.Timer(0.1, lambda: inner.set("0/1", TCP_RECORD)).start()
    guarded.wait(["0/1"], LONG)
    assert guarded.get("0/1") == TCP_RECORD


def test_guard_keeps_the_timeout_and_says_who_is_missing(inner: dist.HashStore) -> None:
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="rank 1 did not publish 0/1"):
        GuardedStore(inner, 0, 2, Dialect.TCP).wait(["0/1"], SECOND / 5)
    assert time.monotonic() - started < PROMPT_SECONDS


def test_all_other_calls_pass_through(inner: dist.HashStore) -> None:
    guarded = GuardedStore(inner, 0, 2, Dialect.TCP)
    guarded.set("key", b"value")
    assert guarded.get("key") == b"value"
    assert guarded.add("counter", 2) == 2
    assert guarded.check(["key"])
    assert guarded.compare_set("key", "value", "other") == b"other"
    guarded.append("key", "!")
    assert guarded.multi_get(["key"]) == [b"other!"]
    guarded.multi_set(["a"], ["1"])
    assert guarded.num_keys() == inner.num_keys()
    assert guarded.delete_key("a")
    guarded.wait(["key"])


def test_record_of_an_earlier_group_is_waited_out(inner: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group made again under its old name: the peer's record is there, but still the one it had then."""
    first = GuardedStore(inner, 0, 2, Dialect.TCP)
    inner.set("0/1", b"old")
    first.set("0/0", b"mine, old")
    assert first.get("0/1") == b"old"

    again = GuardedStore(inner, 0, 2, Dialect.TCP)
    again.set("0/0", b"mine, new")
    threading.Timer(0.2, lambda: inner.set("0/1", b"new")).start()
    assert again.get("0/1") == b"new"

    monkeypatch.setattr(store_module, "RENEWAL_TIMEOUT", 0.2)
    once_more = GuardedStore(inner, 0, 2, Dialect.TCP)
    once_more.set("0/0", b"mine, newer")
    assert once_more.get("0/1") == b"new"  # after a while it is taken as it is


@pytest.mark.parametrize("layout", Layout)
def test_calls_of_a_uv_rank(inner: dist.HashStore, bridge: BridgeService, layout: Layout) -> None:
    """What macOS's gloo asks, in its order, and what reaches the store that Linux ranks read."""
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_server(("127.0.0.1", 0)) as local:
        record = RankRecord(b"box", SockAddr("127.0.0.1", peer.getsockname()[1]), (0, 41))
        inner.set("0/0", record.encode())
        store = BridgedStore(inner, 1, 2, BridgeClient(bridge.path), Dialect.UV, layout)
        store.set("0/rank_1", b"Mac.local")
        assert not inner.check(["0/rank_1"])
        store.wait(["0/rank_0"], LONG)
        assert store.get("0/rank_0") == b"box"
        store.set("0/1", encode_uv({0: PairAddress(SockAddr("127.0.0.1", local.getsockname()[1]), 42)}, layout))
        store.wait(["0/0"], LONG)
        given = decode_uv(store.get("0/0"), 0, 2, layout)
        store.close()

        assert given[1].address == UNREACHABLE[socket.AF_INET]
        published = RankRecord.decode(inner.get("0/1"), 2)
        assert published.address == UNREACHABLE[socket.AF_INET]
        assert published.note is not None
        assert (published.note.node, published.note.dialect) == ("mac", Dialect.UV)
        with peer.accept()[0] as far, local.accept()[0] as near:
            assert far.recv(8, socket.MSG_WAITALL) == (41).to_bytes(8, "little")
            assert near.recv(4, socket.MSG_WAITALL) == (42).to_bytes(4, "little")


@pytest.mark.parametrize("dialect", Dialect)
def test_peer_on_a_mac_without_a_bridge(inner: dist.HashStore, bridge: BridgeService, dialect: Dialect) -> None:
    """It waits for our host name before it writes its record, whatever this rank is."""
    store = BridgedStore(inner, 0, 2, BridgeClient(bridge.path), dialect, Layout.DARWIN)
    inner.set("0/rank_1", "Mac.local")
    with pytest.raises(VersionMismatch, match="rank 1 runs on macOS without a bridge"):
        store.wait(["0/1"], LONG)
    store.close()


def test_a_group_of_one_needs_no_bridge(inner: dist.HashStore, bridge: BridgeService) -> None:
    store = BridgedStore(inner, 0, 1, BridgeClient(bridge.path), Dialect.UV, Layout.DARWIN)
    store.set("0/rank_0", b"Mac.local")
    store.set("0/0", b"")
    assert store.get("0/0") == b""
    store.close()
