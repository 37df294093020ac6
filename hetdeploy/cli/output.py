"""What verbs share: data to stdout, progress to stderr, the same options spelt the same."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from hetdeploy import settings

SCHEMA_VERSION = 1

_Function = TypeVar("_Function", bound=Callable[..., Any])


def say(line: str) -> None:
    """A line of progress, or a warning. NO_COLOR and a stderr that is no terminal switch colours off."""
    colour = "yellow" if line.startswith("warning:") and "NO_COLOR" not in os.environ else None
    click.secho(line, fg=colour, err=True)


def data(line: str) -> None:
    """A line of what was asked for."""
    click.echo(line)
    sys.stdout.flush()


def data_json(fields: Mapping[str, Any]) -> None:
    data(json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=2))


def rank_line(node: str, rank: int | None, text: str) -> None:
    """A line that a rank printed, marked with who printed it."""
    data(f"{node} | {text}" if rank is None else f"{node} rank {rank} | {text}")


def load_settings(flags: Mapping[str, str | None], *, warn: bool = True) -> settings.Settings:
    """The settings of the current folder under ``flags``; says what the shell has left over."""
    if warn:
        for warning in settings.shell_warnings(os.environ):
            say(f"warning: {warning}")
    return settings.load(flags, os.environ, Path.cwd())


def setting(key: str, help_text: str) -> Callable[[_Function], _Function]:
    """A click option that overrides the setting ``HETDEPLOY_<key>``."""
    flag = "--" + key.lower().replace("_", "-")
    return click.option(flag, f"setting_{key.lower()}", metavar="VALUE", help=f"{help_text} [HETDEPLOY_{key}]")


def switch(key: str, help_text: str) -> Callable[[_Function], _Function]:
    """The same for a setting that is yes or no; the option takes no value and says yes."""
    flag = "--" + key.lower().replace("_", "-")
    return click.option(
        flag, f"setting_{key.lower()}", flag_value="yes", default=None, help=f"{help_text} [HETDEPLOY_{key}]"
    )


def setting_flags(options: Mapping[str, Any]) -> dict[str, str | None]:
    """The overrides among a command's options, by key."""
    return {f"HETDEPLOY_{name[8:].upper()}": value for name, value in options.items() if name.startswith("setting_")}
