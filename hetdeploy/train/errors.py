"""Everything that can go wrong in training, in one tree.

    TrainError
    ├── MisuseError          the script calls a part in a way that cannot work
    ├── DeviceError          the accelerator asked for is not there
    ├── LayoutMismatch       the ranks do not train the same model in the same way
    ├── NonFiniteGradient    NaN or Inf on one rank: that step is refused on every rank, nobody's weights have changed
    └── PeerLost             another rank is gone, or silent for longer than its deadline

One line each: what is wrong and where (``problem``), then how to mend it (``fix``).
"""

from __future__ import annotations


class TrainError(Exception):
    """Training cannot go on like this. ``problem`` names the cause; ``fix`` the change that mends it."""

    def __init__(self, problem: str, fix: str | None = None) -> None:
        super().__init__(problem if fix is None else f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


class MisuseError(TrainError):
    """The script calls a part in a way that cannot work."""


class DeviceError(TrainError):
    """The accelerator asked for is not there."""


class LayoutMismatch(TrainError):
    """The ranks do not train the same model in the same way."""


class NonFiniteGradient(TrainError):
    """NaN or Inf in a gradient, raised on every rank at the same step. Gradients are dropped. Weights are those before
    the step (for a pseudo-gradient: the master weights), so the script may catch this and go on with the next step.
    """

    def __init__(self, rank: int, parameter: str, step: int, what: str = "gradient") -> None:
        super().__init__(
            f"{what} of {parameter} is NaN or Inf on rank {rank} at step {step}, which was not applied on any rank",
            "lower the learning rate, clip, or look at that rank's batch",
        )
        self.rank = rank
        self.parameter = parameter
        self.step = step


class PeerLost(TrainError):
    """Another rank is gone, or silent for longer than its deadline."""
