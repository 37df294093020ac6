"""`hetdeploy plot`."""

from __future__ import annotations

from pathlib import Path

import click

from hetdeploy import plot
from hetdeploy.cli import output
from hetdeploy.errors import UsageError


@click.command("plot")
@click.argument("run", required=False)
@click.option(
    "-o", "--output", "picture", type=click.Path(path_type=Path), help="The PNG; by default run.png in the run."
)
def command(run: str | None, picture: Path | None) -> int:
    """Draw the metrics of RUN: the loss, who did how many samples, where each rank's time went.

    RUN is the name of one of this folder's runs, by default the latest, or any folder with metrics in it. A rank's
    metrics are on the machine that it ran on.
    """
    folder = _folder_of(run)
    picture = picture or folder / "run.png"
    plot.draw(folder, picture)
    output.data(str(picture))
    return 0


def _folder_of(run: str | None) -> Path:
    runs = output.load_settings({}, warn=False).runs_dir
    if run is None:
        # Their names begin with the time.
        names = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
        if not names:
            raise UsageError(f"there is no run in {runs}", "start one with `hetdeploy up SCRIPT`, or name a folder")
        return runs / names[-1]
    for folder in (runs / run, Path(run)):
        if folder.is_dir():
            return folder
    raise UsageError(f"there is no run {run} in {runs}, and no such folder", f"`ls {runs}` shows what there is")
