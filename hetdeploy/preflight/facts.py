"""What the checks judge: what was asked of this machine, and what is found on it. Read once, here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetdeploy.errors import PreflightError
from hetdeploy.network import interfaces
from hetdeploy.network.host import Caution, hostname_caution, nic_cautions
from hetdeploy.network.interfaces import Interface
from hetdeploy.network.probe import require_free_port
from hetdeploy.preflight import disk, engine
from hetdeploy.settings import Settings

PROGRAM_SECONDS = 15.0
"""How long a program that is asked for its version may take."""

_LOOPBACK = "127.0.0.1"
_UFW_SETTINGS = Path("/etc/ufw/ufw.conf")
_NVIDIA_SETTINGS = Path("/etc/nvidia-container-runtime/config.toml")


@dataclass(frozen=True)
class DockerFacts:
    """The engine and the command line that speaks to it."""

    command: str | None
    """Where `docker` is."""
    compose: str | None
    """Version of Compose v2, such as ``2.26.1``."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What `docker info` tells; empty when there is a problem."""
    problem: PreflightError | None = None
    shortage: str | None = None
    """What room on the disk an image build would lack."""


@dataclass(frozen=True)
class NvidiaFacts:
    """What `nvidia-smi` prints and which parts of the container toolkit there are."""

    output: str
    exit_code: int
    capabilities: tuple[str, ...] = ()
    """Compute capability of each card, such as ``8.9``."""
    toolkit: str | None = None
    """Where the container toolkit's program is."""
    no_cgroups: bool = False
    """Whether the toolkit leaves cgroups alone, as rootless Docker needs it."""


@dataclass(frozen=True)
class Facts:
    """Everything that checks look at. The first fields are what was asked for, the others what was found."""

    accelerator: str
    link: str
    torch_version: str
    torch_index: str
    address: str | None = None
    port: int = 0
    is_accelerator_asked_for: bool = False
    """Whether the user named the accelerator; otherwise it is the best that was found."""

    docker: DockerFacts | None = None
    """None for what runs without containers."""
    nvidia: NvidiaFacts | None = None
    """None where there is no `nvidia-smi`."""
    docker_api_version: str | None = None
    """What the shell's DOCKER_API_VERSION says."""
    port_problems: tuple[PreflightError, ...] = ()
    cautions: tuple[Caution, ...] = ()
    hostname: Caution | None = None
    subnet: str | None = None
    """The network that ``address`` is in, such as ``192.168.1.0/24``."""
    is_ufw_on: bool = False
    kernel: str = ""
    wsl_mode: str | None = None
    """WSL's networking mode, such as ``nat`` or ``mirrored``."""
    python: tuple[int, int] = (0, 0)
    torch: str | None = None
    """The version of torch in this environment; None when a rank here needs none or there is none."""


def read_head(
    settings: Settings,
    accelerator: str,
    address: str,
    *,
    native: bool,
    tensorboard: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Facts:
    """The facts for a head on ``address``, in containers unless ``native``."""
    ports = [(address, settings.port, "HETDEPLOY_PORT")]
    if settings.link == "direct" or native:
        inner = address if settings.link == "direct" else _LOOPBACK
        ports.append((inner, settings.store_port, "HETDEPLOY_STORE_PORT"))
    if tensorboard:
        ports.append((_LOOPBACK, settings.tensorboard_port, "HETDEPLOY_TENSORBOARD_PORT"))
    nic = interfaces.interface_of(address)
    hostname = hostname_caution()
    return Facts(
        accelerator=accelerator,
        link=settings.link,
        torch_version=settings.torch_version,
        torch_index=settings.torch_index(accelerator),
        address=address,
        port=settings.port,
        is_accelerator_asked_for=settings.accelerator != "auto",
        docker=None if native else read_docker(environ, accelerator),
        nvidia=read_nvidia(environ),
        docker_api_version=environ.get("DOCKER_API_VERSION"),
        port_problems=tuple(problem for port in ports if (problem := _port_problem(*port)) is not None),
        cautions=tuple(_nic_cautions(nic)),
        hostname=hostname,
        subnet=_subnet(nic, address),
        is_ufw_on=_is_ufw_on(_UFW_SETTINGS),
        kernel=platform.release(),
        wsl_mode=_wsl_mode(environ),
        python=sys.version_info[:2],
        torch=_installed("torch"),
    )


def read_joiner(settings: Settings, accelerator: str, *, environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts for a joiner, which needs no containers and opens no port."""
    hostname = hostname_caution()
    return Facts(
        accelerator=accelerator,
        link=settings.link,
        torch_version=settings.torch_version,
        torch_index=settings.torch_index(accelerator),
        is_accelerator_asked_for=settings.accelerator != "auto",
        nvidia=read_nvidia(environ),
        hostname=hostname,
        kernel=platform.release(),
        python=sys.version_info[:2],
        torch=_installed("torch"),
    )


def read_docker(environ: Mapping[str, str], accelerator: str) -> DockerFacts:
    """Ask the command line and the engine about themselves."""
    command = shutil.which("docker", path=environ.get("PATH"))
    compose = None
    if command is not None:
        code, output = _ask([command, "compose", "version", "--short"], environ)
        compose = output.strip().removeprefix("v") if code == 0 else None
    try:
        info = engine.engine_info(environ)
    except PreflightError as problem:
        return DockerFacts(command, compose, problem=problem)
    room = disk.shortage(Path(info.get("DockerRootDir", "/")), accelerator)
    return DockerFacts(command, compose, info, shortage=room)


def read_nvidia(environ: Mapping[str, str], toolkit_settings: Path = _NVIDIA_SETTINGS) -> NvidiaFacts | None:
    """Ask the NVIDIA driver about itself, through the `nvidia-smi` that it comes with."""
    path = environ.get("PATH")
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return None
    code, output = _ask([program], environ)
    _, cards = _ask([program, "--query-gpu=compute_cap", "--format=csv,noheader"], environ)
    hook = shutil.which("nvidia-container-runtime-hook", path=path) or shutil.which("nvidia-ctk", path=path)
    try:
        text = toolkit_settings.read_text(encoding="utf-8")
    except OSError:
        text = ""
    return NvidiaFacts(
        output=output,
        exit_code=code,
        capabilities=tuple(line.strip() for line in cards.splitlines() if line.strip()),
        toolkit=hook,
        no_cgroups=any(line.replace(" ", "").startswith("no-cgroups=true") for line in text.splitlines()),
    )


def _ask(command: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a program; -1 and the reason when it does not run."""
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(environ),
            timeout=PROGRAM_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {PROGRAM_SECONDS:.0f} s"
    except OSError as error:
        return -1, str(error.strerror)
    return answer.returncode, answer.stdout


def _port_problem(address: str, port: int, key: str) -> PreflightError | None:
    try:
        require_free_port(address, port, key)
    except PreflightError as problem:
        return problem
    return None


def _nic_cautions(nic: Interface) -> list[Caution]:
    # Loopback is only ever chosen on purpose.
    return [] if nic.kind == "loopback" else nic_cautions(nic, interfaces.read())


def _subnet(nic: Interface, address: str) -> str | None:
    return next((str(own.network) for own in nic.ipv4 if str(own.ip) == address), None)


def _is_ufw_on(path: Path) -> bool:
    """Whether ufw starts with the machine; `ufw status` itself would need root."""
    try:
        return any(line.strip().lower() == "enabled=yes" for line in path.read_text(encoding="utf-8").splitlines())
    except OSError:
        return False


def _wsl_mode(environ: Mapping[str, str]) -> str | None:
    program = shutil.which("wslinfo", path=environ.get("PATH"))
    if program is None:
        return None
    code, output = _ask([program, "--networking-mode"], environ)
    return output.strip().lower() if code == 0 else None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
