"""`hetdeploy env`: every effective setting and where it comes from."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hetdeploy import settings
from hetdeploy.cli import output


@click.command()
@click.option("--explain", is_flag=True, help="Say what each setting means and what it may be.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--example", is_flag=True, help="Print a commented .env file to start from, and nothing else.")
def command(explain: bool, as_json: bool, example: bool) -> None:
    """Show every setting with its value and where that comes from.

    A flag of `up` or `join` wins over the environment, the environment over .env.local, .env.local over .env, and .env
    over the default. The files are those of the current folder.
    """
    if example:
        click.echo(settings.example(), nl=False)
        return
    effective = settings.load({}, os.environ, Path.cwd())
    warnings = settings.shell_warnings(os.environ)
    if as_json:
        output.data_json({"settings": _described(effective), "warnings": warnings})
        return
    output.data("\n".join(_explained(effective) if explain else _table(effective)))
    for warning in warnings:
        output.say(f"warning: {warning}")


def _described(effective: settings.Settings) -> dict[str, dict[str, str]]:
    return {
        row.key: {
            "value": effective[row.key].value,
            "origin": effective[row.key].origin,
            "where": effective[row.key].where,
            "default": row.default,
            "meaning": row.meaning,
            "allowed": row.allowed,
        }
        for row in settings.TABLE
    }


def _table(effective: settings.Settings) -> list[str]:
    shown = {key: f"{key}={value.value}" for key, value in effective.items()}
    width = max(map(len, shown.values()))
    return [f"{shown[key]:<{width}}  {value.where}" for key, value in effective.items()]


def _explained(effective: settings.Settings) -> list[str]:
    lines = []
    for row in settings.TABLE:
        value = effective[row.key]
        lines += [
            f"{row.key}={value.value}",
            f"    from     {value.where}"
            + (f" (default: {row.default or 'empty'})" if value.origin != "default" else ""),
            f"    meaning  {row.meaning}",
            f"    allowed  {row.allowed}",
            "",
        ]
    return lines[:-1]
