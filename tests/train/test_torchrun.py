"""Every mode in a plain script, under plain torchrun and alone. Only what a script would close is closed."""

import json
import os
import socket
import subprocess
import sys

import pytest

DEADLINE = 240.0

SCRIPT = """
import contextlib, json, os, sys
import torch, torch.distributed as dist
from hetdeploy import train


def loss_sum(net, step, micro):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + micro))
    return ((net(x) - x.sum(1, keepdim=True)) ** 2).sum()


def crew(net, optimizer):
    split = lambda micros, own, paces: [1] * len(paces)
    with train.Assist(net, micro_batches=2, wire="fp32", patience=1e4, split=split) as assist:
        if dist.is_initialized():
            assist.wait_for(1)
        for step in assist.steps(6):
            for micro in step:
                loss = loss_sum(net, step.number, micro)
                loss.backward()
                step.count(8, loss)
            record = step.reduce()
            if record is not None:
                optimizer.step()
                optimizer.zero_grad()
                yield record


def symmetric(net, sync, optimizer):
    micros = [train.World.current().rank] if dist.is_initialized() else [0, 1]
    for step in range(6):
        total = 0.0
        for micro in micros:
            with sync.no_sync() if micro != micros[-1] else contextlib.nullcontext():
                loss = loss_sum(sync if isinstance(sync, train.WeightedDDP) else net, step, micro)
                loss.backward()
            total += loss.detach()
        yield sync.reduce(8 * len(micros), total)
        optimizer.step()
        optimizer.zero_grad()


def local(net, sync, optimizer):
    for step in range(6):
        loss = loss_sum(net, step, train.World.current().rank)
        (loss / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
        record = sync.step(8, loss)
        if record is not None:
            yield record
    sync.finish()


if "RANK" in os.environ:
    dist.init_process_group("gloo")
answers = {}
for mode in sys.argv[2].split(","):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if mode == "assist":
        records = crew(net, optimizer)
    elif mode == "diloco":
        records = local(net, train.DiLoCo(net, every=2), optimizer)
    else:
        records = symmetric(net, {"allreduce": train.AllReduce, "ddp": train.WeightedDDP}[mode](net), optimizer)
    answers[mode] = {"losses": [record.loss for record in records], "weight": net.weight.tolist()}
with open(f"{sys.argv[1]}/{train.World.current().rank}.json", "w") as file:
    json.dump(answers, file)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def answers(folder, ranks, modes):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HETDEPLOY_", "RANK"))}
    ended = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder), ",".join(modes)],
        env={**plain, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "terminate called" not in ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("pair"), 2, ["allreduce", "ddp", "assist", "diloco"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("alone"), 1, ["allreduce", "assist", "diloco"])


@pytest.mark.parametrize("mode", ["allreduce", "ddp", "assist", "diloco"])
def test_two_ranks_train(pair, mode):
    leader, other = (answer[mode] for answer in pair)
    assert leader["losses"][-1] < leader["losses"][0]
    if mode != "assist":  # a helper's weights are those of its last share
        assert leader["weight"] == other["weight"]


def test_exact_modes_come_to_the_losses_of_one_process(pair, alone):
    for mode in ("allreduce", "ddp", "assist"):
        assert pair[0][mode]["losses"] == pytest.approx(alone[0]["allreduce"]["losses"], rel=1e-5)
    assert alone[0]["assist"]["losses"] == pytest.approx(alone[0]["allreduce"]["losses"], rel=1e-5)


def test_diloco_alone_trains(alone):
    losses = alone[0]["diloco"]["losses"]
    assert losses[-1] < losses[0]


RAISES = """
import os
import torch, torch.distributed as dist
from hetdeploy.train import AllReduce

dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
sync = AllReduce(net)
net(torch.ones(1, 4)).sum().backward()
sync.reduce(samples=1)
raise ValueError("the script's own")
"""


@pytest.mark.parametrize("attempt", range(3))
def test_an_exception_ends_the_rank_with_its_own_code(tmp_path, attempt):
    """gloo's threads would abort every other such process (SIGABRT), and whoever started it would learn nothing."""
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HETDEPLOY_", "RANK"))}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**plain, **address, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=DEADLINE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert all("ValueError: the script's own" in text for text in said)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
