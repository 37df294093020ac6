"""The example scripts as ranks run them: modes train, exact ones exactly; what is wrong is said by all ranks."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from hetdeploy.train.metrics import read_metrics

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEADLINE = 120.0
PROGRESS = re.compile(r"^step (\d+) loss (\d+\.\d+) samples/s (\d+\.\d+)$", re.MULTILINE)

# A script as it is, but for what some ranks do wrong.
WITH_FAULT = """
import importlib, os, sys
import torch
sys.path.insert(0, os.environ["SCRIPTS"])
script = importlib.import_module(sys.argv.pop(1))
if os.environ.get("RANK", "0") in os.environ["FAULTY"]:
    exec(os.environ["FAULT"])
script.main()
"""
WITHOUT = """
import os, runpy, sys
sys.modules[os.environ["WITHOUT"]] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Ranks:
    """Processes of one job, started as torchrun would, but not stopped when another one fails."""

    def __init__(self, commands, folder, **environ):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        plain = {key: value for key, value in os.environ.items() if not key.startswith("HETDEPLOY_")}
        plain |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(len(commands))}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        together = address | agent if len(commands) > 1 else {}
        began = time.monotonic()
        processes = [
            subprocess.Popen(
                [sys.executable, *command],
                env=plain | together | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if together else {}) | environ,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, command in enumerate(commands)
        ]
        try:
            said = [process.communicate(timeout=DEADLINE) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        self.seconds = time.monotonic() - began
        self.codes = [process.returncode for process in processes]
        self.out = [out for out, _ in said]
        self.err = [err for _, err in said]
        assert not any("terminate called" in err for err in self.err), self.err

    def succeeded(self):
        assert not any(self.codes), self.err
        return self


def gpt(folder, arguments, ranks=2):
    command = [str(SCRIPTS / "train_gpt.py"), "--device", "cpu", *arguments.split()]
    return Ranks([command] * ranks, folder).succeeded()


def curve(path, rank=0):
    return [loss for _, loss in json.loads(path.read_text())["curves"][rank]]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_the_assisted_loss_is_that_of_the_leader_alone_at_every_step(wire, tmp_path):
    steps = int(os.environ.get("EXAMPLE_STEPS", "60")) if wire == "fp32" else 20
    common = f"--sync assist --wire {wire} --micro-batch 2 --steps {steps}"
    gpt(tmp_path, f"{common} --batch-size 16 --out alone.json", ranks=1)
    pair = gpt(tmp_path, f"{common} --batch-size 8 --out pair.json --metrics metrics")

    tolerance = {"fp32": 1e-3, "bf16": 1e-2, "int8": 3e-2}[wire]
    assert curve(tmp_path / "pair.json") == pytest.approx(curve(tmp_path / "alone.json"), abs=tolerance)
    records = read_metrics(tmp_path / "metrics" / "metrics-rank0.jsonl")
    helped = [record["samples"] < record["global_samples"] for record in records]
    assert sum(helped) > steps / 4, "the helper has taken no part in it"
    assert len(PROGRESS.findall(pair.out[1])) >= sum(helped)


@pytest.mark.parametrize("sync", ["allreduce --wire int8", "diloco --every 5", "diloco --every 0.4s --wire int8"])
def test_every_mode_trains(sync, tmp_path):
    pair = gpt(tmp_path, f"--sync {sync} --steps 30 --log-every 10 --out out.json")

    for rank, out in enumerate(pair.out):
        assert f"rank {rank} of 2 on cpu, {sync.split()[0]}" in out
        shown = [(int(step), float(loss)) for step, loss, _ in PROGRESS.findall(out)]
        assert [step for step, _ in shown] == [10 * (i + 1) for i in range(len(shown))]
        assert shown[-1][1] < shown[0][1] < 5.55  # ln 256: knowing nothing
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["loss"] < 4


def test_a_rank_may_have_no_samples_but_not_all(tmp_path):
    arguments = "--device cpu --sync allreduce --steps 3 --out out.json --batch-size"
    command = [str(SCRIPTS / "train_gpt.py"), *arguments.split()]
    Ranks([[*command, "8"], [*command, "0"]], tmp_path).succeeded()
    assert curve(tmp_path / "out.json", 0) == curve(tmp_path / "out.json", 1)
    nobody = Ranks([[*command, "0"], [*command, "0"]], tmp_path)
    assert nobody.err == ["--batch-size is 0 on every rank: give one of them samples\n"] * 2


def test_plain_needs_torch_alone_and_the_other_modes_say_what_they_need(tmp_path):
    starter = tmp_path / "without.py"
    starter.write_text(WITHOUT)
    command = [str(starter), str(SCRIPTS / "train_gpt.py"), *["--device", "cpu", "--steps", "2", "--sync"]]

    plain = Ranks([[*command, "plain"]], tmp_path, WITHOUT="hetdeploy").succeeded()
    assert len(PROGRESS.findall(plain.out[0])) == 2
    other = Ranks([[*command, "assist"]], tmp_path, WITHOUT="hetdeploy")
    assert other.codes == [1]
    assert other.err == ["--sync assist needs hetdeploy: pip install hetdeploy, or use --sync plain\n"]


NOT_A_NUMBER = """
calls, right = [], script.functional.cross_entropy
def wrong(*arguments, **options):
    calls.append(1)
    return right(*arguments, **options) * (float("nan") if len(calls) >= 3 else 1)
script.functional.cross_entropy = wrong
"""
ONE_PARAMETER_MORE = """
class More(script.GPT):
    def __init__(self, size):
        super().__init__(size)
        self.more = torch.nn.Linear(2, 2)
script.GPT = More
"""
ANOTHER_WIDTH = """
import dataclasses
script.GPT = lambda size, make=script.GPT: make(dataclasses.replace(size, width=64))
"""
ANOTHER_DTYPE = "script.GPT = lambda size, make=script.GPT: make(size).double()"


NAN = r"gradient of \S+ is NaN or Inf on rank 1 at step \d+, which was not applied on any rank"
MORE = r"differ: .*(parameter|buffer) more.weight \(2, 2\) float32'"
WIDTH = r"differ: 'parameter bytes.weight \(256, 128\) float32' against '.* \(256, 64\) float32'"
DTYPE = r"differ: 'parameter bytes.weight \(256, 128\) float32' against '.* float64'"


@pytest.mark.parametrize(
    ("sync", "fault", "message"),
    [
        *((sync, NOT_A_NUMBER, NAN) for sync in ("allreduce", "ddp", "assist", "diloco")),
        *((sync, ONE_PARAMETER_MORE, MORE) for sync in ("allreduce", "assist", "diloco")),
        *((sync, ANOTHER_WIDTH, WIDTH) for sync in ("ddp", "assist", "diloco")),
        *((sync, ANOTHER_DTYPE, DTYPE) for sync in ("allreduce", "assist")),
    ],
    ids=lambda value: value if value.isalpha() else "",
)
def test_what_one_rank_does_wrong_is_said_by_all_ranks(sync, fault, message, tmp_path):
    failed = with_fault("train_gpt", f"--sync {sync} --steps 40 --every 5 --timeout 15", fault, "1", tmp_path)

    assert failed.codes == [1, 1], failed.err
    for err in failed.err:
        assert re.search(message, err), failed.err
        assert "Traceback" not in err


def with_fault(script, arguments, fault, ranks, folder):
    starter = folder / "with_fault.py"
    starter.write_text(WITH_FAULT)
    command = [str(starter), script, "--device", "cpu", *arguments.split()]
    return Ranks([command, command], folder, SCRIPTS=str(SCRIPTS), FAULT=fault, FAULTY=ranks)


# --- digits ---


def digits(folder, arguments):
    """Two ranks, the first with three quarters of every batch, each with a disk of its own."""
    command = [str(SCRIPTS / "train_digits.py"), "--device", "cpu", *arguments.split()]
    own = [["--share", share, "--checkpoints", f"{folder.name}-{share}"] for share in ("3", "1")]
    return Ranks([[*command, *each] for each in own], folder.parent).succeeded()


def test_digits_goes_on_bit_for_bit_where_it_was_stopped(tmp_path):
    pytest.importorskip("sklearn")
    common = "--wire int8 --save-every 20 --steps"
    whole = digits(tmp_path / "whole", f"{common} 40")
    digits(tmp_path / "parts", f"{common} 20")
    resumed = digits(tmp_path / "parts", f"{common} 40")

    for rank, share in enumerate(("3", "1")):
        expected, got = (last_checkpoint(tmp_path / f"{which}-{share}") for which in ("whole", "parts"))
        assert expected == got
        assert f"rank {rank} goes on after step 20" in resumed.out[rank]
        lines = [[line[:2] for line in PROGRESS.findall(ranks.out[rank])] for ranks in (whole, resumed)]
        assert lines[0][2:] == lines[1]


def last_checkpoint(folder):
    """What is in it but the generators that the script leaves unseeded, with every bit of its tensors."""
    content = torch.load(max(folder.glob("*.pt")), weights_only=True)
    del content["random"]["python"]
    content["random"].pop("numpy", None)
    flat, structure = tree_flatten(content)
    bits = [
        each.contiguous().view(-1).view(torch.uint8).tolist() if isinstance(each, torch.Tensor) else each
        for each in flat
    ]
    return bits, structure


def test_digits_learns(tmp_path):
    pytest.importorskip("sklearn")
    command = [str(SCRIPTS / "train_digits.py"), *["--device", "cpu", "--steps", "150", "--log-every", "50"]]
    done = Ranks([command], tmp_path).succeeded()
    right = re.search(r"rank 0 knows (\d+) of 297 digits", done.out[0])
    assert int(right[1]) > 240, done.out


def test_digits_names_the_package_that_it_needs(tmp_path):
    starter = tmp_path / "without.py"
    starter.write_text(WITHOUT)
    missing = Ranks([[str(starter), str(SCRIPTS / "train_digits.py")]], tmp_path, WITHOUT="sklearn")
    assert missing.codes == [1]
    assert missing.err == ["the images come with scikit-learn, which is not here: pip install scikit-learn\n"]


WIDER = "script.build_model = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))"
ONE_IMAGE = """
import sklearn.datasets, types
all_of_them = sklearn.datasets.load_digits()
few = types.SimpleNamespace(images=all_of_them.images[:298], target=all_of_them.target[:298])
sklearn.datasets.load_digits = lambda: few
"""
DISK_FULL = """
from hetdeploy.train import checkpoint
def full(descriptor):
    raise OSError(28, "No space left on device")
checkpoint._flush_to_disk = full
"""


OTHER_LOST = "rank 0 lost another rank .* says why in its own log"


@pytest.mark.parametrize(
    ("fault", "ranks", "folder", "messages"),
    [
        (WIDER, "01", "saved", ["the checkpoint of step 4 is of another model: .*0.weight"] * 2),
        (ONE_IMAGE, "01", "saved", ["the checkpoint's batches have length 1500, this run's have 1"] * 2),
        (
            ONE_IMAGE,
            "01",
            "fresh",
            ["a dataset of 1 samples is smaller than the world of 2 ranks: use fewer ranks"] * 2,
        ),
        (DISK_FULL, "1", "fresh", [OTHER_LOST, "the checkpoint of step 4 could not be .*: No space left on device"]),
    ],
    ids=["another-model", "another-dataset", "one-image", "disk-full"],
)
def test_what_is_wrong_with_digits_is_said_by_all_ranks(fault, ranks, folder, messages, tmp_path):
    pytest.importorskip("sklearn")
    if folder == "saved":
        command = [str(SCRIPTS / "train_digits.py"), *["--device", "cpu", "--checkpoints", "saved", "--steps", "4"]]
        Ranks([command, command], tmp_path).succeeded()
    failed = with_fault("train_digits", f"--checkpoints {folder} --save-every 4 --steps 12", fault, ranks, tmp_path)

    assert failed.codes == [1, 1], failed.err
    for message, err in zip(messages, failed.err, strict=True):
        assert re.search(message, err), failed.err
        assert "Traceback" not in err


# --- the guide ---

GUIDE = Path(__file__).parents[2] / "docs" / "training.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BEFORE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
dataset = TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
def some(generator, samples):
    return torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)
def my_batches():
    return [some(generator, 4 + 2 * rank) for _ in range(6)]
def micro_batch(step, micro):
    return some(torch.Generator().manual_seed(100 * step + micro), 2)
"""
FRESH = """
torch.manual_seed(0)
model = nn.Linear(4, 3)
before = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
AFTER = """
assert rank or not torch.equal(before, model.weight), "it has not trained"
"""


def test_the_code_of_the_guide_runs_on_two_ranks(tmp_path):
    blocks = CODE.findall(GUIDE.read_text())
    assert len(blocks) == 5
    script = tmp_path / "guide.py"
    script.write_text(BEFORE + "".join(FRESH + block + AFTER for block in blocks) + "dist.destroy_process_group()\n")
    Ranks([[str(script)], [str(script)]], tmp_path).succeeded()
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 6
