"""What a user is told, and what is left behind, when a job goes wrong. Head and joiner are native, on loopback."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from harness import Command, join_code, write_script

from hetdeploy.link.invitation import Invitation
from hetdeploy.network.probe import free_port

MEET = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
print("met", flush=True)
"""

FOREVER = MEET + "while True: dist.all_reduce(torch.ones(1)); time.sleep(0.05)\n"


@pytest.fixture
def ports() -> tuple[str, ...]:
    """Flags for a native head on loopback, on ports that are free."""
    return ("--native", "--nic", "lo", "--port", str(free_port()), "--store-port", str(free_port()))


def leftovers(folder: Path) -> list[str]:
    """Processes that still know the folder of a test."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if (
            str(folder) in line
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and process.pid != psutil.Process().pid
        ):
            found.append(line)
    return found


def test_the_rank_that_raised_is_shown_first(ports: tuple[str, ...], tmp_path: Path) -> None:
    text = MEET + "if rank == 1: raise ValueError('the data of this machine is gone')\ndist.all_reduce(torch.ones(1))\n"
    script = write_script(tmp_path / "head with spaces", text)
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            assert join.wait() == 1, join.text
        assert up.wait() == 1, up.text
    for told in (up.text, join.text):
        summary = told[told.index("failed first:") :]
        assert re.match(r"failed first: rank 1 on \S+ exited with code 1", summary), summary
        assert "ValueError: the data of this machine is gone" in summary
    assert not leftovers(tmp_path)


def test_a_script_that_exits_with_a_code_of_its_own(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", MEET + "if rank == 0: sys.exit(7)\ndist.all_reduce(torch.ones(1))\n")
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            assert join.wait() == 7, join.text
        assert up.wait() == 7, up.text
    assert "failed first: rank 0 on head exited with code 7" in up.text


def test_one_rank_ends_and_the_other_hangs(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", MEET + "if rank == 0:\n    while True: time.sleep(1)\n")
    env = {"HETDEPLOY_EXIT_TIMEOUT": "3"}
    with Command("up", *ports, script.name, cwd=script.parent, env=env) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            assert join.wait() == 1, join.text
        assert up.wait() == 1, up.text
    assert re.search(r"finished, and the others did not within the exit timeout \(3 s\): head", up.text)
    assert not leftovers(tmp_path)


def test_tensors_of_different_size_are_explained(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", MEET + "dist.all_reduce(torch.ones(1000 + rank))\n")
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            assert join.wait() != 0, join.text
        assert up.wait() != 0, up.text
    # Who notices first is a matter of luck: the bridge a payload that is too long, gloo one that is too short.
    by_bridge = r"failed first: the bridge on \S+: pair rank 1 .* different collectives, or with tensors of"
    by_gloo = r"failed first: rank \d .*\(two ranks called a collective with tensors of different size or dtype\)"
    assert re.search(f"{by_bridge}|{by_gloo}", up.text), up.text


@pytest.mark.parametrize("side", ["head", "joiner"])
def test_ctrl_c_stops_both_and_leaves_nothing(side: str, ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", FOREVER)
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            up.wait_for(r"rank 0 \| met")
            (up if side == "head" else join).send(signal.SIGINT)
            assert join.wait() == 130, join.text
        assert up.wait() == 130, up.text
    assert ("stopped at the head" if side == "head" else "left: interrupted") in up.text
    assert not leftovers(tmp_path)


def test_ctrl_c_before_anybody_joined(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", FOREVER)
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        join_code(up)
        up.send(signal.SIGINT)
        assert up.wait() == 130, up.text
    assert not leftovers(tmp_path)


def test_ctrl_c_while_waiting_for_a_head(tmp_path: Path) -> None:
    code = Invitation("127.0.0.1", free_port(), bytes(16), bytes(16), 0).encode()
    with Command("join", code, cwd=tmp_path / "joiner") as join:
        join.wait_for(r"waiting for the head: cannot reach 127\.0\.0\.1:\d+ .*ECONNREFUSED")
        join.send(signal.SIGINT)
        assert join.wait() == 130, join.text
    assert "Traceback" not in join.text
    assert not leftovers(tmp_path)


def test_a_killed_joiner_is_named(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", FOREVER)
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            up.wait_for(r"rank 0 \| met")
            join.send(signal.SIGKILL)
            join.wait()
        assert up.wait() == 4, up.text
    assert re.search(r"failed first: \S+ is gone", up.text)
    assert not leftovers(tmp_path)


def test_a_sleeping_joiner_is_noticed(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", FOREVER)
    with (
        Command("up", *ports, script.name, cwd=script.parent) as up,
        Command("join", join_code(up), cwd=tmp_path / "joiner") as join,
    ):
        up.wait_for(r"rank 0 \| met")
        join.send(signal.SIGSTOP)
        try:
            assert up.wait() == 4, up.text
        finally:
            join.send(signal.SIGCONT)
        assert join.wait() == 4, join.text
    assert re.search(r"failed first: \S+ is gone: no heartbeat", up.text)
    assert re.search(r"error: the (link to the )?head at 127\.0\.0\.1", join.text)
    assert not leftovers(tmp_path)


def test_a_killed_head_ends_the_joiner(ports: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", FOREVER)
    with Command("up", *ports, script.name, cwd=script.parent) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            up.wait_for(r"rank 0 \| met")
            for process in psutil.process_iter(["cmdline"]):
                line = " ".join(process.info["cmdline"] or [])
                if "hetdeploy.nodes.rendezvous" in line and str(tmp_path) in line:
                    process.kill()
            assert join.wait() == 4, join.text
        assert up.wait() == 1, up.text
    assert re.search(r"error: the (link to the )?head at 127\.0\.0\.1", join.text)
    assert "error: the rendezvous ended without telling how the job did" in up.text
    assert not leftovers(tmp_path)
