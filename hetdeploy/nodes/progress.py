"""Training progress, read from what a script prints anyway.

A line counts as progress when it holds ``step N``; ``loss X`` and ``samples/s Y`` are read from the same line. A colon
or an equals sign may stand between the word and its number, so that ``step=10 loss: 2.31`` is read too.
"""

from __future__ import annotations

import re
from typing import TypedDict

_NUMBER = r"[:= ]\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(r"\bstep[:= ]\s*(\d+)")
_LOSS = re.compile(r"\bloss" + _NUMBER, re.IGNORECASE)
_RATE = re.compile(r"\bsamples/s(?:ec)?" + _NUMBER)


class Progress(TypedDict, total=False):
    """The newest figures of one rank: step (count), loss, samples_per_second."""

    step: int
    loss: float
    samples_per_second: float


def parse(line: str) -> Progress | None:
    """The progress that ``line`` reports, or None when it reports none."""
    step = _STEP.search(line)
    if step is None:
        return None
    progress = Progress(step=int(step[1]))
    if loss := _LOSS.search(line):
        progress["loss"] = float(loss[1])
    if rate := _RATE.search(line):
        progress["samples_per_second"] = float(rate[1])
    return progress


def describe(progress: Progress) -> str:
    """One short phrase: ``step 120  loss 1.8231  412.0 samples/s``."""
    parts = [f"step {progress['step']}"]
    if "loss" in progress:
        parts.append(f"loss {progress['loss']:.4f}")
    if "samples_per_second" in progress:
        parts.append(f"{progress['samples_per_second']:.1f} samples/s")
    return "  ".join(parts)
