"""`hetdeploy code`."""

from __future__ import annotations

import click

from hetdeploy.cli import output
from hetdeploy.errors import UsageError
from hetdeploy.nodes import head


@click.command("code")
@click.option("--rotate", is_flag=True, help="Make a new code; the old one stops working.")
def command(rotate: bool) -> int:
    """Print the line to paste on the other machine again, or make a new code."""
    settings = output.load_settings({}, warn=False)
    if rotate:
        output.data(f"hetdeploy join {head.rotate_code(settings).encode()}")
        return 0
    started = head.current(settings)
    if started is None:
        raise UsageError(f"no job was started in {settings.folder}", "start one with `hetdeploy up SCRIPT`")
    output.data(started.join_line)
    return 0
