"""Which gradients travel together, and in which order.

Invariants: every trainable parameter is in exactly one bucket, shared parameters once (``named_parameters`` names them
once), frozen ones in none; the order is the reverse of registration, which is about the order in which backward
finishes them; the plan is a function of names, shapes and ``bucket_bytes`` alone, so all ranks that passed the layout
check have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

FP32_BYTES = 4


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are exchanged as one flat fp32 buffer, in this order."""

    index: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    @property
    def numel(self) -> int:
        """Number of values in the flat buffer."""
        return sum(self.sizes)

    def name_at(self, position: int) -> str:
        """The parameter that the value at ``position`` of the flat buffer belongs to."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if position < size:
                return name
            position -= size
        raise IndexError(f"bucket {self.index} is shorter than that")


def plan_buckets(model: nn.Module, bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most ``bucket_bytes`` of fp32 gradients; a larger parameter has one to itself."""
    buckets: list[Bucket] = []
    names: list[str] = []
    parameters: list[nn.Parameter] = []
    filled = 0

    def close() -> None:
        if parameters:
            buckets.append(Bucket(len(buckets), tuple(names), tuple(parameters)))

    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad:
            continue
        size = FP32_BYTES * parameter.numel()
        if filled + size > bucket_bytes:
            close()
            names, parameters, filled = [], [], 0
        names.append(name)
        parameters.append(parameter)
        filled += size
    close()
    return buckets


def bucket_layout(buckets: list[Bucket]) -> str:
    """The plan in one line, for the layout digest."""
    return " ".join(f"{len(bucket.names)}:{bucket.numel}" for bucket in buckets)
