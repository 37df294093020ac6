"""How many micro-batches of a step each rank gets, so that all ranks are through at the same time.

For symmetric training: the step takes as long as its slowest rank, max_i n_i t_i, with n_i whole micro-batches that sum
to n and t_i the measured seconds for one. Giving each micro-batch in turn to the rank that would be through with it
first makes that maximum as small as it can be, and leaves out a rank that is too slow for even one. (The crew's leader
uses another rule, shares.py: its helpers have to be early.)

    balancer = Balancer(world.size, micro_batches=16)
    group = world.open("balance")
    for step in ...:
        mine = balancer.shares[rank]
        ...                                            # compute ``mine`` micro-batches in ``seconds``
        balancer.update(gather_seconds(group, seconds))

Every rank runs a balancer of its own on the same numbers and so comes to the same shares without being told.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import torch

from hetdeploy.train.errors import MisuseError
from hetdeploy.train.world import Group

SMOOTHING = 0.5
"""Weight of the newest measurement: four steps after a machine has changed its speed, 94 % of it is followed."""
HYSTERESIS = 0.05
"""Shares change only if that makes the predicted step shorter by this part of it. Micro-batches that wander to and fro
help nobody, and MPS compiles every shape that it has not seen.
"""
PROBE_EVERY = 50
"""Updates after which a rank that is too slow for a share gets one micro-batch, to see whether it still is."""


class Balancer:
    """Shares that follow measured speed.

    ranks: how many. micro_batches: in a global batch, n above. least: what every rank gets at least; with 0 a rank that
    would keep the others waiting gets nothing, apart from a probe now and then.

    Raises MisuseError if there are not enough micro-batches for ``least``.
    """

    def __init__(
        self,
        ranks: int,
        micro_batches: int,
        *,
        least: int = 0,
        smoothing: float = SMOOTHING,
        hysteresis: float = HYSTERESIS,
    ) -> None:
        if ranks < 1 or micro_batches < max(1, least * ranks) or least < 0:
            raise MisuseError(
                f"{micro_batches} micro-batches for {ranks} ranks, at least {least} each, cannot be",
                "use more micro-batches",
            )
        if not 0 < smoothing <= 1 or not 0 <= hysteresis < 1:
            raise MisuseError(f"smoothing={smoothing} with hysteresis={hysteresis} cannot be", "use parts of 1")
        self.micro_batches = micro_batches
        self._least = least
        self._smoothing = smoothing
        self._hysteresis = hysteresis
        self._pace: list[float | None] = [None] * ranks
        self._unmeasured_for = [0] * ranks  # updates since a rank was last measured
        self._settled = fastest(micro_batches, [1.0] * ranks, least)
        self.shares = list(self._settled)
        """Micro-batches of each rank in the next step. They sum to ``micro_batches``."""

    @property
    def pace(self) -> list[float | None]:
        """Seconds for one micro-batch by rank, smoothed; None until measured."""
        return list(self._pace)

    def update(self, seconds: Sequence[float]) -> list[int]:
        """What each rank took for its share of the last step; the shares of the next one.

        A rank without a share measured nothing: its number is ignored. So is one that is not finite or not above 0,
        which no computation takes.
        """
        if len(seconds) != len(self._pace):
            raise MisuseError(f"{len(seconds)} times for {len(self._pace)} ranks", "give one for every rank")
        for rank, (share, took) in enumerate(zip(self.shares, seconds, strict=True)):
            if share == 0 or not math.isfinite(took) or took <= 0:
                self._unmeasured_for[rank] += 1
                continue
            self._unmeasured_for[rank] = 0
            now, before = took / share, self._pace[rank]
            self._pace[rank] = now if before is None else before + self._smoothing * (now - before)
        self._settle()
        self.shares = self._with_probes()
        return list(self.shares)

    def state_dict(self) -> dict[str, Any]:
        """Paces and shares, for a checkpoint."""
        return {
            "pace": list(self._pace),
            "unmeasured_for": list(self._unmeasured_for),
            "settled": list(self._settled),
            "shares": list(self.shares),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved paces. On all ranks, or on none. Raises MisuseError for another world or batch."""
        if len(state["pace"]) != len(self._pace) or sum(state["shares"]) != self.micro_batches:
            raise MisuseError(
                f"the saved shares are {state['shares']}, this run has {len(self._pace)} ranks and"
                f" {self.micro_batches} micro-batches",
                "start with a fresh balancer, it takes a few steps",
            )
        self._pace = list(state["pace"])
        self._unmeasured_for = list(state["unmeasured_for"])
        self._settled = list(state["settled"])
        self.shares = list(state["shares"])

    def _settle(self) -> None:
        known = [pace for pace in self._pace if pace is not None]
        if not known:
            return
        # Who has not been measured is taken for the slowest until it is: probes below find out.
        pace = [max(known) if pace is None else pace for pace in self._pace]
        best = fastest(self.micro_batches, pace, self._least)
        if step_seconds(best, pace) < (1 - self._hysteresis) * step_seconds(self._settled, pace):
            self._settled = best

    def _with_probes(self) -> list[int]:
        shares = list(self._settled)
        givers = [rank for rank, share in enumerate(shares) if share and self._pace[rank] is not None]
        for rank, (share, updates) in enumerate(zip(self._settled, self._unmeasured_for, strict=True)):
            giver = max(givers, key=lambda other: shares[other], default=rank)
            due = self._pace[rank] is None or updates >= PROBE_EVERY
            if share == 0 and due and shares[giver] > self._least:
                shares[giver] -= 1
                shares[rank] = 1
        return shares


def fastest(micro_batches: int, pace: Sequence[float], least: int = 0) -> list[int]:
    """Shares, each at least ``least``, that sum to ``micro_batches`` and for which the slowest rank is through soonest.

    pace: seconds for one micro-batch, by rank. Ties go to the lower rank. O(n log ranks).
    """
    shares = [least] * len(pace)
    queue = [((share + 1) * seconds, rank) for rank, (share, seconds) in enumerate(zip(shares, pace, strict=True))]
    heapq.heapify(queue)
    for _ in range(micro_batches - least * len(pace)):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) * pace[rank], rank))
    return shares


def step_seconds(shares: Sequence[int], pace: Sequence[float]) -> float:
    """How long the slowest rank takes."""
    return max(share * seconds for share, seconds in zip(shares, pace, strict=True))


def gather_seconds(group: Group, seconds: float) -> list[float]:
    """Collective: every rank's number, in rank order, the same bits everywhere. Raises PeerLost."""
    everyone = torch.zeros(group.size, dtype=torch.float64)
    group.all_gather(everyone, torch.tensor([seconds], dtype=torch.float64)).wait("comparing speeds")
    return [float(each) for each in everyone]
