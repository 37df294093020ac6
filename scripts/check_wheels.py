#!/usr/bin/env python3
"""Reads gloo's protocol constants out of a torch version's macOS and Linux wheels, and compares them with the bridge's.

The gate for raising the supported torch version: docs/supporting-a-torch-version.md. Needs capstone and pip, no torch
and no Mac. Exit codes: 0 as the bridge expects, 5 something differs, 2 wrong usage, 1 the wheels could not be read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetdeploy.errors import HetdeployError, UsageError, VersionMismatch

try:
    from wheel_witness import tcp, uv
    from wheel_witness.checks import Check, Library, Result, examine
    from wheel_witness.images import open_image
    from wheel_witness.prove import Proof, prove
    from wheel_witness.wheels import LINUX, MACOS, Platform, library
except ModuleNotFoundError as missing:
    if missing.name != "capstone":
        raise
    sys.exit("check_wheels needs a disassembler: pip install 'capstone>=5,<6'")

SCHEMA_VERSION = 1
SIDES: tuple[tuple[Platform, Sequence[Check]], ...] = ((MACOS, uv.CHECKS), (LINUX, tcp.CHECKS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check as ``arguments`` ask. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if not re.fullmatch(r"\d+(\.\d+)+\w*(\+[\w.]+)?", options.version):
            raise UsageError(f"{options.version!r} is not a torch version", "name one like 2.13.0")
        report = examine_version(options.version, options.cache, options.prove)
    except HetdeployError as error:
        print(f"check_wheels: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report, indent=1) if options.json else _text(report))
    return 0 if report["ok"] else VersionMismatch.exit_code


def examine_version(version: str, cache: Path, proving: bool = False) -> dict[str, Any]:
    """The report on one torch version, as --json prints it. Raises HetdeployError when a wheel cannot be read."""
    checks: list[dict[str, Any]] = []
    sources = {}
    for system, side in SIDES:
        with library(version, system, cache) as source:
            sources[system.title] = source.origin
            image = open_image(source.path)
            try:
                for result in examine(Library(image), side):
                    proofs = prove(image, result.check) if proving and not result.problem else None
                    checks.append(_entry(result, system, proofs))
            finally:
                image.close()
    return {
        "schema_version": SCHEMA_VERSION,
        "torch": version,
        "ok": all(check["ok"] for check in checks),
        "libraries": sources,
        "checks": checks,
    }


def default_cache() -> Path:
    """Where wheels are kept unless --cache says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetdeploy" / "wheels"


def _entry(result: Result, system: Platform, proofs: list[Proof] | None) -> dict[str, Any]:
    problem = result.problem
    missed = [proof.evidence for proof in proofs or [] if proof.verdict is None]
    if missed:
        problem = "the check does not notice a change at " + ", ".join(f"{at.symbol}+{at.offset:#x}" for at in missed)
    return {
        "name": result.check.name,
        "system": system.title,
        "claim": result.check.claim,
        "ok": not problem,
        "problem": problem,
        "changes_noticed": None if proofs is None else len(proofs) - len(missed),
        "evidence": [
            {"what": item.what, "symbol": item.symbol, "offset": item.offset, "instruction": item.instruction}
            for item in result.evidence
        ],
    }


def _text(report: dict[str, Any]) -> str:
    lines = [f"torch {report['torch']}"]
    for system, origin in report["libraries"].items():
        lines.append(f"\n{system}: {origin}")
        for check in report["checks"]:
            if check["system"] != system:
                continue
            lines.append(f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {check['problem'] or check['claim']}")
            if check["changes_noticed"]:
                lines.append(f"       changed in {check['changes_noticed']} ways, the library fails this check")
            for item in check["evidence"]:
                place = f"{item['symbol']}+{item['offset']:#x}  {item['instruction']}" if item["instruction"] else ""
                lines.append(f"       {item['what']}" + (f"\n           {place}" if place else ""))
    failed = [check["name"] for check in report["checks"] if not check["ok"]]
    if failed:
        lines.append(f"\ntorch {report['torch']} differs from what the bridge relies on in: {', '.join(failed)}")
    else:
        lines.append(f"\ntorch {report['torch']} is as the bridge expects it in all {len(report['checks'])} checks")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare a torch version's wheels with what the gloo bridge relies on."
    )
    parser.add_argument("version", help="a torch version that has wheels for both systems, such as 2.13.0")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where wheels are kept [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--prove", action="store_true", help="also change each constant found, and see its check fail")
    return parser


if __name__ == "__main__":
    sys.exit(main())
