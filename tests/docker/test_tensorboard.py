"""`hetdeploy up --tensorboard`: a run's events in a browser of the head, and nowhere else."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, run

from hetdeploy.errors import PreflightError
from hetdeploy.network import interfaces
from hetdeploy.network.probe import free_port
from hetdeploy.nodes.containers import Images
from hetdeploy.nodes.job import StateFolder
from hetdeploy.nodes.native import NativeRuntime
from hetdeploy.nodes.rendezvous import answers, initialise
from hetdeploy.nodes.stages import Stage

pytestmark = pytest.mark.timeout(900)

SHOWN_WITHIN = 30.0
"""TensorBoard looks for new events every 5 s."""
TRAIN = ("train_gpt.py", "--sync", "allreduce", "--steps", "3")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A folder with a script that writes metrics of three steps. Nothing runs there afterwards."""
    shutil.copy(SCRIPTS / "train_gpt.py", tmp_path)
    yield tmp_path
    run("down", cwd=tmp_path)


def start(folder: Path, *flags: str) -> tuple[int, int, str]:
    """Port of TensorBoard, exit code and output of `up`."""
    port = free_port()
    environ = {"HETDEPLOY_TENSORBOARD_PORT": str(port)}
    ports = ("--nic", "lo", "--nodes", "1", "--port", str(free_port()), "--store-port", str(free_port()))
    return port, *run("up", "--tensorboard", "--accelerator", "cpu", *flags, *ports, *TRAIN, cwd=folder, env=environ)


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return json.load(response)


def wait_for_losses(port: int) -> list[float]:
    """The losses that the one run's page would draw, once all three are there."""
    deadline = time.monotonic() + SHOWN_WITHIN
    while time.monotonic() < deadline:
        runs = get(port, "/data/runs")
        if runs and "loss" in get(port, "/data/plugin/scalars/tags")[runs[0]]:
            losses = get(port, f"/data/plugin/scalars/scalars?run={runs[0]}&tag=loss")
            if len(losses) == 3:
                assert runs[0].endswith("/metrics/rank0")
                return [loss for _, _, loss in losses]
        time.sleep(0.2)
    raise AssertionError(f"no losses within {SHOWN_WITHIN} s: {get(port, '/data/runs')}")


def wait_for_metrics(folder: Path) -> list[float]:
    """The losses that the job has written."""
    deadline = time.monotonic() + SHOWN_WITHIN
    while time.monotonic() < deadline:
        for file in (folder / ".hetdeploy" / "runs").rglob("metrics-rank0.jsonl"):
            lines = file.read_text().splitlines()
            if len(lines) == 3:
                return [json.loads(line)["loss"] for line in lines]
        time.sleep(0.2)
    raise AssertionError(f"no metrics within {SHOWN_WITHIN} s")


def addresses_of_this_machine() -> set[str]:
    return {str(ip.ip) for nic in interfaces.read() for ip in nic.ipv4} - {"127.0.0.1"}


@pytest.mark.docker
def test_the_head_serves_the_events_of_its_runs_to_itself_alone(job: Path, images_with_tensorboard: Images) -> None:
    port, code, text = start(job, "--detach")
    assert code == 0, text
    assert f"tensorboard http://127.0.0.1:{port} (" in text
    assert wait_for_losses(port) == pytest.approx(wait_for_metrics(job))
    others = addresses_of_this_machine()
    assert others, "this machine has no other address to try"
    assert not [address for address in others if answers((address, port))]
    assert run("down", cwd=job)[0] == 0
    assert not answers(("127.0.0.1", port))


@pytest.mark.docker
def test_it_goes_with_the_job_that_up_is_attached_to(job: Path, images_with_tensorboard: Images) -> None:
    port, code, text = start(job)
    assert code == 0, text
    assert "finished" in text
    assert not answers(("127.0.0.1", port))
    assert run("down", cwd=job)[1].endswith("it was down already\n")


def test_a_native_head_serves_them_too(job: Path) -> None:
    port, code, text = start(job, "--native", "--detach")
    assert code == 0, text
    assert wait_for_losses(port) == pytest.approx(wait_for_metrics(job))
    assert not [address for address in addresses_of_this_machine() if answers((address, port))]
    assert run("down", cwd=job)[0] == 0
    assert not answers(("127.0.0.1", port))


def test_a_port_that_is_taken_is_named_before_anything_starts(job: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = (
            "--native",
            "--nic",
            "lo",
            "--nodes",
            "1",
            "--port",
            str(free_port()),
            "--store-port",
            str(free_port()),
        )
        environ = {"HETDEPLOY_TENSORBOARD_PORT": str(port)}
        code, text = run("up", "--tensorboard", *flags, *TRAIN, cwd=job, env=environ)
    assert code == 3
    assert f"port {port} of 127.0.0.1 is taken" in text
    assert "set HETDEPLOY_TENSORBOARD_PORT" in text
    assert not (job / ".hetdeploy" / "processes.json").exists()


def test_a_native_head_without_tensorboard_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    state = StateFolder(tmp_path)
    state.create()
    initialise(state.path, str(shutil.copy(SCRIPTS / "train_gpt.py", tmp_path)), [], 29500)
    job = state.load_job()
    assert job is not None
    with pytest.raises(PreflightError, match=r"TensorBoard is not installed here: pip install 'hetdeploy\[metrics\]'"):
        NativeRuntime(state, tmp_path / "runs", job).start_tensorboard(Stage("tensorboard", print))
