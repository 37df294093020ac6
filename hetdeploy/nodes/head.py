"""The head: `up` from the first check until the job waits for its joiners."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hetdeploy import __version__, envfile
from hetdeploy.errors import UsageError
from hetdeploy.files import write_atomic
from hetdeploy.link.credentials import Credentials
from hetdeploy.link.invitation import Invitation
from hetdeploy.network.interfaces import interface_of, read
from hetdeploy.network.select import choose
from hetdeploy.nodes import accelerator, bundle
from hetdeploy.nodes.compose import ComposeRuntime, image_environment
from hetdeploy.nodes.containers import plan_images
from hetdeploy.nodes.job import Job, RunFolder, StateFolder, new_job_id
from hetdeploy.nodes.member import LOOPBACK, installed_torch
from hetdeploy.nodes.native import NativeRuntime
from hetdeploy.nodes.runtime import Runtime
from hetdeploy.nodes.stages import Stages
from hetdeploy.preflight import engine
from hetdeploy.preflight import head as preflight
from hetdeploy.preflight.report import ONLY_FOR_DOCTOR
from hetdeploy.settings import Settings

CONTAINER_LINK_PORT = 29400

CONTAINER_USER = 1000
"""Who the containers run as when `up` is called by root; otherwise they run as the caller."""


@dataclass(frozen=True)
class UpRequest:
    """What `up` was asked for."""

    script: Path
    arguments: tuple[str, ...]
    settings: Settings
    native: bool = False
    tensorboard: bool = False
    loopback: bool = False
    """Stay on this machine: `demo` needs no NIC."""


@dataclass(frozen=True)
class Started:
    """A job that waits for its joiners, or runs."""

    job: Job
    runtime: Runtime
    run: RunFolder
    code: str

    @property
    def join_line(self) -> str:
        return f"hetdeploy join {self.code}"


def up(request: UpRequest, stages: Stages) -> Started:
    """Go through the sequence until the job waits for its joiners. Called again for a running job it changes nothing.

    Raises PreflightError when this machine is not ready, UsageError when another job runs in this folder. Whatever was
    started before an error is ended again.
    """
    settings = request.settings
    state = StateFolder(settings.folder)
    kind = accelerator.detect(settings.accelerator)
    with stages.stage("network") as stage:
        nic, address = _choose_address(request)
        stage.done(f"{nic}, {address}")
    job = _describe_job(request, state, address)
    runtime = _runtime(job, settings, state)
    if (running := _running(job, runtime, settings, state)) is not None:
        stages.say(f"already up: job {running.job.id}, nothing changed")
        return running
    with stages.stage("check") as stage:
        report = preflight.check(
            settings,
            accelerator=kind,
            address=address,
            native=request.native,
            tensorboard=request.tensorboard,
            ignore=ONLY_FOR_DOCTOR,
        )
        for warning in report.warnings:
            stages.warn(warning)
        report.raise_failures()
        stage.done(report.summary)
    with stages.stage("settings") as stage:
        state.create()
        values = environment(job, settings, state, kind, nic, tensorboard=request.tensorboard)
        changed = envfile.write(state.head_env, values, "hetdeploy up")
        stage.done(f"{'wrote' if changed else 'kept'} {state.head_env}")
    with stages.stage("image") as stage:
        runtime.prepare(stage)
    code = _issue_codes(job, settings, state)
    state.save_job(job)
    run = RunFolder(settings.runs_dir, job.id)
    run.path.mkdir(parents=True, exist_ok=True)
    _give_to_container_user(state.path, settings.runs_dir)
    try:
        with stages.stage("rendezvous") as stage:
            runtime.start_rendezvous(stage)
            stage.done(f"answers on {address}:{settings.port}")
        if request.tensorboard:
            with stages.stage("tensorboard") as stage:
                runtime.start_tensorboard(stage)
                stage.done(f"http://{LOOPBACK}:{settings.tensorboard_port}")
        with stages.stage("rank") as stage:
            runtime.start_rank()
            stage.done(f"started {settings.nproc_per_node} on {kind}")
    except BaseException:
        runtime.remove()
        raise
    return Started(job, runtime, run, code)


def current(settings: Settings) -> Started | None:
    """The job that `up` made last in this folder, whether it still runs or not."""
    state = StateFolder(settings.folder)
    job = state.load_job()
    if job is None:
        return None
    invitation = Credentials.load(state.link).invitation("joiner", job.head_address, job.link_port)
    return Started(job, _runtime(job, settings, state), RunFolder(settings.runs_dir, job.id), invitation.encode())


def rotate_code(settings: Settings) -> Invitation:
    """Replace the join code of this folder's job. Members that are in stay in. Raises UsageError without a job."""
    state = StateFolder(settings.folder)
    job = state.load_job()
    if job is None:
        raise UsageError(f"no job was started in {settings.folder}", "call `hetdeploy up` first")
    credentials = Credentials.load(state.link)
    credentials.rotate(settings.code_ttl)
    _give_to_container_user(state.link)
    return credentials.invitation("joiner", job.head_address, job.link_port)


def environment(
    job: Job, settings: Settings, state: StateFolder, kind: str, nic: str, *, tensorboard: bool
) -> dict[str, str]:
    """What ``head.env`` holds: the settings in force and what was found out about this machine."""
    uid, gid = _container_user(job)
    values = {
        "HETDEPLOY_JOB": job.id,
        "HETDEPLOY_NIC": nic,
        "HETDEPLOY_ADDRESS": job.head_address,
        "HETDEPLOY_PORT": str(job.link_port),
        "HETDEPLOY_STORE_PORT": str(job.store_port),
        "HETDEPLOY_LINK": job.link,
        "HETDEPLOY_ACCELERATOR": kind,
        "HETDEPLOY_NODES": job.nodes,
        "HETDEPLOY_CREW": "yes" if job.crew else "no",
        "HETDEPLOY_NPROC_PER_NODE": str(job.nproc_per_node),
        "HETDEPLOY_BACKEND": job.backend,
        "HETDEPLOY_VERSION": __version__,
        "HETDEPLOY_TORCH_VERSION": job.torch,
        "HETDEPLOY_TORCH_INDEX": settings.torch_index(kind),
        "HETDEPLOY_OMP_NUM_THREADS": settings["HETDEPLOY_OMP_NUM_THREADS"].value,
        "HETDEPLOY_SHM_SIZE": settings.shm_size,
        "HETDEPLOY_TENSORBOARD_PORT": str(settings.tensorboard_port),
        "HETDEPLOY_UID": str(uid),
        "HETDEPLOY_GID": str(gid),
        "HETDEPLOY_STATE": str(state.path.resolve()),
        "HETDEPLOY_RUNS": str(settings.runs_dir.resolve()),
        "HETDEPLOY_DATA": str(settings.data_dir.resolve()) if settings.data_dir else "",
        # gloo listens on the compose network's own interface; only in direct mode does it see this machine's NIC.
        "GLOO_SOCKET_IFNAME": nic if job.link == "direct" else "lo" if job.runtime == "native" else "eth0",
    }
    if job.runtime == "native":
        return values
    images = plan_images(kind, settings.torch_version, settings.torch_index(kind), tensorboard=tensorboard)
    return {**values, **image_environment(images, state.path / "context")}


def _choose_address(request: UpRequest) -> tuple[str, str]:
    if request.loopback:
        return interface_of(LOOPBACK).name, LOOPBACK
    wanted = request.settings["HETDEPLOY_NIC"]
    nic = choose(read(), named=wanted.value or None, route_to=None, named_by=wanted.where)
    return nic.name, nic.address


def _describe_job(request: UpRequest, state: StateFolder, address: str) -> Job:
    settings = request.settings
    state.create()
    return Job(
        id=new_job_id(),
        script=request.script.name,
        arguments=request.arguments,
        nodes=settings["HETDEPLOY_NODES"].value,
        nproc_per_node=settings.nproc_per_node,
        backend=settings.backend,
        link=settings.link,
        head_address=address,
        link_port=settings.port,
        store_port=settings.store_port,
        join_timeout=settings.join_timeout,
        exit_timeout=settings.exit_timeout,
        torch=installed_torch() if request.native else settings.torch_version,
        bundle=bundle.collect(request.script, state.files),
        runtime="native" if request.native else "compose",
        crew=settings.crew,
    )


def _runtime(job: Job, settings: Settings, state: StateFolder) -> Runtime:
    if job.runtime == "native":
        return NativeRuntime(state, settings.runs_dir, job)
    return ComposeRuntime(state, job)


def _running(job: Job, runtime: Runtime, settings: Settings, state: StateFolder) -> Started | None:
    """The running job of this folder, when it is the very one that is asked for."""
    started = current(settings)
    if started is None or not started.runtime.is_running():
        return None
    if started.job.same_work(job):
        return started
    raise UsageError(
        f"another job is up in this folder: {started.job.command} ({started.job.id})", "end it with `hetdeploy down`"
    )


def _issue_codes(job: Job, settings: Settings, state: StateFolder) -> str:
    """Make fresh credentials; leave the head's own ticket in its file and return the code for joiners."""
    credentials = Credentials.create(state.link, ttl_seconds=settings.code_ttl)
    inside = job.runtime == "compose" and job.link == "tunnel"
    host, port = ("rendezvous", CONTAINER_LINK_PORT) if inside else (job.head_address, job.link_port)
    state.member_code.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(state.member_code, credentials.invitation("head", host, port).encode().encode())
    return credentials.invitation("joiner", job.head_address, job.link_port).encode()


def _container_user(job: Job) -> tuple[int, int]:
    """Who the containers run as: the caller, but never the machine's root."""
    if job.runtime == "compose" and "name=rootless" in engine.engine_info(os.environ).get("SecurityOptions", ()):
        # Root inside is the caller outside, and any other user inside is nobody's.
        return 0, 0
    return os.getuid() or CONTAINER_USER, os.getgid() or CONTAINER_USER


def _give_to_container_user(*folders: Path) -> None:
    """Let the containers' user read and write what root has made for it."""
    if os.getuid() != 0:
        return
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, CONTAINER_USER, CONTAINER_USER, follow_symlinks=False)
