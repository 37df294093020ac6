"""`hetdeploy join`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hetdeploy.cli import output
from hetdeploy.errors import UsageError
from hetdeploy.link.invitation import Invitation
from hetdeploy.nodes import joiner
from hetdeploy.nodes.stages import Stages


@click.command("join")
@click.argument("code", required=False)
@click.option("--code-file", type=click.Path(path_type=Path), help="Read the code from a file.")
@output.setting("NIC", "Network interface to use.")
@output.setting("ACCELERATOR", "auto, mps, cuda or cpu.")
@output.setting("NPROC_PER_NODE", "Ranks on this machine.")
@output.setting("DATA_DIR", "Folder of data for the script.")
@output.setting("JOIN_TIMEOUT", "Seconds to wait for the head.")
def command(code: str | None, code_file: Path | None, **options: Any) -> int:
    """Join the job behind CODE, the code that `hetdeploy up` printed, and run this machine's ranks until it is over.

    May be called before `up`: it waits. CODE may be - to read it from standard input.
    """
    settings = output.load_settings(output.setting_flags(options))
    request = joiner.JoinRequest(Invitation.decode(_read_code(code, code_file)), settings)
    outcome = joiner.join(request, Stages(output.say), _show)
    for line in outcome.report():
        output.say(line)
    return outcome.exit_code


def _read_code(code: str | None, code_file: Path | None) -> str:
    if code_file is not None:
        try:
            return code_file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {code_file} ({error.strerror})", "pass the code itself") from None
    if code == "-":
        return sys.stdin.readline()
    if code is None:
        raise UsageError("no join code", "paste the line that `hetdeploy up` printed on the other machine")
    return code


def _show(rank: int | None, text: str) -> None:
    output.data(text if rank is None else f"rank {rank} | {text}")
