import copy
import datetime
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hetdeploy.train.diloco import DiLoCo
from hetdeploy.train.errors import LayoutMismatch, MisuseError, NonFiniteGradient
from hetdeploy.train.world import World

from .ranks import outcomes, run

DEADLINE = 60.0


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(3, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.leave = nn.Linear(6, 1)


def trainable(net):
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def move(net, seed):
    """A local step: any change of the weights will do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(net):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@settings(max_examples=15)
@given(
    size=st.sampled_from([2, 3]),
    fragments=st.integers(1, 4),
    counts=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(lambda each: each[0] + each[1]),
    wire=st.sampled_from(["fp32", "bf16"]),
)
def test_one_local_step_with_outer_sgd_of_lr_1_is_parameter_averaging(size, fragments, counts, wire):
    nets = [Net(rank) for rank in range(size)]
    locals_ = {}

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=1, fragments=fragments, wire=wire, lr=1.0, momentum=0.0, overlap=False, world=world)
        start = [parameter.detach().clone() for parameter in trainable(net)]
        move(net, world.rank)
        locals_[world.rank] = [parameter.detach().clone() for parameter in trainable(net)]
        sync.step(samples=counts[world.rank])
        sync.finish()
        sync.close()
        return start

    start = run(size, body)[0]
    total = sum(counts[:size])
    for i, parameter in enumerate(trainable(nets[0])):
        average = sum(locals_[rank][i] * counts[rank] for rank in range(size)) / total
        moved = max(float((locals_[rank][i] - start[i]).abs().max()) for rank in range(size))
        tolerance = 1e-5 if wire == "fp32" else 2**-8 * moved + 1e-5
        assert float((parameter.detach() - average).abs().max()) <= tolerance
    for other in nets[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(trainable(nets[0]), trainable(other), strict=True))


def test_the_pseudo_gradient_is_old_minus_new():
    """Both ranks move up by one. The masters follow upwards by lr (1 + mu): first step of Nesterov."""
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=1, lr=0.5, momentum=0.9, overlap=False, world=world)
        before = net.weight.item()
        with torch.no_grad():
            net.weight.add_(1.0)
        sync.step(samples=1)
        sync.close()
        return net.weight.item() - before

    assert run(2, body) == pytest.approx([0.5 * 1.9] * 2, abs=1e-6)


def test_the_outer_step_is_torchs_nesterov_sgd():
    net = Net(0)
    sync = DiLoCo(net, every=1, overlap=False, world=World.solo())
    masters = [parameter.detach().clone().requires_grad_() for parameter in trainable(net)]
    reference = torch.optim.SGD(masters, lr=0.7, momentum=0.9, nesterov=True)
    for i in range(5):
        move(net, i)
        for master, parameter in zip(masters, trainable(net), strict=True):
            master.grad = master.detach() - parameter.detach()
        reference.step()
        sync.step(samples=3)
        for master, parameter in zip(masters, trainable(net), strict=True):
            torch.testing.assert_close(parameter, master, rtol=1e-5, atol=1e-6)


@settings(max_examples=10)
@given(fragments=st.integers(1, 4), overlap=st.booleans(), every=st.integers(1, 6), steps=st.integers(1, 15))
def test_no_local_step_is_lost_or_counted_twice(fragments, overlap, every, steps):
    """With lr 1 and no momentum the end is the start plus the mean of all that ranks moved, whenever it was
    exchanged.
    """
    nets = [Net(rank) for rank in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=every, fragments=fragments, lr=1.0, momentum=0.0, overlap=overlap, world=world)
        start = [parameter.detach().clone() for parameter in trainable(net)]
        for i in range(steps):
            move(net, 100 * world.rank + i)
            sync.step(samples=1)
        sync.finish()
        sync.close()
        return start

    start = run(2, body)[0]
    for mine, theirs in zip(trainable(nets[0]), trainable(nets[1]), strict=True):
        assert torch.equal(mine, theirs)
    for i, parameter in enumerate(trainable(nets[0])):
        moved = torch.zeros_like(start[i])
        for rank in range(2):
            for step in range(steps):
                generator = torch.Generator().manual_seed(100 * rank + step)
                moves = [torch.randn(each.shape, generator=generator) for each in start]
                moved += 0.1 * moves[i] / 2
        torch.testing.assert_close(parameter.detach(), start[i] + moved, rtol=1e-4, atol=1e-4)


def test_an_exchange_travels_during_local_steps_and_is_applied_when_the_next_is_due_at_the_latest():
    """Rank 1 begins its exchange only when rank 0 has gone on by some local steps; rank 0 must not wait for it
    before.
    """
    nets = [Net(rank) for rank in range(2)]
    went_on = threading.Event()

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=4, world=world)
        applied = []
        if world.rank == 1:
            assert went_on.wait(DEADLINE)
        for i in range(1, 9):
            move(net, i)
            if sync.step(samples=1) is not None:
                applied.append(i)
            if i == 7:
                went_on.set()
        sync.finish()
        sync.close()
        return applied

    applied = run(2, body)
    # Begun at step 4; rank 0 could apply it at 8 at the earliest, when it was due anyway.
    assert applied[0] == [8]
    assert 5 <= applied[1][0] <= 8


def test_a_rank_with_fewer_steps_waits_in_finish_and_counts_by_its_samples():
    nets = [Net(rank) for rank in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=2, fragments=2, world=world)
        for i in range(3 if world.rank else 11):
            move(net, i)
            sync.step(samples=5)
        sync.finish()
        sync.close()
        return sync.exchanges

    exchanges = run(2, body)
    assert exchanges[0] == exchanges[1]
    assert all(torch.equal(a, b) for a, b in zip(trainable(nets[0]), trainable(nets[1]), strict=True))


def test_every_as_a_time_gives_ranks_of_different_speed_equal_rounds():
    """Rank 0 takes local steps as fast as it can, rank 1 one a round."""
    nets = [Net(rank) for rank in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=datetime.timedelta(milliseconds=20), fragments=2, world=world)
        steps, slow = 0, threading.Event()
        while sync.rounds < 4:
            move(net, steps)
            sync.step(samples=1)
            slow.wait(0.02 if world.rank else 0.0005)
            steps += 1
        sync.finish()
        sync.close()
        return steps

    steps = run(2, body)
    assert steps[0] > steps[1]
    assert all(torch.equal(a, b) for a, b in zip(trainable(nets[0]), trainable(nets[1]), strict=True))


def test_a_rank_that_waited_once_does_not_wait_ever_after():
    """A local step of the slow rank is longer than the time between exchanges; the fast one goes on meanwhile."""
    exchanges, seconds = 30, (0.004, 0.12)

    def body(world):
        net = nn.Linear(3, 1)
        sync = DiLoCo(net, every=datetime.timedelta(seconds=0.08), world=world)
        steps = 0
        while sync.exchanges < exchanges:
            time.sleep(seconds[world.rank])
            sync.step(samples=1)
            steps += 1
        sync.finish()
        sync.close()
        return steps

    fast, slow = run(2, body)
    assert fast > 8 * slow


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_on_one_rank_is_named_on_all_and_the_masters_stay(overlap):
    nets = [Net(rank) for rank in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = DiLoCo(net, every=1, wire="int8", overlap=overlap, world=world)
        masters = [parameter.detach().clone() for parameter in trainable(net)]
        if world.rank == 1:
            with torch.no_grad():
                net.leave.weight[0, 2] = float("nan")
        with pytest.raises(NonFiniteGradient) as told:
            for _ in range(2):
                sync.step(samples=1)
        assert all(torch.equal(a, b) for a, b in zip(trainable(net), masters, strict=True))
        sync.step(samples=1)
        sync.finish()
        sync.close()
        return str(told.value)

    told = run(2, body)
    assert told[0] == told[1]
    assert "pseudo-gradient of leave.weight is NaN or Inf on rank 1 at step 0" in told[0]


def test_arguments_that_differ_are_an_error_on_all_ranks():
    told = outcomes(2, lambda world: DiLoCo(Net(0), every=5 + world.rank, world=world))
    assert all(isinstance(error, LayoutMismatch) for error in told), told
    assert "'every = 5' against 'every = 6'" in str(told[0])


def test_senseless_arguments_are_refused():
    with pytest.raises(MisuseError, match="use positive numbers"):
        DiLoCo(Net(0), every=0)


def test_a_resumed_run_continues_as_the_one_that_was_not_interrupted():
    def part(net, sync, steps):
        for i in steps:
            move(net, i)
            sync.step(samples=2)

    whole, first, second = Net(0), Net(0), Net(5)
    frozen = copy.deepcopy(first.frozen.state_dict())
    arguments = {"every": 2, "fragments": 2, "overlap": False, "world": World.solo()}
    sync = DiLoCo(whole, **arguments)
    part(whole, sync, range(4))
    part(whole, sync, range(4, 8))
    saving = DiLoCo(first, **arguments)
    part(first, saving, range(4))
    resumed = DiLoCo(second, **arguments)
    resumed.load_state_dict(saving.state_dict())
    second.frozen.load_state_dict(frozen)
    # The fragment that was not exchanged last has local steps beyond its master: those live in the model's own
    # checkpoint.
    second.load_state_dict(first.state_dict())
    part(second, resumed, range(4, 8))
    assert resumed.exchanges == sync.exchanges
    for mine, theirs in zip(trainable(second), trainable(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    with pytest.raises(MisuseError, match="other fragments"):
        DiLoCo(Net(0), every=2, world=World.solo()).load_state_dict(saving.state_dict())


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_training_with_it_comes_down_to_the_same_place_as_one_process(wire):
    """Linear regression, each rank with its half of the data, in rounds of ten local steps."""
    generator = torch.Generator().manual_seed(0)
    x, true = torch.randn(64, 4, generator=generator), torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    nets = [nn.Linear(4, 1) for _ in range(2)]

    def body(world):
        net, mine = nets[world.rank], x[32 * world.rank : 32 * (world.rank + 1)]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        sync = DiLoCo(net, every=10, fragments=2, wire=wire, world=world)
        for _ in range(1000):
            ((net(mine) - mine @ true) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step(samples=len(mine))
        sync.finish()
        sync.close()

    run(2, body)
    assert torch.equal(nets[0].weight, nets[1].weight)
    torch.testing.assert_close(nets[0].weight.detach().t(), true, rtol=0, atol=0.05)
