"""How many micro-batches of a step each helper gets, so that the leader never waits.

With n micro-batches in a step, leader time t0 for each, helper i's time t_i for each and link time L_i (weights down,
gradient up, with their coding and copying), helper i's gradient is there when the leader has done its own share if

    n_i t_i + L_i <= (1 - m) n_0 t0,    n_0 = n - sum n_i

with m a margin for jitter. Taking equality and solving for the leader's time W = n_0 t0 gives

    W = (n + sum L_i / t_i) / (1 / t0 + (1 - m) sum 1 / t_i)

over those helpers for which n_i = ((1 - m) W - L_i) / t_i is at least one micro-batch; each n_i is rounded down, which
only ever makes helpers earlier. For one helper k times slower this is the gain 1 + (1/k)(1 - L/W) over the leader
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

MARGIN = 0.03
SMOOTHING = 0.3
"""Weight of the newest measurement. Three to four steps after a machine changes its speed, most of the change is
followed.
"""


@dataclass
class Pace:
    """A helper's measured times in seconds, smoothed. None until first measured."""

    per_micro: float | None = None
    link: float = 0.0
    outdated: bool = True
    """The next measurement replaces what was measured so far."""

    def measured(self, micros: int, compute: float, round_trip: float) -> None:
        """One share: so many micro-batches, computing time as the helper reports it, and from assignment to arrival."""
        link = max(0.0, round_trip - compute)
        self.per_micro = smoothed(None if self.outdated else self.per_micro, compute / micros)
        self.link = smoothed(None if self.outdated else self.link, link)
        self.outdated = False


Split: TypeAlias = Callable[[int, "float | None", "list[Pace]"], "list[int]"]
"""From the number of micro-batches, the leader's seconds for one, and each helper's pace to each helper's share."""


def smoothed(before: float | None, now: float) -> float:
    """Exponential moving average that starts at the first value."""
    return now if before is None else before + SMOOTHING * (now - before)


def split(micros: int, leader: float | None, paces: list[Pace], margin: float = MARGIN) -> list[int]:
    """Shares of the helpers, in order, of ``micros`` micro-batches; the leader has the rest, at least one.

    leader: its measured seconds for one micro-batch. Whoever has not been measured yet gets one micro-batch to be
    measured by.
    """
    unmeasured = [i for i, pace in enumerate(paces) if pace.per_micro is None or leader is None]
    probes = unmeasured[: micros - 1]
    shares = [1 if i in probes else 0 for i in range(len(paces))]
    if leader is None:
        return shares
    known = {i: (pace.per_micro, pace.link) for i, pace in enumerate(paces) if pace.per_micro is not None}
    left = micros - len(probes)
    while known:
        ready = (left + sum(link / time for time, link in known.values())) / (
            1 / leader + (1 - margin) * sum(1 / time for time, _ in known.values())
        )
        wanted = {i: int(((1 - margin) * ready - link) / time + 1e-9) for i, (time, link) in known.items()}
        useless = min(wanted, key=lambda i: wanted[i])
        if wanted[useless] >= 1:
            for i, share in wanted.items():
                shares[i] = share
            break
        # Counting on one that cannot do even one in time would make the others late: solve again without it.
        del known[useless]
    return shares
