"""The store that a rank's gloo is given: the job's store, with the addresses in it bent towards the bridge.

torch's ``ProcessGroupGloo`` publishes its record with ``set`` and finds its peers with ``wait`` and ``get``; the keys
arrive as ``<device>/<rank>`` and, in the ``uv`` dialect, ``<device>/rank_<rank>`` (host names), under whatever prefix
the group's store has. All else passes through.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from hetdeploy.errors import PeerUnreachable, VersionMismatch
from hetdeploy.gloo.address import UNREACHABLE, PairAddress
from hetdeploy.gloo.control import BridgeClient
from hetdeploy.gloo.dialect import Dialect, GlooProtocolError, Layout
from hetdeploy.gloo.record import PUBLISHED_FAMILY, BridgeNote, RankRecord, bridged_record, decode_uv, encode_uv

LOOK_AROUND_SECONDS = 1.0
"""How often a rank that waits for a peer looks whether that peer speaks the other dialect."""

# A waiting rank asks the store again and again: a wait in short turns would have torch log each turn as a timeout.
FIRST_POLL_SECONDS = 0.002
SLOWEST_POLL_SECONDS = 0.05

RENEWAL_TIMEOUT = 10.0
"""Seconds for a peer to replace the record of an earlier group of the same name, or of a gloo that is gone."""

RENEWAL_INTERVAL = 0.1
MOST_GENERATIONS = 64

# Own record of an earlier group -> the peers' records that were used with it: a group made again under the same name
# must not take them for new ones. Held by the process, since the groups are gone by then.
_generations: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()


class PassingStore(Store):
    """A store that hands every call on."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, value)  # type: ignore[arg-type]  # torch's stub knows str alone; gloo writes bytes

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def append(self, key: str, value: str) -> None:
        self._inner.append(key, value)  # type: ignore[attr-defined]  # missing in torch's stub

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._inner.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._inner.multi_set(keys, values)  # type: ignore[attr-defined]  # missing in torch's stub

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def list_keys(self) -> list[str]:
        return self._inner.list_keys()

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._inner.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._inner.queue_pop(key, block)

    def queue_len(self, key: str) -> int:
        return self._inner.queue_len(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def close(self) -> None:
        """The group has formed, or failed to."""


class GuardedStore(PassingStore):
    """For a rank that meets its peers directly: raises within seconds where a peer speaks the other dialect.

    Without it both sides wait for keys that the other never writes, until the group's timeout.
    """

    def __init__(self, inner: Store, rank: int, size: int, dialect: Dialect) -> None:
        super().__init__(inner)
        self._rank, self._size, self._dialect = rank, size, dialect
        self._groups: dict[str, _Group] = {}

    def set(self, key: str, value: str | bytes) -> None:
        name = _Key.parse(key)
        if name is not None and name.rank == self._rank and not name.hostname:
            self._begin(name, _bytes(value))
        super().set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (self._inner.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        for key in keys:
            self._wait_for(key, deadline)

    def get(self, key: str) -> bytes:
        name = _Key.parse(key)
        if name is None or name.hostname:
            return super().get(key)
        data = self._fresh(name)
        if self._dialect is Dialect.TCP and self._inner.check([name.hostname_key]):
            raise self._mixed(name.rank)
        if self._dialect is Dialect.UV and _is_rank_record(data, self._size):
            raise self._mixed(name.rank)
        return data

    def _begin(self, name: _Key, record: bytes) -> None:
        """A group forms under ``name.prefix``: find out which of the peers' records are left from an earlier one."""
        group = self._groups.setdefault(name.prefix, _Group())
        if self._inner.check([name.key]):
            group.stale = _generations.get(self._inner.get(name.key), {})
        group.used = _generations[record] = {}
        while len(_generations) > MOST_GENERATIONS:
            _generations.popitem(last=False)

    def _fresh(self, name: _Key) -> bytes:
        """The record of a peer, and not the one that an earlier group of this name left behind."""
        group = self._groups.setdefault(name.prefix, _Group())
        data = self._inner.get(name.key)
        deadline = time.monotonic() + RENEWAL_TIMEOUT
        while data == group.stale.get(name.rank) and time.monotonic() < deadline:
            time.sleep(RENEWAL_INTERVAL)
            data = self._inner.get(name.key)
        group.used[name.rank] = data
        return data

    def _wait_for(self, key: str, deadline: float) -> None:
        """Wait, and now and then look for the signs of a peer that will never write ``key``."""
        name = _Key.parse(key)
        pause = FIRST_POLL_SECONDS
        started = looked = time.monotonic()
        while not self._inner.check([key]):
            now = time.monotonic()
            if now >= deadline:
                whom = f"rank {name.rank}" if name else "a peer"
                raise DistStoreError(f"{whom} did not publish {key} in the store within {now - started:.0f} s")
            if name is not None and now - looked >= LOOK_AROUND_SECONDS:
                looked = now
                self._look_for_other_dialect(name)
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)

    def _look_for_other_dialect(self, name: _Key) -> None:
        if name.hostname:
            # A uv rank writes its host name before its record.
            other = self._inner.check([name.key]) and not self._inner.check([name.hostname_key])
        else:
            other = self._dialect is Dialect.TCP and self._inner.check([name.hostname_key])
        if other:
            raise self._mixed(name.rank)

    def _mixed(self, peer: int) -> VersionMismatch:
        theirs = Dialect.UV if self._dialect is Dialect.TCP else Dialect.TCP
        return VersionMismatch(
            f"rank {peer} runs on {theirs.platform}, whose gloo ({theirs.value}) cannot talk to the gloo of this rank "
            f"{self._rank} on {self._dialect.platform} ({self._dialect.value})",
            f"start the {Dialect.UV.platform} rank with `hetdeploy join`, which puts a bridge between them",
        )


class BridgedStore(GuardedStore):
    """For a rank of a joiner: its gloo publishes to, and finds, none but the bridge.

    ``get`` of a peer's record returns once both legs of that pair stand. It raises PeerUnreachable (a leg cannot be
    opened), GlooProtocolError (a record that cannot be read) or VersionMismatch (a peer of the other dialect without a
    bridge), where gloo itself would hang. ``close`` when the group has formed.
    """

    def __init__(
        self, inner: Store, rank: int, size: int, bridge: BridgeClient, dialect: Dialect, layout: Layout
    ) -> None:
        super().__init__(inner, rank, size, dialect)
        self._bridge, self._layout = bridge, layout

    def set(self, key: str, value: str | bytes) -> None:
        name = _Key.parse(key)
        if name is None or name.rank != self._rank or self._size == 1:
            return super().set(key, value)
        if name.hostname:
            self._groups.setdefault(name.prefix, _Group()).hostname = _bytes(value)
            return None
        return self._publish(name, _bytes(value))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        super().wait([name.key if (name := _Key.parse(key)) else key for key in keys], timeout)

    def get(self, key: str) -> bytes:
        name = _Key.parse(key)
        if name is None or name.rank == self._rank or self._size == 1:
            return self._inner.get(key)
        if name.hostname:
            return self._hostname(self._record(name))
        return self._meet(name)

    def close(self) -> None:
        self._bridge.close()

    def _publish(self, name: _Key, value: bytes) -> None:
        """Keep where the local gloo listens, offer it to the bridge, and publish an address that nobody can dial."""
        group = self._groups.setdefault(name.prefix, _Group())
        if self._dialect is Dialect.TCP:
            record = RankRecord.decode(value, self._size)
            group.hostname = record.hostname
            group.listening = {
                peer: PairAddress(record.address, number)
                for peer, number in enumerate(record.sequences)
                if peer != self._rank
            }
        else:
            group.listening = decode_uv(value, self._rank, self._size, self._layout)
        offered = self._bridge.request(
            "offer", token=group.token, rank=self._rank, size=self._size, peers=_offered(group.listening)
        )
        note = BridgeNote(offered["node"], group.token, self._dialect, group.hostname.decode(errors="replace"))
        sequences = [group.listening[peer].sequence if peer != self._rank else 0 for peer in range(self._size)]
        published = bridged_record(note, tuple(sequences)).encode()
        self._begin(name, published)
        self._inner.set(name.key, published)  # type: ignore[arg-type]  # as above

    def _meet(self, name: _Key) -> bytes:
        group = self._groups[name.prefix]
        if name.rank not in group.answers:
            record = self._open(name, group)
            group.answers[name.rank] = self._answer(group, name.rank, self._hostname(record))
        return group.answers[name.rank]

    def _open(self, name: _Key, group: _Group) -> RankRecord:
        """Have the bridge open both legs. A refusal may come from a record about to be replaced: look again."""
        deadline = time.monotonic() + RENEWAL_TIMEOUT
        refused: bytes | None = None
        while True:
            record = self._record(name)
            if group.used[name.rank] != refused:
                try:
                    self._request(name.rank, group, record)
                    return record
                except PeerUnreachable:
                    refused = group.used[name.rank]
                    if not self._renewed(name, refused, deadline):
                        raise

    def _request(self, peer: int, group: _Group, record: RankRecord) -> None:
        note = record.note
        if note is None:
            address = record.address
            if address.family != PUBLISHED_FAMILY:
                raise GlooProtocolError(
                    f"the gloo of rank {peer} listens at the IPv6 address {address}, and takes no peer that has none",
                    f"set GLOO_SOCKET_IFNAME where rank {peer} runs to an interface whose first address is IPv4",
                )
            self._bridge.request(
                "connect",
                token=group.token,
                peer=peer,
                host=address.dialled,
                port=address.port,
                sequence=record.sequences[self._rank],
            )
        elif self._rank > peer:
            self._bridge.request("meet", token=group.token, peer=peer, node=note.node, peer_token=note.token)
        else:
            self._bridge.request("await", token=group.token, peer=peer, node=note.node)

    def _renewed(self, name: _Key, refused: bytes, deadline: float) -> bool:
        while time.monotonic() < deadline:
            if self._inner.get(name.key) != refused:
                return True
            time.sleep(RENEWAL_INTERVAL)
        return False

    def _record(self, name: _Key) -> RankRecord:
        data = self._fresh(name)
        try:
            return RankRecord.decode(data, self._size)
        except GlooProtocolError as error:
            if self._inner.check([name.hostname_key]):
                raise self._mixed(name.rank) from None
            where = f"the record of rank {name.rank} in the store ({len(data)} bytes, key {name.key})"
            raise GlooProtocolError(f"{where} cannot be used: {error.problem}", error.fix) from None

    def _look_for_other_dialect(self, name: _Key) -> None:
        # Behind a bridge nobody writes host names, whatever the dialect.
        if self._inner.check([name.hostname_key]):
            raise self._mixed(name.rank)

    def _mixed(self, peer: int) -> VersionMismatch:
        return VersionMismatch(
            f"rank {peer} runs on {Dialect.UV.platform} without a bridge, so no other machine can reach it",
            f"start rank {peer} with `hetdeploy join`",
        )

    def _hostname(self, record: RankRecord) -> bytes:
        return record.hostname if record.note is None else record.note.hostname.encode()

    def _answer(self, group: _Group, peer: int, hostname: bytes) -> bytes:
        """What the local gloo reads as the record of ``peer``: an address above its own, so that it listens."""
        unreachable = UNREACHABLE[group.listening[peer].address.family]
        if self._dialect is Dialect.TCP:
            return RankRecord(hostname, unreachable, (0,) * self._size).encode()
        others = [rank for rank in range(self._size) if rank != peer]
        return encode_uv({rank: PairAddress(unreachable, 0) for rank in others}, self._layout)


@dataclass
class _Group:
    """What one gloo context (a device of a process group) has published and read."""

    hostname: bytes = b""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    listening: dict[int, PairAddress] = field(default_factory=dict)
    answers: dict[int, bytes] = field(default_factory=dict)
    stale: dict[int, bytes] = field(default_factory=dict)
    used: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Key:
    """``<prefix><rank>`` or ``<prefix>rank_<rank>``, the prefix empty or ending in a slash."""

    prefix: str
    rank: int
    hostname: bool

    @classmethod
    def parse(cls, key: str) -> _Key | None:
        """None for a key that gloo's rendezvous does not use."""
        prefix, slash, last = key.rpartition("/")
        number = last.removeprefix("rank_")
        if not (number.isascii() and number.isdigit()):
            return None
        return cls(prefix + slash, int(number), last != number)

    @property
    def key(self) -> str:
        return f"{self.prefix}{self.rank}"

    @property
    def hostname_key(self) -> str:
        return f"{self.prefix}rank_{self.rank}"


def _offered(listening: dict[int, PairAddress]) -> dict[str, Sequence[str | int]]:
    return {
        str(peer): (pair.address.host, pair.address.port, pair.address.scope, pair.sequence)
        for peer, pair in listening.items()
    }


def _is_rank_record(data: bytes, size: int) -> bool:
    try:
        RankRecord.decode(data, size)
    except GlooProtocolError:
        return False
    return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else bytes(value)
