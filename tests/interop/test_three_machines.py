"""A head and two joiners: joiners meet each other over the head's link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import SCRIPTS, Command, join_code

from hetdeploy.network.probe import free_port

MAC = {"HETDEPLOY_DIALECT": "uv", "HETDEPLOY_SOCKADDR": "darwin", "HETDEPLOY_FACE": "uv"}
"""Makes the ranks of a joiner look like a Mac's to their bridge."""


@pytest.mark.parametrize(
    ("first", "second"), [({}, {}), ({}, MAC), (MAC, MAC)], ids=["linux-linux", "linux-mac", "mac-mac"]
)
def test_every_collective_among_three(first: dict[str, str], second: dict[str, str], tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--store-port", str(free_port()))
    script = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "1")
    with Command("up", "--native", "--nic", "lo", "--nodes", "3", *ports, *script, cwd=tmp_path / "head") as up:
        code = join_code(up)
        with (
            Command("join", code, cwd=tmp_path / "one", env=first) as one,
            Command("join", code, cwd=tmp_path / "two", env=second) as two,
        ):
            assert one.wait(180) == 0, one.text
            assert two.wait(30) == 0, two.text
        assert up.wait() == 0, up.text
    assert len(set(re.findall(r"rank (\d): all \d+ checks passed", up.text))) == 3


def test_two_ranks_on_each_machine(tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--store-port", str(free_port()))
    script = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "1")
    flags = ("--native", "--nic", "lo", "--nproc-per-node", "2", *ports)
    with Command("up", *flags, *script, cwd=tmp_path / "head") as up:
        code = join_code(up)
        with Command("join", "--nproc-per-node", "2", code, cwd=tmp_path / "one", env=MAC) as join:
            assert join.wait(180) == 0, join.text
        assert up.wait() == 0, up.text
    assert len(set(re.findall(r"rank (\d): all \d+ checks passed", up.text))) == 4
    assert "head rank 1 |" in up.text
