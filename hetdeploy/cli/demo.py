"""`hetdeploy demo`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hetdeploy.cli import output
from hetdeploy.cli.up import attach
from hetdeploy.nodes import demo, head
from hetdeploy.nodes.containers import asset, engine_or_none
from hetdeploy.nodes.stages import Stages


@click.command("demo")
@click.option("--steps", default=30, show_default=True, help="Training steps.")
@click.option("--native", is_flag=True, help="Run the head as plain processes even where there is a Docker engine.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("hetdeploy-demo"), show_default=True)
def command(steps: int, native: bool, folder: Path) -> int:
    """Train a small language model on this one machine, through the whole path: head, link, bridge, joiner.

    The head runs in containers where there is a Docker engine, as native processes where there is none.
    """
    engine = None if native else engine_or_none()
    output.say(f"the head runs in containers ({engine})" if engine else "the head runs as native processes")
    settings = demo.prepare(folder, os.environ)
    script = asset("scripts/train_gpt.py")
    arguments = ("--size", "nano", "--steps", str(steps), "--log-every", "5")
    request = head.UpRequest(script, arguments, settings, native=engine is None, loopback=True)
    started = head.up(request, Stages(output.say))
    with demo.second_machine(started, folder):
        outcome = attach(started)
    for rank, first, last in demo.losses(started.run):
        output.data(f"rank {rank}: loss {first:.4f} -> {last:.4f}")
    return outcome.exit_code
