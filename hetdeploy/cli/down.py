"""`hetdeploy down`."""

from __future__ import annotations

import click

from hetdeploy.cli import output
from hetdeploy.nodes import head
from hetdeploy.nodes.follow import stop


@click.command("down")
def command() -> int:
    """End the job of this folder on all machines and remove its containers. Runs and their outputs stay."""
    settings = output.load_settings({}, warn=False)
    started = head.current(settings)
    if started is None:
        output.say(f"nothing to end: no job was started in {settings.folder}")
        return 0
    outcome = stop(started)
    removed = started.runtime.remove()
    if outcome is not None:
        output.say(f"stopped {started.job.id} on all machines")
    output.say(f"removed what ran for {started.job.id}" if removed else "nothing to end: it was down already")
    return 0
