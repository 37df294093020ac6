"""The command line: one verb a module, imported only when it is called."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

import click

from hetdeploy import __version__
from hetdeploy.errors import HetdeployError, Interrupted

_VERBS = {
    "up": "Start the head: rendezvous and rank 0; prints the line to paste on the other machine.",
    "join": "Join this machine to the job behind a code.",
    "demo": "Run the whole path on this one machine: a head, a joiner, a small training run.",
    "status": "Show the job of this folder: nodes, ranks, progress.",
    "logs": "Show what the ranks printed.",
    "plot": "Draw the metrics of a run.",
    "down": "End the job of this folder on all machines and leave nothing behind.",
    "code": "Print the join line again, or replace the code.",
    "doctor": "Check this machine and say how to mend what is wrong.",
    "selftest": "Try the bridge between a Mac's gloo and a Linux gloo on this one machine.",
    "env": "Show every setting, its value and where it comes from.",
}


class _Verbs(click.Group):
    """Loads a verb's module when the verb is called: `--help` needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(f"hetdeploy.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="hetdeploy")
@click.option("--debug", is_flag=True, help="Show the trace of an error.")
def cli(debug: bool) -> None:
    """Train one PyTorch job on an Ubuntu box with a GPU and the Macs beside it."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code of errors.py."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        code: Any = cli.main(args=arguments, prog_name="hetdeploy", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _complain(Interrupted("interrupted"))
        return Interrupted.exit_code
    except HetdeployError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _complain(error)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has enough of it.
        sys.stderr.close()
        return 0
    return code if isinstance(code, int) else 0


def _complain(error: HetdeployError) -> None:
    click.secho(f"error: {error}", fg="red", err=True)
