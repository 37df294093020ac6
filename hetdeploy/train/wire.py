"""How numbers travel: fp32, bf16, or int8 with one scale for each block of 256.

Compressed for the wire only. Whatever arrives is decoded to fp32 and summed in fp32, in rank order, by every rank from
the same bytes, so that all ranks get the same bits (gloo's own bf16 sum does not keep them: 256 + 1 = 256). A rank
counts its own contribution as decoded from its own payload, never as it was before.

========  =====================  ==========================================================================
format    bytes per value        error of one decoded value x in a block with largest magnitude m
========  =====================  ==========================================================================
fp32      4                      none
bf16      2                      at most 2**-8 |x| (8 significant bits, round to nearest even)
int8      1 + 4/256              at most m/254 (half a step of m/127), before error feedback
========  =====================  ==========================================================================

Error feedback (Seide et al. 2014, 1-bit SGD; Karimireddy et al. 2019): what rounding took from a value is added to the
next one sent in its place. Over any number of sends, the decoded sum differs from the true sum by the last rounding
error alone.

Encoding divides, multiplies and adds in separate fp32 operations, so x86 and Arm agree in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from hetdeploy.train.errors import MisuseError

BLOCK = 256
SCALE_BYTES = 4
PIECE_BLOCKS = 2048
"""Coded at a time: what is needed meanwhile is 4 MB, however much there is to code, and stays in the processor's cache.
"""
INT8_STEPS = 127
"""int8 codes run from -127 to 127, so that a value and its negative are coded alike."""


class Wire(Protocol):
    """A format. Payloads are uint8 tensors whose length depends on ``numel`` alone. Values must be finite."""

    name: str
    feedback: bool
    """Whether the sender should carry what rounding took over to its next send."""

    def payload_bytes(self, numel: int) -> int:
        """Length of the payload of ``numel`` values."""
        ...

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Write fp32 ``values`` (flat) into ``payload``."""
        ...

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Overwrite fp32 ``values`` with what ``payload`` says."""
        ...

    def accumulate(self, payload: Tensor, values: Tensor) -> None:
        """Add what ``payload`` says to fp32 ``values``."""
        ...


def wire_format(name: str) -> Wire:
    """The format of that name."""
    for known in (Fp32(), Bf16(), Int8()):
        if known.name == name:
            return known
    raise MisuseError(f"wire format {name!r} is not known", "use fp32, bf16 or int8")


def encode_with_feedback(wire: Wire, values: Tensor, payload: Tensor, residual: Tensor | None) -> None:
    """``values`` into ``payload``, with ``residual`` added before and replaced by what rounding took. Changes
    ``values``.
    """
    if residual is None:
        wire.encode(values, payload)
        return
    values.add_(residual)
    wire.encode(values, payload)
    wire.decode(payload, residual)
    torch.sub(values, residual, out=residual)


def first_non_finite(values: Tensor) -> int | None:
    """Position of the first NaN or Inf in flat ``values``, which no format can carry."""
    # The maximum norm is one pass without a temporary, and NaN and Inf show in it.
    if values.numel() == 0 or bool(torch.linalg.vector_norm(values, ord=float("inf")).isfinite()):
        return None
    return int(values.isfinite().logical_not_().nonzero()[0])


class Fp32:
    """Bits as they are."""

    name = "fp32"
    feedback = False

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.float32).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.float32))

    def accumulate(self, payload: Tensor, values: Tensor) -> None:
        values.add_(payload.view(torch.float32))


class Bf16:
    """The upper half of each fp32, rounded."""

    name = "bf16"
    feedback = False

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))

    def accumulate(self, payload: Tensor, values: Tensor) -> None:
        values.add_(payload.view(torch.bfloat16))  # promoted: the addition itself is fp32


class Int8:
    """For each block of 256 values a fp32 scale (largest magnitude / 127); then the codes. Scales first, then codes."""

    name = "int8"
    feedback = True

    def payload_bytes(self, numel: int) -> int:
        # A multiple of four, so that the scales of the payload behind this one are aligned.
        return SCALE_BYTES * (_blocks(numel) + -(-numel // SCALE_BYTES))

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scales, codes = _split(payload, values.numel())
        for part, scale, code in _by_block(values, scales, codes):
            scale.copy_(torch.linalg.vector_norm(part, ord=float("inf"), dim=1))
            scale.div_(INT8_STEPS)
            # A block of zeros, or one whose step is below the smallest fp32: its codes are zero whatever the divisor.
            divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
            code.copy_((part / divisor).round_().clamp_(-INT8_STEPS, INT8_STEPS))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        scales, codes = _split(payload, values.numel())
        for part, scale, code in _by_block(values, scales, codes):
            part.copy_(code)
            part.mul_(scale.unsqueeze(1))

    def accumulate(self, payload: Tensor, values: Tensor) -> None:
        scales, codes = _split(payload, values.numel())
        for part, scale, code in _by_block(values, scales, codes):
            part.add_(code.to(part.dtype).mul_(scale.unsqueeze(1)))


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _split(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    boundary = SCALE_BYTES * _blocks(numel)
    return payload[:boundary].view(torch.float32), payload[boundary : boundary + numel].view(torch.int8)


def _by_block(values: Tensor, scales: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Matrices of at most PIECE_BLOCKS whole blocks, and the shorter last block by itself."""
    whole = values.numel() // BLOCK
    for first in range(0, whole, PIECE_BLOCKS):
        blocks = slice(first, min(whole, first + PIECE_BLOCKS))
        piece = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        yield values[piece].view(-1, BLOCK), scales[blocks], codes[piece].view(-1, BLOCK)
    if values.numel() % BLOCK:
        yield values[whole * BLOCK :].unsqueeze(0), scales[whole:], codes[whole * BLOCK :].unsqueeze(0)
