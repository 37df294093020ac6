"""What a leader and a helper tell each other, over their group of two. Little-endian, sizes known to both beforehand.

==========  =========  ===========================================================================================
message     direction  content
==========  =========  ===========================================================================================
command     down       eight int64: kind, step, first micro-batch, number of them, was the last gradient used, and
                       for PROBLEM the rank and the index of the parameter
weights     down       after WORK: trainable parameters, then floating-point buffers, flat, fp32 or bf16
gradient    up         eight float64 (step, samples, sum of losses, seconds of computing, index of the first parameter
                       with NaN or Inf or -1); one byte for each parameter (was it used); padding to eight bytes;
                       the payload of the wire format
==========  =========  ===========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORK, STOP, PROBLEM = 1, 2, 3
COMMAND_TAG, WEIGHTS_TAG, GRADIENT_TAG = 1, 2, 3
COMMAND_WORDS = 8
HEADER_WORDS = 8
WORD = 8
FINE = -1


@dataclass(frozen=True)
class Command:
    """The leader's word to a helper."""

    kind: int
    step: int
    first: int = 0
    count: int = 0
    used: bool = True
    """Whether the helper's last gradient went into a step; if not, its error feedback goes back to before it."""
    rank: int = 0
    parameter: int = 0

    def pack(self) -> Tensor:
        """As int64 words."""
        words = (self.kind, self.step, self.first, self.count, int(self.used), self.rank, self.parameter, 0)
        return torch.tensor(words, dtype=torch.int64)

    @classmethod
    def unpack(cls, words: Tensor) -> Command:
        """From int64 words."""
        kind, step, first, count, used, rank, parameter, _ = words.tolist()
        return cls(kind, step, first, count, bool(used), rank, parameter)


@dataclass(frozen=True)
class Report:
    """What comes with a helper's gradient."""

    step: int
    samples: float
    loss: float
    compute_s: float
    refused: int
    used: Tensor
    """One bool for each trainable parameter."""


def gradient_bytes(parameters: int, payload_bytes: int) -> int:
    """Length of the gradient message."""
    return _payload_start(parameters) + payload_bytes


def pack_report(message: Tensor, report: Report) -> Tensor:
    """Write all but the payload into ``message``; returns the part of it where the payload belongs."""
    fields = (report.step, report.samples, report.loss, report.compute_s, report.refused)
    header = torch.zeros(HEADER_WORDS, dtype=torch.float64)
    header[: len(fields)] = torch.tensor(fields, dtype=torch.float64)
    message[: HEADER_WORDS * WORD].copy_(header.view(torch.uint8))
    message[HEADER_WORDS * WORD :][: report.used.numel()].copy_(report.used.view(torch.uint8))
    return message[_payload_start(report.used.numel()) :]


def unpack_report(message: Tensor, parameters: int) -> tuple[Report, Tensor]:
    """The report and the payload (not copied)."""
    step, samples, loss, compute_s, refused, *_ = message[: HEADER_WORDS * WORD].view(torch.float64).tolist()
    used = message[HEADER_WORDS * WORD :][:parameters].bool()
    return Report(int(step), samples, loss, compute_s, int(refused), used), message[_payload_start(parameters) :]


def _payload_start(parameters: int) -> int:
    return HEADER_WORDS * WORD + -(-parameters // WORD) * WORD
