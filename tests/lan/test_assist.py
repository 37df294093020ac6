"""The leader in a container, its helper on another host: through the link and the bridge, and as exact as alone."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, Command, join_code
from two_hosts import clean_environment, two_hosts

from hetdeploy.train import read_metrics

pytestmark = [pytest.mark.lan, pytest.mark.docker, pytest.mark.usefixtures("images")]

STEPS = 100
COMMON = "--sync assist --micro-batch 4 --data text.txt --device cpu --out out.json --metrics metrics"
ONE_THREAD = {"HETDEPLOY_OMP_NUM_THREADS": "1"}  # both hosts are one machine: neither may take all of its cores


def test_a_helper_on_another_host_computes_part_of_each_step(tmp_path: Path) -> None:
    job = tmp_path / "head"
    job.mkdir()
    shutil.copy(SCRIPTS / "train_gpt.py", job)
    shutil.copy(argparse.__file__, job / "text.txt")  # the same bytes on both, which have different Pythons
    script = ("train_gpt.py", *COMMON.split(), "--steps", str(STEPS), "--batch-size")
    with two_hosts() as hosts, Command("up", "--nic", hosts.head_nic, *script, "32", cwd=job, env=ONE_THREAD) as up:
        code = join_code(up)
        with Command("join", code, cwd=tmp_path / "joiner", host=hosts, env=ONE_THREAD) as join:
            assert join.wait(180) == 0, join.text
        assert up.wait() == 0, up.text

    assert re.search(rf"head rank 0 \| step {STEPS} loss", up.text)
    assert re.search(r"mac rank 1 \| step \d+ loss \d+\.\d+ samples/s", up.text)
    records = read_metrics(found(job, "metrics-rank0.jsonl"))
    helped = [record["samples"] < record["global_samples"] for record in records]
    assert len(helped) == STEPS
    assert sum(helped) > STEPS / 10, up.text

    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *script, "64"], cwd=job, env=environment, check=True, timeout=180)
    expected = [loss for _, loss in json.loads((job / "out.json").read_text())["curves"][0]]
    assert [record["loss"] for record in records] == pytest.approx(expected, abs=1e-3)


def found(job: Path, name: str) -> Path:
    """The one file of that name in the head's runs."""
    (path,) = (job / ".hetdeploy" / "runs").rglob(name)
    return path
