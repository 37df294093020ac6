"""What is read of the real machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hetdeploy import settings
from hetdeploy.network.probe import free_port
from hetdeploy.preflight import disk, facts, head, joiner

LOOPBACK = "127.0.0.1"


def load(**values: str) -> settings.Settings:
    flags = {f"HETDEPLOY_{key}": value for key, value in values.items()}
    return settings.load(flags, {}, Path("/nonexistent"))


def test_a_taken_port_is_reported_with_the_process_that_holds_it() -> None:
    with socket.create_server((LOOPBACK, 0)) as holder:
        port = holder.getsockname()[1]
        report = head.check(load(PORT=str(port)), accelerator="cpu", address=LOOPBACK, native=True)
    (failure,) = [result for result in report.failures if result.name == "port"]
    assert f"port {port} of {LOOPBACK} is taken by" in failure.text
    assert f"process {os.getpid()}" in failure.text


def test_direct_mode_needs_the_stores_port_as_well() -> None:
    with socket.create_server((LOOPBACK, 0)) as holder:
        port = str(holder.getsockname()[1])
        direct = load(LINK="direct", PORT=str(free_port()), STORE_PORT=port)
        tunnel = load(LINK="tunnel", PORT=str(free_port()), STORE_PORT=port)
        in_direct = facts.read_head(direct, "cpu", LOOPBACK, native=False)
        in_tunnel = facts.read_head(tunnel, "cpu", LOOPBACK, native=False)
    assert ["HETDEPLOY_STORE_PORT" in str(problem.fix) for problem in in_direct.port_problems] == [True]
    assert in_tunnel.port_problems == ()


def test_this_environment_can_run_a_joiner() -> None:
    joiner.check(load(), accelerator="cpu").raise_failures()


def test_without_programs_nothing_is_found_and_nothing_raises(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/none"}
    found = facts.read_docker(nowhere, "cpu")
    assert (found.command, found.compose) == (None, None)
    assert found.problem is not None
    assert facts.read_nvidia(nowhere) is None


def test_room_on_the_disk_is_compared_with_what_a_build_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(disk.IMAGE_BYTES, "cpu", 1)
    assert disk.shortage(tmp_path, "cpu") is None
    monkeypatch.setitem(disk.IMAGE_BYTES, "cpu", 10**18)
    assert "free, building the cpu image takes 1000000000 GB" in str(disk.shortage(tmp_path, "cpu"))
    # An engine in a virtual machine, as on macOS, names a folder that this machine does not have.
    assert disk.shortage(tmp_path / "inside" / "a" / "virtual machine", "cpu") is None
