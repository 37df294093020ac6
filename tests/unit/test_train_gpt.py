"""scripts/train_gpt.py: it learns, its ranks train as one process would, and ranks that disagree stop at once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_gpt.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DEADLINE = 120  # seconds for one run of the script
PROGRESS = re.compile(r"^step (\d+) loss (\d+\.\d+) samples/s (\d+\.\d+)$", re.MULTILINE)

# Starts the script with arguments of its own on each rank, as machines that were started by hand would.
BY_RANK = "import os, runpy, sys; sys.argv[2:] = os.environ['ARGS_' + os.environ['RANK']].split(); del sys.argv[0]; \
runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    plain = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(
        command, env=os.environ | plain | environ, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def run_ranks(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks, each with its own arguments."""
    starter = folder / "by_rank.py"
    starter.write_text(BY_RANK)
    by_rank = {f"ARGS_{rank}": text for rank, text in enumerate(arguments)}
    return run([*TORCHRUN, str(starter), str(SCRIPT)], **by_rank)


def losses(path: Path) -> list[list[float]]:
    return [[loss for _, loss in curve] for curve in json.loads(path.read_text())["curves"]]


def test_one_process_learns_and_prints_progress(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run([sys.executable, str(SCRIPT), *f"--device cpu --steps 60 --log-every 20 --out {out}".split()])

    assert done.returncode == 0, done.stderr
    lines = PROGRESS.findall(done.stdout)
    assert [int(step) for step, _, _ in lines] == [20, 40, 60]
    assert float(lines[-1][1]) < float(lines[0][1]) < 5.55  # ln 256: knowing nothing
    result = json.loads(out.read_text())
    assert result["loss"] == pytest.approx(float(lines[-1][1]), abs=1e-4)
    assert result["parameters"] == 437_760


def reference_losses(script: ModuleType, batches: list[int], steps: int) -> list[list[float]]:
    """What ranks with these batch sizes must compute, done by one process over the union of their batches."""
    size = script.SIZES["nano"]
    world = len(batches)
    torch.manual_seed(0)
    model = script.GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1)
    text = script.load_text(None)
    parts = [script.part_of_rank(text, rank, world, size.context) for rank in range(world)]
    generators = [torch.Generator().manual_seed(1 + rank) for rank in range(world)]
    curves: list[list[float]] = [[] for _ in batches]
    for step in range(1, steps + 1):
        total = torch.zeros(())
        for rank, samples in enumerate(batches):
            inputs, targets = script.draw_batch(parts[rank], samples, size.context, generators[rank])
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            curves[rank].append(loss.item())
            total = total + loss * samples / sum(batches)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = size.lr * min(1.0, step / script.WARMUP_STEPS)
        optimizer.step()
    return curves


@pytest.mark.parametrize(("extra", "how"), [("", "DDP over gloo"), (" --stage", "gradients through CPU memory")])
def test_ranks_with_uneven_batches_train_as_one_process_would(
    script: ModuleType, tmp_path: Path, extra: str, how: str
) -> None:
    out = tmp_path / "out.json"
    # --stage on one rank alone: the ranks must settle on one way of exchange.
    common = f"--device cpu --steps 12 --out {out} --batch-size "
    done = run_ranks(tmp_path, common + "7", common + "2" + extra)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(how) == 2
    for got, expected in zip(losses(out), reference_losses(script, [7, 2], 12), strict=True):
        assert got == pytest.approx(expected, abs=2e-4)


def test_ranks_that_were_told_different_things_stop_and_say_so(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, "--device cpu --size nano", "--device cpu --size small")

    assert done.returncode != 0
    assert "--size is nano on rank 0 and small on rank 1: give all the same" in done.stderr
    assert not PROGRESS.search(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data no-such-file", "cannot read the text"),
        (f"--data {os.devnull}", f"the text is empty: {os.devnull}"),
        ("--data short.txt", "text too short: rank 0 of 1 has 9 bytes and needs more than 64"),
        ("--steps 0", "--steps must be above 0"),
        ("--batch-size -1", "--batch-size must be above 0"),
        ("--sync assist --batch-size 0", "--batch-size must be above 0"),
        ("--sync assist --batch-size 3", "--batch-size 3 is no multiple of --micro-batch 2"),
        ("--sync ddp --wire bf16", "--sync ddp exchanges fp32: leave out --wire"),
        ("--sync ddp", "DDP needs a process group"),
        ("--sync diloco --every 300", "--every 300 is more than --steps 200: ranks would never meet"),
        ("--sync diloco --every 0s", "argument --every: invalid steps_or_seconds value: '0s'"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "short.txt").write_text("too short")
    arguments = arguments.replace("short.txt", str(tmp_path / "short.txt"))
    done = run([sys.executable, str(SCRIPT), "--device", "cpu", *arguments.split()])

    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_parts_of_ranks_are_the_text(script: ModuleType) -> None:
    text = torch.arange(1001) % 256
    parts = [script.part_of_rank(text, rank, 3, 64) for rank in range(3)]
    assert torch.equal(torch.cat(parts), text)


def test_targets_are_the_inputs_one_byte_on(script: ModuleType) -> None:
    inputs, targets = script.draw_batch(torch.arange(500), 8, 64, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (8, 64)
    assert torch.equal(inputs + 1, targets)


def test_model_does_not_see_the_future(script: ModuleType) -> None:
    model = script.GPT(script.SIZES["nano"])
    text = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 40:] = 0
    with torch.no_grad():
        assert torch.allclose(model(text)[0, :40], model(changed)[0, :40], atol=1e-5)
        assert not torch.allclose(model(text)[0, 40:], model(changed)[0, 40:], atol=1e-5)


def test_gpt2_size_is_that_of_gpt2(script: ModuleType) -> None:
    with torch.device("meta"):
        model = script.GPT(script.SIZES["gpt2"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
