"""`hetdeploy selftest`."""

from __future__ import annotations

import click

from hetdeploy.cli import output
from hetdeploy.gloo import selftest
from hetdeploy.gloo.dialect import Layout, layout_here
from hetdeploy.nodes.member import installed_torch


@click.command("selftest")
@click.option(
    "--layout",
    type=click.Choice([layout.value for layout in Layout]),
    help="Socket address layout of the Mac's side; this system's own by default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(layout: str | None, as_json: bool) -> int:
    """Try the bridge on this one machine: two ranks of its torch, one behind the bridge with a Mac's face."""
    installed_torch()
    report = selftest.run(Layout(layout) if layout else layout_here())
    if as_json:
        fields = {"ok": report.ok, "torch": report.torch, "layout": report.layout.value}
        output.data_json({**fields, "checks": report.checks, "seconds": report.seconds, "problem": report.problem})
        return 0 if report.ok else 1
    for check in report.checks:
        output.data(f"ok      {check}")
    if report.problem:
        output.data(f"FAILED  {report.problem}")
    verdict = "carries" if report.ok else "does not carry"
    output.data(
        f"the bridge {verdict} torch {report.torch} on this machine "
        f"({report.layout.value} addresses, {report.seconds:.1f} s)"
    )
    return 0 if report.ok else 1
