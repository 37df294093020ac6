"""The head without containers: the same programs as plain processes of this machine.

For machines without a Docker engine. Both listen on loopback, the link's port apart, and a joiner can reach no port but
those that the job's own ranks have opened.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetdeploy import envfile
from hetdeploy.errors import PreflightError
from hetdeploy.files import write_atomic
from hetdeploy.nodes.job import Job, RunFolder, StateFolder
from hetdeploy.nodes.member import LOOPBACK
from hetdeploy.nodes.rendezvous import answers
from hetdeploy.nodes.runtime import RANK, RENDEZVOUS, TENSORBOARD
from hetdeploy.nodes.stages import Stage
from hetdeploy.settings import scrubbed

HEALTHY_SECONDS = 60.0
END_SECONDS = 20.0


@dataclass(frozen=True)
class NativeCommand:
    """One process of the head as data."""

    service: str
    arguments: tuple[str, ...]


def native_commands(state: StateFolder, runs: Path, job: Job) -> tuple[NativeCommand, NativeCommand]:
    """The rendezvous and the rank of ``job``."""
    is_direct = job.link == "direct"
    inner = job.head_address if is_direct else LOOPBACK
    python = (sys.executable, "-m")
    rendezvous = (
        *(*python, "hetdeploy.nodes.rendezvous", f"--listen={job.head_address}:{job.link_port}"),
        *(f"--store={inner}:{job.store_port}", f"--state={state.path}", f"--runs={runs}", "--own-ports-only"),
    )
    rank = (
        *(*python, "hetdeploy.nodes.member", f"--code-file={state.member_code}", f"--runs={runs}"),
        *(f"--store={inner}", f"--address={inner}"),
    )
    return NativeCommand(RENDEZVOUS, rendezvous), NativeCommand(RANK, rank)


def tensorboard_command(runs: Path, port: int) -> NativeCommand:
    """As in images/Dockerfile, for this machine alone."""
    listen = (f"--logdir={runs}", f"--host={LOOPBACK}", f"--port={port}", "--load_fast=false")
    return NativeCommand(TENSORBOARD, (sys.executable, "-m", "tensorboard.main", *listen))


class NativeRuntime:
    """Runs the head's programs as processes in sessions of their own, found again by ``processes.json``."""

    name = "native"

    def __init__(self, state: StateFolder, runs: Path, job: Job) -> None:
        self._state = state
        self._runs = runs
        self._run = RunFolder(runs, job.id)
        self._rendezvous, self._rank = native_commands(state, runs, job)
        inner = job.head_address if job.link == "direct" else LOOPBACK
        self._addresses = ((job.head_address, job.link_port), (inner, job.store_port))
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self, stage: Stage) -> None:
        stage.done(f"none needed: native processes of {sys.executable}")

    def start_rendezvous(self, stage: Stage) -> None:
        self._start(self._rendezvous)
        self._wait_for_answer(RENDEZVOUS, self._addresses, stage)

    def start_rank(self) -> None:
        self._start(self._rank)

    def start_tensorboard(self, stage: Stage) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise PreflightError("TensorBoard is not installed here", "pip install 'hetdeploy[metrics]'")
        port = int(envfile.read(self._state.head_env)["HETDEPLOY_TENSORBOARD_PORT"].value)
        self._start(tensorboard_command(self._runs, port))
        self._wait_for_answer(TENSORBOARD, ((LOOPBACK, port),), stage)

    def ended(self) -> dict[str, int]:
        codes = {service: child.poll() for service, child in self._children.items() if service != TENSORBOARD}
        if self._children:
            return {service: code for service, code in codes.items() if code is not None}
        return {} if self.is_running() else {RENDEZVOUS: 0}

    def is_running(self) -> bool:
        return any(service == RENDEZVOUS for service, _ in _alive(self._state))

    def last_lines(self, service: str) -> list[str]:
        path = self._log(service)
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:] if path.exists() else []

    def interrupt(self) -> None:
        for service, process in _alive(self._state):
            if service == RENDEZVOUS:
                process.terminate()

    def remove(self) -> bool:
        found = remove_processes(self._state)
        for child in self._children.values():
            child.wait(timeout=END_SECONDS)
        return found

    def _wait_for_answer(self, service: str, addresses: tuple[tuple[str, int], ...], stage: Stage) -> None:
        while True:
            if self._children[service].poll() is not None:
                raise PreflightError(f"{service} ended at once", " / ".join(self.last_lines(service)[-3:]))
            if all(answers(address) for address in addresses):
                return
            if stage.seconds > HEALTHY_SECONDS:
                raise PreflightError(
                    f"{service} does not answer after {HEALTHY_SECONDS:.0f} s", f"see {self._log(service)}"
                )
            stage.waiting(f"{service} to answer")
            time.sleep(0.1)

    def _start(self, command: NativeCommand) -> None:
        self._run.path.mkdir(parents=True, exist_ok=True)
        env = {
            **scrubbed(os.environ),
            **{key: entry.value for key, entry in envfile.read(self._state.head_env).items()},
        }
        with self._log(command.service).open("ab") as log:
            child = subprocess.Popen(
                command.arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self._children[command.service] = child
        started = {service: [c.pid, psutil.Process(c.pid).create_time()] for service, c in self._children.items()}
        write_atomic(self._state.processes, json.dumps(started).encode())

    def _log(self, service: str) -> Path:
        return self._run.path / f"{service}.log"


def remove_processes(state: StateFolder) -> bool:
    """End the native head of ``state``. Returns whether one ran."""
    alive = [process for _, process in _alive(state)]
    tree = [child for process in alive for child in process.children(recursive=True)]
    for process in alive:
        process.terminate()
    _, stubborn = psutil.wait_procs([*alive, *tree], timeout=END_SECONDS)
    for process in stubborn:
        process.kill()
    state.processes.unlink(missing_ok=True)
    return bool(alive)


def _alive(state: StateFolder) -> list[tuple[str, psutil.Process]]:
    """The processes of ``processes.json`` that still are what they were: a process id alone may be somebody else's."""
    if not state.processes.exists():
        return []
    found = []
    for service, (pid, created) in json.loads(state.processes.read_text(encoding="utf-8")).items():
        try:
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                found.append((service, process))
        except psutil.NoSuchProcess:
            continue
    return found
