"""One picture of a run: the loss, and where each rank's time went.

    python -m hetdeploy.train.plot RUN_FOLDER [-o run.png]

Reads the metrics-rank*.jsonl files that ``Metrics`` wrote. Needs matplotlib, which hetdeploy itself does not install.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from hetdeploy.train.errors import MisuseError, TrainError
from hetdeploy.train.metrics import read_metrics

WHERE = {
    "compute_s": "computing",
    "exchange_exposed_s": "exchanging (exposed)",
    "idle_s": "waiting for slower ranks",
}
INCHES = (9.0, 3.0)


def plot_run(folder: Path | str, output: Path | str) -> Path:
    """Draw the run in ``folder`` into the PNG ``output``. Raises MisuseError without metrics or matplotlib."""
    files = sorted(Path(folder).glob("metrics-rank*.jsonl"))
    if not files:
        raise MisuseError(
            f"there are no metrics-rank*.jsonl in {folder}", "name the folder that the script gave to Metrics"
        )
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1 + len(files), 1, figsize=(INCHES[0], INCHES[1] * (1 + len(files))), squeeze=False)
    for file, axis in zip(files, axes[1:, 0], strict=True):
        records = read_metrics(file)
        steps = [record["step"] for record in records]
        axes[0, 0].plot(steps, [record["loss"] for record in records], label=file.stem.removeprefix("metrics-"))
        axis.stackplot(
            steps, *([record[key] for record in records] for key in WHERE), labels=list(WHERE.values()), step="mid"
        )
        axis.set(ylabel="seconds a step", title=file.stem.removeprefix("metrics-"))
        axis.legend(loc="upper right")
    axes[0, 0].set(ylabel="loss", title=Path(folder).name)
    axes[0, 0].legend(loc="upper right")
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
    return Path(output)


def main(arguments: list[str] | None = None) -> int:
    """The command. 0, or 1 with one line that says what to do."""
    parser = argparse.ArgumentParser(prog="python -m hetdeploy.train.plot", description="Draw a run's metrics as PNG.")
    parser.add_argument("folder", type=Path, help="the folder with metrics-rank*.jsonl")
    parser.add_argument("-o", "--output", type=Path, help="the picture (default: run.png in the folder)")
    options = parser.parse_args(arguments)
    try:
        print(plot_run(options.folder, options.output or options.folder / "run.png"))
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")  # a rank has no display
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MisuseError("drawing needs matplotlib", "pip install matplotlib") from error


if __name__ == "__main__":
    sys.exit(main())
