"""What a step cost, per rank: JSON lines always, TensorBoard events and a PNG where their packages are importable."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """One rank's step. Times in seconds; they cover the step: compute + exposed + idle is its wall-clock time."""

    rank: int
    step: int
    samples: float
    """This rank's samples (or tokens)."""
    global_samples: float
    """All ranks'."""
    loss: float
    """Mean over all ranks' samples."""
    compute_s: float
    """From the end of the last exchange to the beginning of this one: data, forward, backward, optimizer."""
    copy_s: float
    """Waiting for copies between device and CPU, in the background."""
    exchange_exposed_s: float
    """Exchanging while the script waits."""
    exchange_hidden_s: float
    """Exchanging while the script computes."""
    idle_s: float
    """Waiting for a slower rank."""
    bytes_sent: int
    algorithm: str


class Metrics:
    """Writes records of one rank to ``folder``/metrics-rank<rank>.jsonl, one line a step, at once.

    Also TensorBoard events into the same folder if ``tensorboard`` is importable, where it is asked for.
    """

    def __init__(self, folder: Path | str, rank: int = 0, tensorboard: bool = True) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path = self._folder / f"metrics-rank{rank}.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._events = _event_writer(self._folder / f"rank{rank}") if tensorboard else None

    def write(self, record: StepRecord, **more: float) -> None:
        """Append one record; ``more`` are the script's own numbers (a validation loss)."""
        fields = {"time": time.time(), **asdict(record), **more}
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in fields.items():
                if name not in ("time", "rank", "step", "algorithm"):
                    self._events.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of one file, in order. A last line that a killed rank left unfinished is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def as_number(loss: Tensor | float) -> float:
    """A loss as a number, also while it still has its graph."""
    return float(loss.item()) if isinstance(loss, Tensor) else float(loss)


def covered(spans: list[tuple[float, float]]) -> float:
    """Total length of the union of (start, end) intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
