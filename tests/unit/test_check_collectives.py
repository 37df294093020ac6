"""scripts/check_collectives.py: it passes on real ranks, and finds wrong answers and dead ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_collectives.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DEADLINE = 120  # seconds for one run of the script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_collectives", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    plain = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(
        command, env=os.environ | plain | environ, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def test_two_ranks_pass_every_check() -> None:
    done = run([*TORCHRUN, "2", str(SCRIPT), "--max-mb", "1"])

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        passed = [line for line in lines if line.startswith(f"rank {rank}: ok ")]
        assert f"rank {rank}: all {len(passed)} checks passed" in lines
        assert len(passed) > 40
    assert "WRONG" not in done.stdout


def test_one_process_needs_no_launcher() -> None:
    done = run([sys.executable, str(SCRIPT), "--max-mb", "0.1"])

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("checks passed")


def test_a_broken_rank_fails_the_job() -> None:
    done = run([*TORCHRUN, "2", str(SCRIPT), "--max-mb", "0.1"], BREAK_RANK="1")

    assert done.returncode != 0
    assert "rank 1: BREAK_RANK=1: exit 3" in done.stdout
    # Whose end torchrun notices first is a matter of luck.
    assert re.search(r"exitcode *: [13] ", done.stderr), done.stderr
    assert "checks passed" not in done.stdout


def test_a_wrong_sum_fails_the_run_and_is_named_first(tmp_path: Path) -> None:
    """The real script over an all_reduce that adds one to element 2 of float32 tensors of three elements."""
    wrapper = tmp_path / "wrong_sum.py"
    wrapper.write_text(
        "import runpy, sys\n"
        "import torch, torch.distributed as dist\n"
        "right = dist.all_reduce\n"
        "def wrong(tensor, *args, **kwargs):\n"
        "    work = right(tensor, *args, **kwargs)\n"
        "    if tensor.dtype == torch.float32 and tensor.numel() == 3:\n"
        "        tensor[2] += 1\n"
        "    return work\n"
        "dist.all_reduce = wrong\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run([sys.executable, str(wrapper), str(SCRIPT), "--max-mb", "0.1"])

    assert done.returncode == 1
    difference = "all_reduce float32 x 3: element 2 of 3: got 3.0, expected 2.0"
    assert f"rank 0: WRONG {difference}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"rank 0: first wrong answer: {difference}"


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        (torch.ones(2), torch.ones(2), ""),
        (torch.ones(2), torch.ones(3), "got torch.float32 (2,), expected torch.float32 (3,)"),
        (torch.ones(2), torch.ones(2).int(), "got torch.float32 (2,), expected torch.int32 (2,)"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "element 1 of 2: got nan, expected 1.0"),
    ],
)
def test_first_difference(script: ModuleType, got: torch.Tensor, expected: torch.Tensor, difference: str) -> None:
    assert script.first_difference(got, expected) == difference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float32])
def test_known_answers_are_exact(script: ModuleType, dtype: torch.dtype) -> None:
    """The sum of eight ranks' patterns fits the dtype without rounding, or a right answer would look wrong."""
    world, count = 8, 2000
    exact = sum(script.pattern(count, rank, dtype).long() for rank in range(world))
    assert torch.equal(script.pattern_sum(count, world, dtype).long(), exact)
    assert not torch.equal(script.pattern(count, 0, dtype), script.pattern(count, 1, dtype))
