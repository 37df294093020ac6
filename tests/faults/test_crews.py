"""What becomes of a crew's other machines when one of them ends. Their scripts need no torch: each is a world alone."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from harness import Command, join_code, run, write_script

from hetdeploy.network.probe import free_port

SCRIPT = """
import os, sys, time
from pathlib import Path

role = os.environ["HETDEPLOY_CREW_ROLE"]
print(role, "is here", flush=True)
end = Path(role)
while not end.exists():
    time.sleep(0.05)
sys.exit(int(end.read_text()))
"""
"""Ends when there is a file with its code, named by its role."""


@pytest.fixture
def ports() -> tuple[str, ...]:
    return ("--crew", "--native", "--nic", "lo", "--port", str(free_port()), "--store-port", str(free_port()))


def end(machine: Path, role: str, code: int) -> None:
    (script,) = (machine / ".hetdeploy" / "runs").rglob("job.py")
    partial = script.with_name("partial")
    partial.write_text(str(code))
    partial.rename(script.with_name(role))


def test_a_helpers_failure_is_its_own_and_the_heads_is_everybodys(ports: tuple[str, ...], tmp_path: Path) -> None:
    write_script(tmp_path / "head", SCRIPT)
    with Command("up", *ports, "--link", "direct", "job.py", cwd=tmp_path / "head") as up:
        code = join_code(up)
        two = run("join", "--nproc-per-node", "2", code, cwd=tmp_path / "two")
        assert two[0] == 2
        assert re.search(r"^error: .*one rank on each machine, not 2: join with --nproc-per-node 1$", two[1], re.M)
        with Command("join", code, cwd=tmp_path / "first") as first:
            first.wait_for("helper is here")
            with Command("join", code, cwd=tmp_path / "second") as second:
                second.wait_for(r"waiting for the head: .* the job has its 2 nodes already")
                end(tmp_path / "first", "helper", 7)
                parted = r"rank 0 on \S+ exited with code 7; the job goes on without it"
                assert first.wait() == 7, first.text
                assert re.search(parted, first.text)
                up.wait_for(parted)
                second.wait_for("helper is here")
                assert re.search(parted, run("status", cwd=tmp_path / "head")[1])
                assert re.search(parted, run("logs", cwd=tmp_path / "head")[1])
                end(tmp_path / "head", "leader", 3)
                assert second.wait() == 3, second.text
        assert up.wait() == 3, up.text
    for told in (up.text, second.text):
        assert "failed first: rank 0 on head exited with code 3" in told


def test_ctrl_c_at_the_head_stops_all(ports: tuple[str, ...], tmp_path: Path) -> None:
    write_script(tmp_path / "head", SCRIPT)
    with Command("up", *ports, "job.py", cwd=tmp_path / "head") as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner") as join:
            join.wait_for("helper is here")
            up.send(signal.SIGINT)
            assert join.wait() == 130, join.text
        assert up.wait() == 130, up.text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--nproc-per-node", "2"), "has one rank on each machine"),
        (("--backend", "nccl", "--link", "direct"), "exchange in pairs over gloo"),
    ],
)
def test_what_a_crew_has_no_use_for(flags: tuple[str, ...], says: str, ports: tuple[str, ...], tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    code, text = run("up", *ports, *flags, "job.py", cwd=tmp_path)
    assert code == 2
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert says in error
