"""What tests of more than one folder share: markers that ask for a machine's abilities, and the images."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetdeploy import envfile, settings
from hetdeploy.nodes import compose, containers
from hetdeploy.preflight import docker as docker_checks
from hetdeploy.preflight import facts, report

IS_LAB = os.environ.get("HETDEPLOY_LAB") == "1"
"""On a prepared machine, what is missing is a failure and no reason to skip."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell may decide over a test."""
    for name in list(os.environ):
        if name in settings.KEYS or name in settings.inherited(os.environ):
            monkeypatch.delenv(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in (("docker", missing_for_docker), ("lan", missing_for_lan)):
        if item.get_closest_marker(marker) and (reason := missing()):
            if IS_LAB:
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    is_asked_for = item.get_closest_marker("docker") or item.get_closest_marker("lan")
    if IS_LAB and is_asked_for and outcome.skipped and not hasattr(outcome, "wasxfail"):
        outcome.outcome = "failed"
    return outcome


@functools.cache
def missing_for_docker() -> str | None:
    """Why containers cannot be tested here, or None."""
    found = facts.read_docker(os.environ, "cpu")
    checks: tuple[report.Check, ...] = (
        docker_checks.DockerCommand(),
        docker_checks.ComposePlugin(),
        docker_checks.EngineAnswers(),
    )
    asked = facts.Facts(accelerator="cpu", link="tunnel", torch_version="", torch_index="", docker=found)
    failures = report.run_all(checks, asked).failures
    return str(failures[0]) if failures else None


@functools.cache
def missing_for_lan() -> str | None:
    """Why two hosts on one machine cannot be had here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"there is no `{program}` (`scripts/lab` installs it)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"this machine allows no network namespaces ({probe.stderr.strip()})" if probe.returncode else None


@pytest.fixture(scope="session")
def compose_values() -> dict[str, str]:
    """Every key that compose.yaml reads but those of the images, for a project that is built or looked at only."""
    default = settings.load({}, {}, Path())
    return {
        "HETDEPLOY_JOB": "test",
        "HETDEPLOY_UID": "1000",
        "HETDEPLOY_GID": "1000",
        "HETDEPLOY_ADDRESS": "127.0.0.1",
        "HETDEPLOY_PORT": str(default.port),
        "HETDEPLOY_STORE_PORT": str(default.store_port),
        "HETDEPLOY_STATE": "/nowhere",
        "HETDEPLOY_RUNS": "/nowhere",
        "HETDEPLOY_ACCELERATOR": "cpu",
        "HETDEPLOY_NPROC_PER_NODE": "1",
        "HETDEPLOY_SHM_SIZE": default.shm_size,
        "HETDEPLOY_TENSORBOARD_PORT": str(default.tensorboard_port),
        "HETDEPLOY_TORCH_VERSION": default.torch_version,
        "HETDEPLOY_TORCH_INDEX": default.torch_index("cpu"),
    }


@pytest.fixture(scope="session")
def images(compose_values: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> containers.Images:
    """The CPU images that `up` would use, built if need be."""
    return _build(compose_values, tmp_path_factory.mktemp("images"), tensorboard=False)


@pytest.fixture(scope="session")
def images_with_tensorboard(
    compose_values: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> containers.Images:
    """Those of `up --tensorboard`."""
    return _build(compose_values, tmp_path_factory.mktemp("images"), tensorboard=True)


def _build(compose_values: dict[str, str], folder: Path, *, tensorboard: bool) -> containers.Images:
    version, index = compose_values["HETDEPLOY_TORCH_VERSION"], compose_values["HETDEPLOY_TORCH_INDEX"]
    planned = containers.plan_images("cpu", version, index, tensorboard=tensorboard)
    env_file = folder / "head.env"
    envfile.write(env_file, {**compose_values, **compose.image_environment(planned, folder / "context")}, "a test")
    project = containers.plan_project(folder, env_file, planned, accelerator="cpu", link="tunnel", has_data=False)
    with containers.Containers(project) as docker:
        if not docker.has_images():
            docker.build(folder / "context", "cpu", folder / "build.log", lambda _: None)
    return planned
