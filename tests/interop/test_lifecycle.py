"""Groups that come and go, and ranks that disagree, with one rank behind the bridge: each rank a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from peers import Job

from hetdeploy.gloo.dialect import Dialect

FORWARD_DESCRIPTORS = 3
"""The forward to the store stays: a listener, and a pair of sockets to wake its thread."""

MADE_AGAIN = """
import torch, torch.distributed as dist
for turn in range(5):
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + turn])
    dist.all_reduce(total)
    assert total.item() == 1 + 2 * turn, (turn, total)
    dist.destroy_process_group()
print("five times")
"""

DISAGREE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
try:
    dist.all_reduce(torch.ones(100_000 + dist.get_rank()))
except RuntimeError as error:
    print("caught", error)
else:
    print("nothing noticed")
"""

MANY = """
import os, random, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, order = dist.get_rank(), random.Random(7)
for turn in range(40):
    group = dist.new_group()
    works, tensors = [], []
    for _ in range(order.randint(1, 4)):
        tensors.append(torch.full((order.choice([1, 17, 4099, 300_001]),), float(rank + 1)))
        works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
    for work, tensor in zip(works, tensors):
        work.wait()
        assert (tensor == 3).all()
    dist.barrier(group)
    dist.destroy_process_group(group)
dist.barrier()
print("forty groups")
"""


@pytest.mark.parametrize(("bridged", "dialect"), [(0, Dialect.TCP), (1, Dialect.UV)])
def test_default_group_made_again_under_its_name(bridged: int, dialect: Dialect) -> None:
    """torchrun's store outlives the group: the records of the last one are still there."""
    result = run(bridged, dialect, MADE_AGAIN)
    result.check()
    assert all("five times" in output for output in result.outputs)


def test_different_sizes_kill_nobody() -> None:
    """Without a bridge gloo aborts both processes (SIGABRT); here both get an exception, and the bridge the reason."""
    result = run(1, Dialect.UV, DISAGREE)
    assert result.codes == [0, 0], result.outputs
    assert all("caught" in output for output in result.outputs)
    assert any("bytes are awaited" in problem for problem in result.problems), [*result.problems, *result.outputs]


def test_groups_leave_nothing_behind() -> None:
    command = [sys.executable, "-c", MANY]
    with Job(2) as job:
        bridge = job.bridge(Dialect.TCP)
        descriptors = open_descriptors()
        job.start_bridged(1, bridge, *command)
        job.start(0, *command, HETDEPLOY_JOB="test")
        job.wait().check()
        pairs = [thread for thread in bridge._threads if thread.name.startswith("pair")]
        for thread in pairs:
            thread.join(10)
        assert pairs
        assert not any(thread.is_alive() for thread in pairs)
        assert not bridge._offers
        wait_until(lambda: open_descriptors() <= descriptors + FORWARD_DESCRIPTORS)


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def wait_until(condition: Callable[[], bool]) -> None:
    """The store's master lets go of a rank's connection in a thread of its own."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(bridged: int, dialect: Dialect, program: str):
    command = [sys.executable, "-W", "error", "-c", program]
    face = {"HETDEPLOY_FACE": "uv", "HETDEPLOY_SOCKADDR": "darwin"} if dialect is Dialect.UV else {}
    with Job(2) as job:
        job.start_bridged(bridged, job.bridge(dialect), *command, **face)
        job.start(1 - bridged, *command, HETDEPLOY_JOB="test")
        return job.wait()
