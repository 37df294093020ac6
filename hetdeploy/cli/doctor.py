"""`hetdeploy doctor`."""

from __future__ import annotations

import click

from hetdeploy.cli import output
from hetdeploy.errors import PreflightError
from hetdeploy.network.interfaces import read
from hetdeploy.network.select import choose
from hetdeploy.nodes import accelerator
from hetdeploy.preflight import head, joiner

_MARKS = {"ok": "ok     ", "warning": "warning", "failure": "FAILED "}


@click.command("doctor")
@click.option("--as-joiner", is_flag=True, help="Check what `join` needs, not what `up` needs.")
@click.option("--native", is_flag=True, help="Check a head without containers.")
@click.option("--ignore", multiple=True, metavar="NAME", help="Leave this check out; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@output.setting("NIC", "Network interface to use.")
def command(as_joiner: bool, native: bool, ignore: tuple[str, ...], as_json: bool, setting_nic: str | None) -> int:
    """Run every check on this machine and report them together. Exits 3 when one fails."""
    settings = output.load_settings({"HETDEPLOY_NIC": setting_nic}, warn=not as_json)
    kind = accelerator.detect(settings.accelerator)
    if as_joiner:
        report = joiner.check(settings, accelerator=kind, ignore=ignore)
    else:
        nic = choose(read(), named=settings.nic, route_to=None)
        report = head.check(settings, accelerator=kind, address=nic.address, native=native, ignore=ignore)
    if as_json:
        output.data_json({"ok": not report.failures, "checks": report.to_json()})
    else:
        for result in report.results:
            output.data(f"{_MARKS[result.status]}  {result.name:<16} {result}")
    return PreflightError.exit_code if report.failures else 0
