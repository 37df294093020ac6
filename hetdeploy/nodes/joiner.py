"""The joiner: `join` from the code to the job's end."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetdeploy import __version__, envfile
from hetdeploy.errors import PeerUnreachable, PreflightError, UsageError
from hetdeploy.gloo import selftest
from hetdeploy.gloo.dialect import Dialect, dialect_here, layout_here
from hetdeploy.link.client import LinkClient
from hetdeploy.link.invitation import Invitation
from hetdeploy.network.interfaces import Interface, interface_of, read
from hetdeploy.network.select import choose
from hetdeploy.nodes import accelerator, launch
from hetdeploy.nodes.job import Job, StateFolder
from hetdeploy.nodes.launch import Agent
from hetdeploy.nodes.member import JobMember, LineSink, Machine, gloo_address, hello, installed_torch
from hetdeploy.nodes.outcome import Outcome
from hetdeploy.nodes.stages import Stages
from hetdeploy.preflight import joiner as preflight
from hetdeploy.preflight.report import ONLY_FOR_DOCTOR
from hetdeploy.settings import Settings

SKEW_WARNING_SECONDS = 2.0
FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 3.0
CAFFEINATE_SECONDS = 2.0
"""How long caffeinate may take to end when it is told to."""


@dataclass(frozen=True)
class JoinRequest:
    """What `join` was asked for."""

    invitation: Invitation
    settings: Settings


def join(request: JoinRequest, stages: Stages, show: LineSink) -> Outcome:
    """Join the job behind the code and run this machine's ranks until it is over.

    Waits, visibly, for a head that is not there yet, up to HETDEPLOY_JOIN_TIMEOUT seconds.

    Raises UsageError for a code that the head does not take, PeerUnreachable when the head cannot be reached or goes
    away, VersionMismatch when the two machines' versions do not go together.
    """
    settings, invitation = request.settings, request.invitation
    installed_torch()
    _require_entry_point()
    _try_bridge_once(stages)
    kind = accelerator.detect(settings.accelerator)
    report = preflight.check(settings, accelerator=kind, ignore=ONLY_FOR_DOCTOR)
    for warning in report.warnings:
        stages.warn(warning)
    report.raise_failures()
    agent = Agent()
    # torch's import is the longest step of all; it runs while the two machines shake hands.
    agent.start()
    try:
        with stages.stage("network") as stage:
            wanted = settings["HETDEPLOY_NIC"]
            nic = choose(read(), named=wanted.value or None, route_to=invitation.host, named_by=wanted.where)
            if nic.kind == "wifi":
                stages.warn(f"{nic.name} is Wi-Fi: training over it is several times slower than over a cable")
            stage.done(f"{nic.describe()} towards {invitation.host}")
        machine = Machine(
            role="joiner",
            runs=settings.runs_dir,
            accelerator=kind,
            nproc_per_node=settings.nproc_per_node,
            address=nic.address,
            data=str(settings.data_dir) if settings.data_dir else None,
            threads=settings["HETDEPLOY_OMP_NUM_THREADS"].value or None,
        )
        with stages.stage("head") as stage:
            client = _reach(invitation, machine, nic, settings.join_timeout, stage.waiting)
            stage.done(f"{invitation.host}:{invitation.port} knows this code; its certificate is the code's")
        try:
            return _run(client, machine, nic, agent, settings, stages, show)
        finally:
            client.close()
    finally:
        agent.terminate()


def _run(
    client: LinkClient,
    machine: Machine,
    nic: Interface,
    agent: Agent,
    settings: Settings,
    stages: Stages,
    show: LineSink,
) -> Outcome:
    member = JobMember(client, machine, show, agent)
    with stages.stage("versions") as stage:
        _compare(client, stages)
        stage.done(f"hetdeploy {__version__}, torch {installed_torch()}, clocks {abs(client.clock_skew):.1f} s apart")
    with stages.stage("settings") as stage:
        state = StateFolder(settings.folder)
        state.create()
        values = environment(member.job, machine, nic, settings)
        changed = envfile.write(state.joiner_env, values, "hetdeploy join")
        stage.done(f"{'wrote' if changed else 'kept'} {state.joiner_env}")
    with stages.stage("files") as stage:
        member.fetch_files()
        bundle = member.job.bundle
        stage.done(f"{len(bundle.files)} files, {bundle.size / 1000:.0f} kB, digest {bundle.digest[:12]}")
    stages.say(f"this machine will run {member.job.command} from {client.host} as node {member.name}")
    with _stay_awake():
        return member.run()


def environment(job: Job, machine: Machine, nic: Interface, settings: Settings) -> dict[str, str]:
    """What ``joiner.env`` holds: the settings in force and what was found out about this machine."""
    return {
        "HETDEPLOY_NIC": nic.name,
        "HETDEPLOY_ADDRESS": nic.address,
        "HETDEPLOY_HEAD": job.head_address,
        "HETDEPLOY_PORT": str(job.link_port),
        "HETDEPLOY_LINK": job.link,
        "HETDEPLOY_ACCELERATOR": machine.accelerator,
        "HETDEPLOY_NODES": job.nodes,
        "HETDEPLOY_CREW": "yes" if job.crew else "no",
        "HETDEPLOY_NPROC_PER_NODE": str(machine.nproc_per_node),
        "HETDEPLOY_BACKEND": job.backend,
        "HETDEPLOY_VERSION": __version__,
        "HETDEPLOY_TORCH_VERSION": installed_torch(),
        "HETDEPLOY_RUNS": str(settings.runs_dir.resolve()),
        "GLOO_SOCKET_IFNAME": interface_of(gloo_address(job, machine)).name,
    }


def _try_bridge_once(stages: Stages) -> None:
    """On a Mac: try the bridge with this torch before another machine is involved, and remember that it held.

    Raises PreflightError when it does not hold.
    """
    torch = installed_torch()
    proof = Path.home() / ".cache" / "hetdeploy" / f"bridge-{__version__}-torch-{torch}"
    if dialect_here() is not Dialect.UV or proof.exists():
        return
    with stages.stage("self-test") as stage:
        report = selftest.run(layout_here())
        if report.problem:
            raise PreflightError(
                f"the bridge does not carry torch {torch} on this machine ({report.problem})",
                "`hetdeploy selftest` shows each check; please report what it prints",
            )
        stage.done(f"the bridge carries torch {torch}, {len(report.checks)} checks")
    proof.parent.mkdir(parents=True, exist_ok=True)
    proof.touch()


def _require_entry_point() -> None:
    """Without it a rank's gloo would meet the head's without the bridge, and both would hang."""
    names = {point.name for point in importlib.metadata.entry_points(group="torch.backends")}
    if "hetdeploy" not in names:
        raise PreflightError(
            f"hetdeploy is not installed in this environment ({sys.prefix}), only importable", "pip install hetdeploy"
        )


def _reach(
    invitation: Invitation, machine: Machine, nic: Interface, timeout: float, waiting: Callable[[str], None]
) -> LinkClient:
    deadline = time.monotonic() + timeout
    pause = FIRST_RETRY_SECONDS
    while True:
        try:
            return LinkClient.connect(invitation, "joiner", hello(machine), source_address=nic.address)
        except PeerUnreachable as error:
            if 0 < invitation.expires < time.time():
                when = time.strftime("%Y-%m-%d %H:%M", time.localtime(invitation.expires))
                raise UsageError(
                    f"this join code expired at {when}, and no head answers ({error.problem})",
                    "take the line that `hetdeploy up` prints there now",
                ) from None
            if time.monotonic() + pause > deadline:
                raise PeerUnreachable(
                    f"{invitation.host}:{invitation.port} did not answer within {timeout:.0f} s ({error.problem})",
                    f"{error.fix or 'see whether `hetdeploy up` runs there'}; `hetdeploy join` may be called again",
                ) from None
            waiting(f"the head: {error}")
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_RETRY_SECONDS)


def _compare(client: LinkClient, stages: Stages) -> None:
    """Warn of what differs and does not forbid the run."""
    theirs = str(client.welcome["python"])
    if theirs.split(".")[:2] != platform.python_version().split(".")[:2]:
        stages.warn(f"the head runs Python {theirs}, this machine {platform.python_version()}")
    if abs(client.clock_skew) > SKEW_WARNING_SECONDS:
        ahead = "behind" if client.clock_skew > 0 else "ahead of"
        stages.warn(
            f"this machine's clock is {abs(client.clock_skew):.0f} s {ahead} the head's: switch on its network time"
            f" (the job runs up to {launch.CLOCK_TOLERANCE_SECONDS} s apart)"
        )


@contextmanager
def _stay_awake() -> Iterator[None]:
    """Keep a Mac from sleeping while the job runs; caffeinate ends by itself with this process."""
    caffeinate = shutil.which("caffeinate") if sys.platform == "darwin" else None
    if caffeinate is None:
        yield
        return
    process = subprocess.Popen([caffeinate, "-i", "-m", "-s", "-w", str(os.getpid())])
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=CAFFEINATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
