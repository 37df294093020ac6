"""A leader in this process, a helper in another that is killed, put to sleep and woken: what a Mac does in the end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hetdeploy.train.assist import Assist
from hetdeploy.train.crew import Crew

DEADLINE = 60.0
GOES_ON_WITHIN = 2.0
WHEN_IN_TIME, ALONE = "assist 1/1", "assist 0/0"


def evenly(micros, _leader, paces):
    return [micros // (len(paces) + 1)] * len(paces)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def micro_batch(step, micro):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)


def steps(net, assist, total):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in assist.steps(total):
        for micro in step:
            x, y = micro_batch(step.number, micro)
            loss = functional.mse_loss(net(x), y, reduction="sum")
            loss.backward()
            step.count(len(x), loss)
        record = step.reduce()
        if record is not None:
            optimizer.step()
            optimizer.zero_grad()
        yield record


def assist(net, leads, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return Assist(net, micro_batches=4, wire="fp32", patience=100, split=evenly, crew=Crew(leads, store))


def helper_main(port):
    torch.set_num_threads(1)
    net = model()
    for _ in steps(net, assist(net, False, port), 0):
        pass


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def helper(server):
    process = multiprocessing.get_context("spawn").Process(target=helper_main, args=(server.port,))
    process.start()
    yield process
    process.kill()
    process.join(DEADLINE)


def expected_losses(total):
    net = model()
    return [record.loss for record in steps(net, Assist(net, micro_batches=4, crew=Crew.alone()), total)]


def until(records, wanted):
    """Take steps until one was shared as ``wanted``; all their records. The first steps of a fresh process are slow."""
    taken, deadline = [], time.monotonic() + DEADLINE
    for record in records:
        taken.append(record)
        if record.algorithm == wanted:
            return taken
        assert time.monotonic() < deadline, f"no step became {wanted!r}: {[each.algorithm for each in taken[-9:]]}"
    raise AssertionError("the leader ended")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_the_leader_goes_on_at_once_and_no_step_is_lost(server, helper, fault):
    net = model()
    leader = assist(net, True, server.port)
    leader.wait_for(1, DEADLINE)
    running = steps(net, leader, 1_000_000)
    records = until(running, WHEN_IN_TIME)
    os.kill(helper.pid, fault)
    took = []
    while len(took) < 10:
        began = time.perf_counter()
        records.append(next(running))
        took.append(time.perf_counter() - began)
    assert max(took) < GOES_ON_WITHIN
    assert records[-1].algorithm == ALONE
    assert [record.loss for record in records] == pytest.approx(expected_losses(len(records)), rel=1e-4)
    leader.close()


def test_a_helper_that_wakes_up_is_back_in_step(server, helper):
    net = model()
    leader = assist(net, True, server.port)
    leader.wait_for(1, DEADLINE)
    running = steps(net, leader, 1_000_000)
    until(running, WHEN_IN_TIME)
    os.kill(helper.pid, signal.SIGSTOP)
    asleep = until(running, ALONE)
    os.kill(helper.pid, signal.SIGCONT)
    until(running, WHEN_IN_TIME)
    assert [record.algorithm for record in asleep].count("assist 0/1") == 1, "it was given a share while it was away"
    leader.close()
    helper.join(DEADLINE)
    assert helper.exitcode == 0


LEAVES_A_SLEEPER = """
import os, signal, sys
import torch.distributed as dist
sys.path.insert(0, sys.argv[2])
from train.test_crew_processes import assist, model, steps
net = model()
leader = assist(net, True, int(sys.argv[1]))
leader.wait_for(1, 60)
for record in steps(net, leader, 6):
    if record.step == 2:
        os.kill(int(sys.argv[3]), signal.SIGSTOP)
print("done", flush=True)
"""


def test_a_leader_process_ends_cleanly_while_a_helper_sleeps(server, helper):
    """Its thread is still inside gloo then: the interpreter must neither wait for it nor crash."""
    arguments = [str(server.port), str(Path(__file__).parent.parent), str(helper.pid)]
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_A_SLEEPER, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
