"""What a joiner must be able to do."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from hetdeploy.preflight.facts import read_joiner
from hetdeploy.preflight.machine import HostName, Network, PythonVersion, TorchVersion
from hetdeploy.preflight.nvidia import NvidiaDriver
from hetdeploy.preflight.report import Check, Report, run_all
from hetdeploy.settings import Settings

CHECKS: tuple[Check, ...] = (NvidiaDriver(), Network(), HostName(), PythonVersion(), TorchVersion())


def check(
    settings: Settings, *, accelerator: str, ignore: Collection[str] = (), environ: Mapping[str, str] = os.environ
) -> Report:
    """Look at this machine as a joiner that computes on ``accelerator``."""
    return run_all(CHECKS, read_joiner(settings, accelerator, environ=environ), ignore)
