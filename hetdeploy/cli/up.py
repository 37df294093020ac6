"""`hetdeploy up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hetdeploy.cli import output
from hetdeploy.nodes import head
from hetdeploy.nodes.follow import follow
from hetdeploy.nodes.journal import Event
from hetdeploy.nodes.outcome import Outcome
from hetdeploy.nodes.stages import Stages


@click.command("up", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--detach", is_flag=True, help="Return when the job waits for its joiners.")
@click.option("--native", is_flag=True, help="Run the head as plain processes, without containers.")
@click.option("--tensorboard", is_flag=True, help="Serve the runs' metrics to browsers of this machine.")
@output.switch("CREW", "Joiners may come, leave and come back; SCRIPT uses hetdeploy.train.Assist.")
@output.setting("NIC", "Network interface to use.")
@output.setting("PORT", "Port that joiners connect to.")
@output.setting("STORE_PORT", "Port of torch's store.")
@output.setting("LINK", "tunnel or direct.")
@output.setting("ACCELERATOR", "auto, cuda, rocm or cpu.")
@output.setting("NODES", "How many machines, this one among them; in a crew the most at a time.")
@output.setting("NPROC_PER_NODE", "Ranks on this machine.")
@output.setting("BACKEND", "gloo or nccl.")
@output.setting("DATA_DIR", "Folder of data, mounted read-only.")
@output.setting("JOIN_TIMEOUT", "Seconds to wait for the joiners.")
def command(
    script: Path, arguments: tuple[str, ...], detach: bool, native: bool, tensorboard: bool, **options: Any
) -> int:
    """Start the head for SCRIPT and wait for the other machines.

    ARGUMENTS go to the script. Stays attached: shows every rank's lines and ends with the job's exit code; Ctrl-C
    stops the job on all machines.

    With --crew the script starts at once, alone if nobody is there, as a leader. Machines that join are its helpers:
    they may come, leave, break down and come back while it goes on, and the job is over when the script here is.
    SCRIPT must share its work out by hetdeploy.train.Assist, as scripts/train_gpt.py --sync assist does: without that,
    every machine would train by itself. One rank on each machine.
    """
    settings = output.load_settings(output.setting_flags(options))
    request = head.UpRequest(script, arguments, settings, native=native, tensorboard=tensorboard)
    started = head.up(request, Stages(output.say))
    try:
        announce(started)
        return 0 if detach else attach(started).exit_code
    except KeyboardInterrupt:
        started.runtime.remove()
        raise


def announce(started: head.Started) -> None:
    """Say what to do next, and in direct mode what is open to whom."""
    job = started.job
    if job.link == "direct":
        output.say(
            f"warning: direct mode: every machine that reaches {job.head_address} can reach the store (port "
            f"{job.store_port}) and the ranks (random ports); neither asks who is there"
        )
    if job.crew and job.max_nodes > 1:
        output.say(f"up to {job.max_nodes - 1} at a time may help, now or later; run there:")
        output.data(started.join_line)
    elif job.max_nodes > 1:
        more = sorted({job.min_nodes - 1, job.max_nodes - 1})
        output.say(f"waiting for {' to '.join(map(str, more))} more; run there:")
        output.data(started.join_line)


def attach(started: head.Started) -> Outcome:
    """Show the job's events until it is over, then end what ran here."""
    try:
        outcome = follow(started, show_event, lambda: output.say("stopping the job on all machines"))
    finally:
        started.runtime.remove()
    for line in outcome.report():
        output.say(line)
    output.say(f"journal and outputs: {started.run.path}")
    return outcome


def show_event(event: Event) -> None:
    """One event of the journal as lines for a person."""
    node = event["node"]
    if event["event"] == "log":
        for rank, text in event["lines"]:
            output.rank_line(node, rank, text)
    elif event["event"] == "joined":
        output.say(f"{node} joined from {event['peer']}: {event['os']} {event['arch']}, {event['accelerator']}")
    elif event["event"] == "lost":
        output.say(f"{node} went away: {event['reason']}")
    elif event["event"] == "parted":
        output.say(event["text"])
