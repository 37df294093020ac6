"""What a head must be able to do."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from hetdeploy.preflight.docker import (
    ComposePlugin,
    DiskRoom,
    DockerCommand,
    EngineAnswers,
    ExportedApiVersion,
    RootlessEngine,
)
from hetdeploy.preflight.facts import read_head
from hetdeploy.preflight.machine import Firewall, FreePort, HostName, Network, PythonVersion, TorchVersion, Wsl
from hetdeploy.preflight.nvidia import CudaOfImage, NvidiaDriver, NvidiaToolkit
from hetdeploy.preflight.report import Check, Report, run_all
from hetdeploy.settings import Settings

CHECKS: tuple[Check, ...] = (
    DockerCommand(),
    ComposePlugin(),
    EngineAnswers(),
    RootlessEngine(),
    ExportedApiVersion(),
    DiskRoom(),
    NvidiaDriver(),
    NvidiaToolkit(),
    CudaOfImage(),
    FreePort(),
    Network(),
    HostName(),
    Wsl(),
    Firewall(),
    PythonVersion(),
    TorchVersion(),
)


def check(
    settings: Settings,
    *,
    accelerator: str,
    address: str,
    native: bool,
    tensorboard: bool = False,
    ignore: Collection[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Report:
    """See this machine as a head on ``address`` that computes on ``accelerator``; in containers unless ``native``."""
    facts = read_head(settings, accelerator, address, native=native, tensorboard=tensorboard, environ=environ)
    return run_all(CHECKS, facts, ignore)
