"""`hetdeploy logs`."""

from __future__ import annotations

import click

from hetdeploy.cli import output
from hetdeploy.cli.up import show_event
from hetdeploy.errors import UsageError
from hetdeploy.nodes import head
from hetdeploy.nodes.follow import watch
from hetdeploy.nodes.journal import Event, JournalReader


@click.command("logs")
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the job is over.")
@click.option("--node", help="Lines of this node alone.")
@click.option("--rank", type=int, help="Lines of this rank alone.")
def command(following: bool, node: str | None, rank: int | None) -> int:
    """Show what the ranks of this folder's job printed, on all machines."""
    settings = output.load_settings({}, warn=False)
    started = head.current(settings)
    if started is None:
        raise UsageError(f"no job was started in {settings.folder}", "start one with `hetdeploy up SCRIPT`")

    def show(event: Event) -> None:
        if node is not None and event["node"] != node:
            return
        if rank is not None:
            if event["event"] != "log":
                return
            event = {**event, "lines": [line for line in event["lines"] if line[0] == rank]}
        show_event(event)

    if following:
        watch(started, show)
        return 0
    events = list(JournalReader(started.run.journal).new_events())
    for event in events:
        show(event)
    if not any(event["event"] == "log" for event in events):
        for service in ("rendezvous", "rank"):
            for line in started.runtime.last_lines(service):
                output.data(f"{service}: {line}")
    return 0
