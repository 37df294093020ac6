"""One picture of a run: the loss, who did how many samples, and where each rank's time went.

Drawn from the metrics-rank<N>.jsonl files that ``hetdeploy.train.Metrics`` writes: one JSON object a step. Times are in
seconds; computing, exchanging while the script waits, and waiting for others make up the step. Needs matplotlib, and no
torch: a head has none.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetdeploy.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 120
"""How many bars go into a panel; in a longer run, each stands for several steps."""

TALLEST = 3.0
"""What the time panels show at most, in steps of usual length: a slow start must not flatten all others."""

_FILES = "metrics-rank*.jsonl"
_BLUE = "#4878a8"
_TIMES = {
    "compute_s": ("computing", _BLUE),
    "exchange_exposed_s": ("exchanging", "#e1812c"),
    "idle_s": ("waiting for others", "#cfcfcf"),
}
_HIDDEN = "exchange_hidden_s"
_WHOLE = "step_s"
_KEYS = ("step", "samples", "global_samples", "loss", *_TIMES, _HIDDEN)
_RANK_COLOURS = (_BLUE, "#6aa56e", "#b65d60", "#8d7ab8")
_INCHES = (12.0, 3.4)
"""Of a row of panels."""


@dataclass(frozen=True)
class RankMetrics:
    """What one rank wrote, one record a step."""

    rank: int
    node: str | None
    """The machine's name, in a run with folders for each."""
    records: list[dict[str, float]]

    def column(self, key: str) -> list[float]:
        return [record[key] for record in self.records]


def draw(folder: Path, output: Path) -> None:
    """Draw all metrics below ``folder`` into the PNG ``output``.

    Raises UsageError when there are none, when one is damaged, or when the picture cannot be written, and
    PreflightError without matplotlib.
    """
    ranks = read(folder)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PreflightError("drawing needs matplotlib", "pip install 'hetdeploy[metrics]'") from None
    bars = _Bars(ranks)
    rows = 1 + (len(ranks) + 1) // 2
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * rows), layout="constrained")
    figure.suptitle(folder.resolve().name, fontweight="bold")
    grid = figure.add_gridspec(rows, 2)
    _draw_loss(figure.add_subplot(grid[0, 0]), bars, ranks[0])
    _draw_samples(figure.add_subplot(grid[0, 1]), bars, ranks)
    for index, rank in enumerate(ranks):
        column = index % 2 if len(ranks) > 1 else slice(None)
        _draw_times(figure.add_subplot(grid[1 + index // 2, column]), bars, rank, _tallest(bars, ranks))
    for axes in figure.axes:
        axes.set(xlabel="step", xlim=(bars.edges[0], bars.edges[-1]))
        axes.locator_params(axis="x", integer=True)
    _add_legend_of_times(figure)
    try:
        figure.savefig(output, dpi=110, format="png")
    except OSError as error:
        raise UsageError(f"cannot write {output} ({error.strerror})", "name another file with -o") from None


def read(folder: Path) -> list[RankMetrics]:
    """The metrics of every rank that has any below ``folder``, by rank. Raises UsageError as ``draw`` does."""
    files = sorted(folder.rglob(_FILES), key=lambda file: (_rank(file), file))
    if not files:
        raise UsageError(f"there are no {_FILES} in {folder}", "a script writes them with hetdeploy.train.Metrics")
    ranks = [RankMetrics(_rank(file), _node(file, folder), records) for file in files if (records := _read_file(file))]
    if not ranks:
        raise UsageError(f"there is no step in the metrics in {folder} yet", "call again when there is one")
    return ranks


def _read_file(file: Path) -> list[dict[str, float]]:
    """Sorted by step. Of a step that a resumed run has repeated, the last time counts."""
    by_step = {}
    place = str(file)
    try:
        # What follows the last line's end is a line that is being written, or whose rank was killed.
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        for number, line in enumerate(lines, 1):
            place = f"{file}:{number}"
            written = json.loads(line)
            record = {key: float(written[key]) for key in _KEYS}
            by_step[int(written["step"])] = {**record, _WHOLE: sum(record[key] for key in _TIMES)}
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror})", "call as the user who started the job") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{place} is damaged ({error!r})", "remove what is no record") from None
    return [by_step[step] for step in sorted(by_step)]


def _rank(file: Path) -> int:
    digits = re.search(r"rank(\d+)", file.name)
    return int(digits[1]) if digits else 0


def _node(file: Path, folder: Path) -> str | None:
    """Below a run's folder, each node has a folder of its own."""
    inner = file.relative_to(folder).parts[:-1]
    return inner[0] if inner else None


class _Bars:
    """The steps of a run, cut into at most MAX_BARS pieces of equal width."""

    def __init__(self, ranks: list[RankMetrics]) -> None:
        first = min(int(rank.records[0]["step"]) for rank in ranks)
        last = max(int(rank.records[-1]["step"]) for rank in ranks)
        self.width = -(-(last + 1 - first) // MAX_BARS)
        count = -(-(last + 1 - first) // self.width)
        self._first = first
        self.edges = [first - 0.5 + self.width * i for i in range(count + 1)]
        self.middles = [edge + self.width / 2 for edge in self.edges[:-1]]

    def sums(self, rank: RankMetrics, key: str | None = None) -> list[float]:
        """Of each bar, the sum of ``key``, or how many records there are."""
        sums = [0.0] * len(self.middles)
        for record in rank.records:
            sums[(int(record["step"]) - self._first) // self.width] += 1.0 if key is None else record[key]
        return sums

    def means(self, rank: RankMetrics, key: str, steps_of: RankMetrics | None = None) -> list[float]:
        """Of each bar, the mean of ``key`` over the steps of ``rank``, or those of another one."""
        steps = self.sums(steps_of or rank)
        return [total / max(1.0, count) for total, count in zip(self.sums(rank, key), steps, strict=True)]


def _draw_loss(axes: Axes, bars: _Bars, rank: RankMetrics) -> None:
    steps, losses = rank.column("step"), rank.column("loss")
    if bars.width == 1:
        axes.plot(steps, losses, color=_BLUE, marker="." if len(steps) < 50 else "")
    else:
        axes.plot(steps, losses, color=_BLUE, alpha=0.4, linewidth=0.6, label="each step")
        axes.plot(bars.middles, bars.means(rank, "loss"), color=_BLUE, label=f"mean of {bars.width} steps")
        axes.legend(loc="upper right")
    axes.set_title(f"loss: from {losses[0]:.4g} to {losses[-1]:.4g}")
    axes.grid(alpha=0.3)


def _draw_samples(axes: Axes, bars: _Bars, ranks: list[RankMetrics]) -> None:
    """Stacked by rank. What ranks did whose metrics are not here, on other machines, makes up the rest."""
    first = ranks[0]
    everything = bars.means(first, "global_samples")
    floor = [0.0] * len(everything)
    for index, rank in enumerate(ranks):
        colour = _RANK_COLOURS[index % len(_RANK_COLOURS)]
        floor = _stack(axes, bars, floor, bars.means(rank, "samples", steps_of=first), f"rank {rank.rank}", colour)
    rest = [max(0.0, whole - shown) for whole, shown in zip(everything, floor, strict=True)]
    if sum(rest) > 0.001 * sum(everything):
        floor = _stack(axes, bars, floor, rest, "ranks elsewhere", "#e4e4e4")
    if sum(floor) > 1.001 * sum(everything):
        # What a helper computed and the leader could not wait for has been computed twice.
        axes.stairs(everything, bars.edges, baseline=None, color="black", linewidth=0.9, label="used for the step")
    speed = sum(first.column("global_samples")) / max(sum(first.column(_WHOLE)), 1e-9)
    axes.set_title(f"samples a step; {speed:,.0f} a second")
    axes.set_ylim(0, 1.4 * max(*floor, 1.0))  # room for the legend
    axes.legend(loc="upper right", ncols=2)


def _draw_times(axes: Axes, bars: _Bars, rank: RankMetrics, tallest: float) -> None:
    floor = [0.0] * len(bars.middles)
    for key, (label, colour) in _TIMES.items():
        floor = _stack(axes, bars, floor, bars.means(rank, key), label, colour)
    axes.stairs(bars.means(rank, _HIDDEN), bars.edges, baseline=None, color="black", linewidth=0.9, label="hidden")
    steps = rank.column(_WHOLE)
    name = f"rank {rank.rank}" + (f" on {rank.node}" if rank.node else "")
    usually = f"usually {statistics.median(steps):.3g} s a step, at most {max(steps):.3g} s"
    shares = [f"{label} {sum(rank.column(key)) / max(sum(steps), 1e-9):.0%}" for key, (label, _) in _TIMES.items()]
    axes.set_title(f"{name}: {usually}\n{', '.join(shares)}", fontsize="medium")
    axes.set(ylabel="seconds a step", ylim=(0, tallest))


def _stack(axes: Axes, bars: _Bars, floor: list[float], heights: list[float], label: str, colour: str) -> list[float]:
    """Add a layer; returns its upper side."""
    top = [below + height for below, height in zip(floor, heights, strict=True)]
    axes.stairs(top, bars.edges, baseline=floor, fill=True, color=colour, label=label)
    return top


def _tallest(bars: _Bars, ranks: list[RankMetrics]) -> float:
    """The same upper end for the time panels of all ranks, so that they can be compared."""
    usual = max(statistics.median(rank.column(_WHOLE)) for rank in ranks)
    longest = max(max(bars.means(rank, _WHOLE)) for rank in ranks)
    return max(1.05 * min(longest, TALLEST * usual), 1e-9)


def _add_legend_of_times(figure: Figure) -> None:
    """One for all time panels, below them."""
    handles, _ = figure.axes[-1].get_legend_handles_labels()
    names = [*(label for label, _ in _TIMES.values()), "exchanging while computing"]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
