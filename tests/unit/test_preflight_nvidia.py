"""A GPU's way into a container, with an `nvidia-smi` that prints what real ones print."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetdeploy.preflight import facts
from hetdeploy.preflight.facts import DockerFacts, Facts, NvidiaFacts
from hetdeploy.preflight.head import CHECKS
from hetdeploy.preflight.nvidia import DEFAULT_CUDA, driver_cuda, image_cuda
from hetdeploy.preflight.report import Result, run_all

TABLE = """Mon Jan 12 09:14:31 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<18} Driver Version: {driver:<14} CUDA Version: {cuda:<9}|
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|   0  NVIDIA GeForce RTX 4090        Off |   00000000:01:00.0 Off |                  Off |
+-----------------------------------------------------------------------------------------+
"""
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA"
    " driver is installed and running.\n"
)

PLAIN_INFO = {
    "ServerVersion": "28.5.1",
    "ApiVersion": "1.51",
    "Endpoint": "unix:///var/run/docker.sock (the default)",
    "Runtimes": {"runc": {"path": "runc"}},
}
WITH_RUNTIME = {**PLAIN_INFO, "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": "nvidia-container-runtime"}}}
WITH_CDI = {**PLAIN_INFO, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}


def install(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def nvidia_smi(folder: Path, driver: str, cuda: str, capability: str = "8.9") -> dict[str, str]:
    """Put a fake `nvidia-smi` on the PATH of the environment that is returned."""
    (folder / "table").write_text(TABLE.format(driver=driver, cuda=cuda))
    install(folder, "nvidia-smi", f'case "$1" in --query-gpu=*) echo {capability} ;; *) cat {folder}/table ;; esac')
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def look(environ: dict[str, str], info: dict[str, Any] = WITH_RUNTIME, **changes: Any) -> dict[str, Result]:
    """The results of the checks that an NVIDIA card has to do with, by name."""
    found = Facts(
        accelerator="cuda",
        link="tunnel",
        torch_version="2.13.0",
        torch_index="",
        docker=DockerFacts("/usr/bin/docker", "2.40.0", info),
        nvidia=facts.read_nvidia(environ, Path("/nonexistent")),
        python=(3, 12),
    )
    results = run_all(CHECKS, replace(found, **changes)).results
    return {result.name: result for result in results if result.name in ("nvidia-driver", "nvidia-toolkit", "cuda")}


def test_card_driver_toolkit_and_engine_are_all_there(tmp_path: Path) -> None:
    found = look(nvidia_smi(tmp_path, "580.95.05", "13.0"))
    assert {name: result.status for name, result in found.items()} == {
        "nvidia-driver": "ok",
        "nvidia-toolkit": "ok",
        "cuda": "ok",
    }
    assert found["nvidia-driver"].text == "1 NVIDIA card, CUDA 13.0"


def test_no_nvidia_smi_is_the_only_thing_reported(tmp_path: Path) -> None:
    found = look({"PATH": str(tmp_path)})
    assert [(result.name, result.status) for result in found.values()] == [("nvidia-driver", "failure")]


@pytest.mark.parametrize(
    ("output", "fix"), [(MISMATCH, "reboot"), (NO_DRIVER, "ubuntu-drivers"), ("", "ubuntu-drivers")]
)
def test_a_driver_that_does_not_work_is_quoted(tmp_path: Path, output: str, fix: str) -> None:
    (tmp_path / "words").write_text(output)
    install(tmp_path, "nvidia-smi", f"cat {tmp_path}/words; exit 18")
    found = look({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert list(found) == ["nvidia-driver"]
    assert found["nvidia-driver"].status == "failure"
    assert (output.splitlines() or ["exit code 18"])[0] in found["nvidia-driver"].text
    assert fix in str(found["nvidia-driver"].fix)


def test_a_card_that_auto_passed_over_is_a_warning_and_one_not_wanted_is_none(tmp_path: Path) -> None:
    (tmp_path / "words").write_text(MISMATCH)
    install(tmp_path, "nvidia-smi", f"cat {tmp_path}/words; exit 18")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = look(environ, accelerator="cpu")
    assert found["nvidia-driver"].status == "warning"
    assert "will not be used" in found["nvidia-driver"].text
    assert look(environ, accelerator="cpu", is_accelerator_asked_for=True) == {}


def test_the_one_missing_step_is_the_toolkit(tmp_path: Path) -> None:
    toolkit = look(nvidia_smi(tmp_path, "580.95.05", "13.0"), PLAIN_INFO)["nvidia-toolkit"]
    assert toolkit.status == "failure"
    assert str(toolkit.fix).startswith("install nvidia-container-toolkit")


def test_the_one_missing_step_is_the_engines_runtime(tmp_path: Path) -> None:
    environ = nvidia_smi(tmp_path, "580.95.05", "13.0")
    install(tmp_path, "nvidia-ctk", "exit 0")
    toolkit = look(environ, PLAIN_INFO)["nvidia-toolkit"]
    assert toolkit.status == "failure"
    assert str(toolkit.fix).startswith("`sudo nvidia-ctk runtime configure --runtime=docker")


def test_devices_described_for_cdi_are_as_good_as_a_runtime(tmp_path: Path) -> None:
    assert look(nvidia_smi(tmp_path, "580.95.05", "13.0"), WITH_CDI)["nvidia-toolkit"].status == "ok"


@pytest.mark.parametrize(
    ("cuda", "index", "status"),
    [
        ("13.1", "", "ok"),
        ("12.8", "", "failure"),
        ("11.8", "", "failure"),
        ("12.4", "https://download.pytorch.org/whl/cu126", "ok"),
        ("11.8", "https://download.pytorch.org/whl/cu126", "failure"),
    ],
)
def test_the_drivers_cuda_has_to_be_of_the_images_major_release(
    tmp_path: Path, cuda: str, index: str, status: str
) -> None:
    found = look(nvidia_smi(tmp_path, "550.54", cuda), torch_index=index)["cuda"]
    assert found.status == status
    if status == "failure":
        assert f"takes CUDA {cuda}" in found.text
        assert "HETDEPLOY_TORCH_INDEX" in str(found.fix)


def test_a_card_that_cuda_13_has_dropped_is_told_before_gigabytes_are_fetched(tmp_path: Path) -> None:
    environ = nvidia_smi(tmp_path, "580.95.05", "13.0", capability="6.1")
    assert "compute capability 6.1" in look(environ)["cuda"].text
    assert look(environ, torch_index="https://download.pytorch.org/whl/cu126")["cuda"].status == "ok"


def test_an_index_that_does_not_tell_its_cuda_is_left_alone(tmp_path: Path) -> None:
    environ = nvidia_smi(tmp_path, "550.54", "12.4")
    assert "cuda" not in look(environ, torch_index="https://mirror.example/simple")


def test_cuda_versions_are_read_from_what_programs_and_names_say() -> None:
    assert driver_cuda(NvidiaFacts(TABLE.format(driver="535.183", cuda="12.2"), 0)) == (12, 2)
    assert driver_cuda(NvidiaFacts("| CUDA UMD Version: 13.1 |", 0)) == (13, 1)
    assert driver_cuda(NvidiaFacts(NO_DRIVER, 9)) is None
    assert image_cuda("2.13.0", "") == DEFAULT_CUDA
    assert image_cuda("2.13.0+cu128", "") == (12, 8)
    assert image_cuda("2.13.0", "https://download.pytorch.org/whl/cu126") == (12, 6)


def test_the_toolkits_setting_for_rootless_engines_is_read(tmp_path: Path) -> None:
    environ = nvidia_smi(tmp_path, "580.95.05", "13.0")
    settings = tmp_path / "config.toml"
    for line, expected in (("#no-cgroups = false", False), ("no-cgroups = false", False), ("no-cgroups = true", True)):
        settings.write_text(f"[nvidia-container-cli]\n{line}\n")
        read = facts.read_nvidia(environ, settings)
        assert read is not None
        assert read.no_cgroups is expected
