"""A leader and its helpers: how they find each other, again and again.

The leader is the only source of truth and never waits for anyone; helpers come and go. Each helper shares a gloo group
of two ranks with the leader and nothing with other helpers, so that a failure stays between two. All that outlives a
meeting is a store (the job's TCPStore), and every meeting has fresh keys in it, so nobody restarts when somebody
leaves.

A meeting, under the prefix ``hetdeploy/crew/<reign>/`` (a reign is one start of the leader):

1. helper: adds 1 to ``tickets`` and gets number n, then writes ``ticket/<n>``: its name and its layout, one line each;
2. leader: polls ``tickets``, compares the layout with its own, answers in ``answer/<n>``: empty, or why not;
3. helper: writes ``here/<n>``, so that the leader does not open a group with someone who has left meanwhile;
4. both: open the group of two under ``meeting/<n>``; then frozen parameters and all buffers go down once.

A leader that has finished writes ``closed``: a helper without an answer then waits for the next reign, but not long.

Environment: ``HETDEPLOY_CREW_ROLE`` is leader or helper, ``HETDEPLOY_CREW_STORE`` is host:port of the store. Without
them the ranks of the default process group are the crew and rank 0 leads; without that too, the leader is alone.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from hetdeploy.train import layout
from hetdeploy.train.errors import LayoutMismatch, MisuseError, PeerLost, TrainError
from hetdeploy.train.world import Group, Store, World, prefixed

ROLE_VARIABLE = "HETDEPLOY_CREW_ROLE"
STORE_VARIABLE = "HETDEPLOY_CREW_STORE"
LEADER, HELPER = 0, 1
"""Ranks in a meeting's group."""

POLL_SECONDS = 0.1
ANSWER_SECONDS = 10.0
"""How long the leader waits for a helper that it has accepted to say that it is still there."""
NEXT_REIGN_SECONDS = 5.0
"""How long a helper that finds the leader through waits for it to begin anew (a second ``Assist`` in one script)."""
LEADER_WAIT = datetime.timedelta(minutes=30)
"""How long a helper waits for a leader to start, and later for its next share (the leader may be evaluating)."""
HELPER_SILENCE = datetime.timedelta(minutes=10)
"""How long a helper may be silent (asleep, its cable pulled) before the leader forgets it. The leader works on
meanwhile.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Crew:
    """This process's place in a crew. ``store`` is None for a leader that nobody can join."""

    leads: bool
    store: Store | None

    @classmethod
    def current(cls, role: str | None = None) -> Crew:
        """From ``role``, the environment, or the default process group, in this order.

        Raises MisuseError for a helper without a store, PeerLost if the store cannot be reached.
        """
        role = role or os.environ.get(ROLE_VARIABLE)
        if role not in (None, "leader", "helper"):
            raise MisuseError(f"role {role!r} is not known", "use leader or helper")
        address = os.environ.get(STORE_VARIABLE)
        if address:
            return cls(role != "helper", _connect(address))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return cls(dist.get_rank() == 0 if role is None else role == "leader", _default_store())
        if role == "helper":
            raise MisuseError("a helper needs a leader to join", f"set {STORE_VARIABLE}=host:port, or use torchrun")
        return cls(True, None)

    @classmethod
    def alone(cls) -> Crew:
        """A leader that nobody can join."""
        return cls(True, None)


@dataclass(frozen=True)
class Meeting:
    """A leader and a helper, connected."""

    number: int
    """The helper's ticket, from 1: its rank in records and errors (the leader is 0)."""
    name: str
    group: Group


class Reception:
    """The leader's door: meets helpers in the background, each in a thread of its own."""

    def __init__(self, store: Store, model: nn.Module, lines: list[str]) -> None:
        self._model = model
        self._lines = lines
        self._arrived: list[Meeting] = []
        self._meetings: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        root = prefixed("hetdeploy/crew", store.clone())
        self._reign = prefixed(str(root.add("reign", 1)), root)
        self._thread = threading.Thread(target=self._watch, name="hetdeploy-reception", daemon=True)
        self._thread.start()

    def arrivals(self) -> list[Meeting]:
        """Who has come since the last call. Never waits."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self, helpers: int, timeout: float) -> None:
        """Block until so many helpers have arrived and were not yet handed out. Raises PeerLost after ``timeout``
        seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._arrived) >= helpers, timeout):
                raise PeerLost(
                    f"{len(self._arrived)} of {helpers} helpers came within {timeout:.0f} s",
                    "start them, or start without waiting for them",
                )

    def close(self) -> None:
        """Meet nobody any more: who has an answer comes through, whoever is later learns that it is over."""
        self._closing.set()
        deadline = time.monotonic() + ANSWER_SECONDS
        for thread in [self._thread, *self._meetings]:
            thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(RuntimeError):  # the store has ended, and with it everybody's wait
            self._reign.set("closed", "")

    def _watch(self) -> None:
        met = 0
        while not self._closing.wait(POLL_SECONDS):
            try:
                tickets = self._reign.add("tickets", 0)
            except RuntimeError as error:  # the store has ended; whoever is already here stays
                log.warning("nobody can join any more, the store is gone: %s", error)
                return
            for number in range(met + 1, tickets + 1):
                name = f"hetdeploy-meeting-{number}"
                meeting = threading.Thread(target=self._meet, args=(number,), name=name, daemon=True)
                meeting.start()
                self._meetings = [*(each for each in self._meetings if each.is_alive()), meeting]
            met = tickets

    def _meet(self, number: int) -> None:
        try:
            # A connection of its own: waiting on a TCPStore keeps everybody else on that connection waiting.
            store = self._reign.clone()
            name, *theirs = _awaited(store, f"ticket/{number}", ANSWER_SECONDS).split("\n")
            if theirs != self._lines:
                refusal = f"the leader and helper {name} differ: {layout.first_difference(self._lines, theirs)}"
                log.warning("helper %d (%s) was refused: %s", number, name, refusal)
                store.set(f"answer/{number}", refusal)
                return
            store.set(f"answer/{number}", "")
            _awaited(store, f"here/{number}", ANSWER_SECONDS)
            group = World.over(prefixed(f"meeting/{number}", store), LEADER, 2).open("crew", HELPER_SILENCE)
            layout.broadcast(group, sent_once(self._model))
        except (PeerLost, RuntimeError) as error:
            log.warning("helper %d did not come through: %s", number, error)
            return
        with self._changed:
            self._arrived.append(Meeting(number, name, group))
            self._changed.notify_all()


def join(store: Store, model: nn.Module, lines: list[str], timeout: datetime.timedelta = LEADER_WAIT) -> Meeting | None:
    """The helper's way in; None if the leader has finished already. Raises LayoutMismatch when the leader refuses,
    PeerLost when there is none within ``timeout``.
    """
    root = prefixed("hetdeploy/crew", store.clone())
    deadline = time.monotonic() + timeout.total_seconds()
    name = f"{socket.gethostname()}:{os.getpid()}"
    ticket: tuple[int, int, Any] | None = None
    open_at = time.monotonic()
    while time.monotonic() < deadline:
        reign = root.add("reign", 0)
        if reign and (ticket is None or ticket[0] != reign):  # a leader that restarted does not know earlier tickets
            keys = prefixed(str(reign), root)
            number = keys.add("tickets", 1)
            keys.set(f"ticket/{number}", "\n".join([name, *lines]))
            ticket = (reign, number, keys)
        if ticket is not None and ticket[2].check([f"answer/{ticket[1]}"]):
            return _enter(ticket[1], name, ticket[2], model)
        if ticket is None or not ticket[2].check(["closed"]):
            open_at = time.monotonic()
        elif time.monotonic() - open_at > NEXT_REIGN_SECONDS:
            return None
        time.sleep(POLL_SECONDS)
    raise PeerLost(
        f"no leader answered within {timeout.total_seconds():.0f} s",
        "start the leader, and look whether it uses the same store",
    )


def sent_once(model: nn.Module) -> list[torch.Tensor]:
    """What does not change during training, or not in a way that helpers need to follow: frozen parameters, all
    buffers.
    """
    return [*(each for each in model.parameters() if not each.requires_grad), *model.buffers()]


def _enter(number: int, name: str, keys: Any, model: nn.Module) -> Meeting:
    refusal = keys.get(f"answer/{number}").decode()
    if refusal:
        raise LayoutMismatch(refusal, "run the same script with the same arguments on every machine")
    keys.set(f"here/{number}", "")
    group = World.over(prefixed(f"meeting/{number}", keys), HELPER, 2).open("crew", LEADER_WAIT)
    layout.broadcast(group, sent_once(model))
    return Meeting(number, name, group)


def _awaited(store: Any, key: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerLost(f"nothing came under {key} within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    value: bytes = store.get(key)
    return value.decode()


def _connect(address: str) -> Store:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise MisuseError(f"{STORE_VARIABLE}={address!r} is not host:port")
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    try:
        return tcp_store(host, int(port), is_master=False, wait_for_workers=False, timeout=HELPER_SILENCE)
    except RuntimeError as error:
        raise PeerLost(f"the store at {address} cannot be reached: {error}") from error


def _default_store() -> Store:
    store = distributed_c10d._get_default_store()
    if store is None:
        raise TrainError("the default process group has no store")
    return store
