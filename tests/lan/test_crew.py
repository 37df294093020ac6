"""`up --crew`: a leader that trains on while its helpers come, are killed, leave and come back."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_mac import NODE_NAME, fake_mac
from harness import SCRIPTS, Command, join_code, run
from two_hosts import clean_environment, two_hosts

from hetdeploy.network.probe import free_port
from hetdeploy.train import read_metrics

pytestmark = pytest.mark.lan

GOES_ON_WITHIN = 2.0
ARGUMENTS = (
    "--sync assist --batch-size 32 --micro-batch 4 --data text.txt --device cpu --out out.json --metrics metrics"
)

UNTIL_TOLD = """
# train_gpt.py with a slow device, for as many steps as the test wants: until there is a file called enough.
import time
from pathlib import Path
import train_gpt
from hetdeploy.train import Assist

draw_batch, steps = train_gpt.draw_batch, Assist.steps

def draw_slowly(*arguments):
    time.sleep(0.04)
    return draw_batch(*arguments)

def steps_until_told(assist, total, start=0):
    for step in steps(assist, total, start):
        yield step
        if assist.leads and step.record.samples < step.record.global_samples:
            print("shared step", step.number + 1, flush=True)
        if Path("enough").exists():
            return

train_gpt.draw_batch, Assist.steps = draw_slowly, steps_until_told
train_gpt.main()
"""


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The head's folder, with the script until_told.py."""
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(SCRIPTS / "train_gpt.py", folder)
    shutil.copy(argparse.__file__, folder / "text.txt")  # the same bytes on both, which may have different Pythons
    (folder / "until_told.py").write_text(UNTIL_TOLD)
    return folder


def native(nic: str) -> tuple[str, ...]:
    return ("up", "--crew", "--native", "--nic", nic, "--port", str(free_port()), "--store-port", str(free_port()))


TRAIN = ("until_told.py", *ARGUMENTS.split(), "--steps", "100000")


def test_a_helper_is_killed_and_another_one_comes(head: Path, tmp_path: Path) -> None:
    with Command(*native("lo"), *TRAIN, cwd=head) as up:
        code = join_code(up)
        up.wait_for(r"head rank 0 \| step 2 loss")  # nobody is there, and nobody is waited for
        with Command("join", code, cwd=tmp_path / "first") as join:
            up.wait_for("shared step")
            kill_tree(join.pid)
            killed_in = last_step(up)
            assert join.wait() == -signal.SIGKILL
        up.wait_for(r"is gone: .*; the job goes on without it")
        went_on = rf"head rank 0 \| step {killed_in + 3} loss"
        up.wait_for(went_on)
        with Command("join", code, cwd=tmp_path / "second") as join:
            up.wait_for(rf"{went_on} (?:.*\n)*.*shared step")
            tell(head)
            assert join.wait() == 0, join.text
        assert up.wait() == 0, up.text
    assert "the head finished, 2 joined on the way" in up.text

    records = read_metrics(found(head, "metrics-rank0.jsonl"))
    took = [record["compute_s"] + record["exchange_exposed_s"] + record["idle_s"] for record in records]
    assert max(took[killed_in - 1 : killed_in + 3]) < statistics.median(took) + GOES_ON_WITHIN
    assert [record["loss"] for record in records] == pytest.approx(losses_alone(head, len(records)), abs=1e-3)


@pytest.mark.docker
@pytest.mark.usefixtures("images")
def test_a_helper_of_a_leader_in_containers_leaves(head: Path, tmp_path: Path) -> None:
    with two_hosts() as hosts, Command("up", "--crew", "--nic", hosts.head_nic, *TRAIN, cwd=head) as up:
        with Command("join", join_code(up), cwd=tmp_path / "joiner", host=hosts) as join:
            up.wait_for("shared step")
            join.send(signal.SIGINT)
            assert join.wait() == 130, join.text
        assert "mac left: interrupted; the job goes on without it" in join.text
        up.wait_for("mac left: interrupted; the job goes on without it")
        assert re.search(r"mac +gone +cpu ", run("status", cwd=head)[1])
        up.wait_for(rf"head rank 0 \| step {last_step(up) + 3} loss")
        tell(head)
        assert up.wait() == 0, up.text


def test_a_leader_whom_nobody_joins(head: Path) -> None:
    script = ("train_gpt.py", *ARGUMENTS.split(), "--steps", "5")
    code, text = run(*native("lo"), *script, cwd=head)
    assert code == 0, text
    assert "head rank 0 | step 5 loss" in text
    assert "the head finished, alone" in text


def test_a_mac_helps(head: Path, tmp_path: Path) -> None:
    with (
        fake_mac(tmp_path / "mac", tmp_path / "home") as mac,
        Command(*native(mac.hosts.head_nic), *TRAIN, cwd=head) as up,
    ):
        with Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join:
            up.wait_for("shared step")
            tell(head)
            assert join.wait() == 0, join.text
        assert up.wait() == 0, up.text
    assert re.search(rf"{NODE_NAME} joined from \S+ darwin ", up.text)
    (rank,) = [event for event in mac.events() if event["what"] == "rank"]
    assert (rank["HETDEPLOY_DIALECT"], rank["GLOO_SOCKET_IFNAME"]) == ("uv", "lo0")


def kill_tree(pid: int) -> None:
    """As a machine that loses its power."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        process.kill()


def last_step(up: Command) -> int:
    return int(re.findall(r"head rank 0 \| step (\d+) loss", up.text)[-1])


def tell(head: Path) -> None:
    """The leader is to end with the step it is at."""
    found(head, "until_told.py").with_name("enough").touch()


def found(head: Path, name: str) -> Path:
    """The one file of that name in the head's runs."""
    (path,) = (head / ".hetdeploy" / "runs").rglob(name)
    return path


def losses_alone(head: Path, steps: int) -> list[float]:
    """Of the same steps in one process."""
    command = [sys.executable, "train_gpt.py", *ARGUMENTS.split(), "--steps", str(steps)]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=head, env=environment, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return [loss for _, loss in json.loads((head / "out.json").read_text())["curves"][0]]
