"""`hetdeploy status`."""

from __future__ import annotations

import time
from typing import Any

import click

from hetdeploy.cli import output
from hetdeploy.errors import UsageError
from hetdeploy.nodes import head
from hetdeploy.nodes.follow import read_status
from hetdeploy.nodes.outcome import Outcome
from hetdeploy.nodes.progress import describe


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> int:
    """Show the job of this folder: its nodes, their ranks, how far they are, or how it ended."""
    settings = output.load_settings({}, warn=False)
    started = head.current(settings)
    if started is None:
        raise UsageError(f"no job was started in {settings.folder}", "start one with `hetdeploy up SCRIPT`")
    status = read_status(started.run) or {"job": started.job.id, "state": "starting", "nodes": [], "outcome": None}
    if status["state"] != "over" and not started.runtime.is_running():
        status["state"] = "gone"
    if as_json:
        output.data_json({**status, "runtime": started.runtime.name})
        return 0
    for line in _lines(status, started):
        output.data(line)
    return 0


def _lines(status: dict[str, Any], started: head.Started) -> list[str]:
    lines = [f"job {status['job']}: {status['state']}, {started.job.command} ({started.runtime.name})"]
    for node in status["nodes"]:
        lines.append(f"  {node['name']:<12} {node['state']:<9} {node['accelerator']:<5} from {node['peer']}")
        if node.get("parted"):
            lines.append(f"    {node['parted']}")
        lines += [f"    rank {rank}  {describe(figures)}" for rank, figures in node["progress"].items()]
    if status.get("awaited") and status["state"] == "waiting":
        lines.append(f"  waiting for {status['awaited']} more: {started.join_line}")
    if status["state"] == "gone":
        lines.append("  its processes are gone without an outcome: `hetdeploy logs` shows the last lines")
    if status["outcome"]:
        lines += [f"  {line}" for line in Outcome.from_json(status["outcome"]).report()]
    elif "t" in status and (age := time.time() - status["t"]) > 10:
        lines.append(f"  (as of {age:.0f} s ago)")
    return lines
