import copy
import datetime
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hetdeploy.train import summing
from hetdeploy.train.allreduce import AllReduce
from hetdeploy.train.errors import MisuseError, NonFiniteGradient, PeerLost
from hetdeploy.train.world import World

from .ranks import outcomes, run

INPUTS, CLASSES = 5, 3
TINY_BUCKETS = [1e-6, 1e-4, 3e-4, 1]


class Net(nn.Module):
    """Everything that makes buckets hard: a shared, a frozen, an unused and a sometimes used parameter."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(INPUTS, width)
        self.shared = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.sometimes = nn.Linear(width, width)
        self.unused = nn.Linear(width, 2)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x, branch):
        x = torch.tanh(self.enter(x))
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        x = self.frozen(x)
        return self.leave(self.sometimes(x) if branch else x)


def batch(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, INPUTS, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)


def backward(net, x, y, branch):
    loss = functional.cross_entropy(net(x, branch), y, reduction="sum")
    loss.backward()
    return loss.detach()


def step(net, sync, micro_batches):
    """One step of the loop that the module's text shows; an empty micro-batch is no backward pass."""
    micro_batches = [(x, y, branch) for x, y, branch in micro_batches if len(x)]
    loss = torch.zeros(())
    for x, y, branch in micro_batches[:-1]:
        with sync.no_sync():
            loss += backward(net, x, y, branch)
    for x, y, branch in micro_batches[-1:]:
        loss += backward(net, x, y, branch)
    return sync.reduce(samples=sum(len(x) for x, _, _ in micro_batches), loss=loss)


def gradients(net):
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def one_process(net, batches):
    """The gradient of the mean loss over the union of all ranks' batches, in fp64."""
    net = copy.deepcopy(net).double()
    samples, loss = 0, 0.0
    for x, y, branch in batches:
        if len(x):
            loss += float(backward(net, x.double(), y, branch))
            samples += len(x)
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad /= samples
    return gradients(net), loss / samples


def largest(gradient):
    return max((float(each.abs().max()) for each in gradient.values() if each is not None), default=0.0)


RELATIVE_ERROR = {"fp32": 1e-5, "bf16": 2**-8 + 1e-5, "int8": 1 / 254 + 1e-5}


@settings(max_examples=60)
@given(data=st.data())
def test_the_gradient_is_that_of_one_process_over_the_union_batch(data):
    size = data.draw(st.sampled_from([2, 2, 3]), "ranks")
    wire = data.draw(st.sampled_from(["fp32", "bf16", "int8"]), "wire")
    bucket_mb = data.draw(st.sampled_from(TINY_BUCKETS), "bucket_mb")
    overlap = data.draw(st.booleans(), "overlap")
    seed = data.draw(st.integers(0, 999), "seed")
    net = Net(data.draw(st.integers(1, 9), "width"), seed)
    micro = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=3)
    plan = data.draw(
        st.lists(micro, min_size=size, max_size=size).filter(lambda p: sum(n for r in p for n, _ in r)), "plan"
    )
    batches = [
        [(*batch(samples, 100 * rank + i), branch) for i, (samples, branch) in enumerate(micros)]
        for rank, micros in enumerate(plan)
    ]
    nets = [copy.deepcopy(net) for _ in range(size)]
    two_phase = data.draw(st.booleans(), "two_phase") and size > 2

    def body(world):
        sync = AllReduce(nets[world.rank], wire=wire, bucket_mb=bucket_mb, overlap=overlap, world=world)
        record = step(nets[world.rank], sync, batches[world.rank])
        sync.close()
        return record

    with mock.patch.object(summing, "ROUND_BYTES", -1 if two_phase else summing.ROUND_BYTES):
        records = run(size, body)
    expected, loss = one_process(net, [each for rank in batches for each in rank])
    # The sum of what each rank's rounding may take, relative to the largest value that any rank sends.
    locals_ = [one_process(net, rank)[0] if sum(len(x) for x, _, _ in rank) else {} for rank in batches]
    counts = [sum(len(x) for x, _, _ in rank) for rank in batches]
    sent = sum(largest(gradient) * count for gradient, count in zip(locals_, counts, strict=True)) / sum(counts)
    allowed = (2 if two_phase else 1) * RELATIVE_ERROR[wire] * sent * (1 + RELATIVE_ERROR[wire]) + 1e-6
    for name, gradient in gradients(nets[0]).items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            assert float((gradient - expected[name]).abs().max()) <= allowed, name
    for other in nets[1:]:
        for name, gradient in gradients(other).items():
            mine = gradients(nets[0])[name]
            assert (gradient is None and mine is None) or torch.equal(gradient, mine), f"{name} differs between ranks"
    assert [record.loss for record in records] == pytest.approx([loss] * size, rel=1e-5)
    assert [record.samples for record in records] == counts
    assert {record.global_samples for record in records} == {sum(counts)}


@settings(max_examples=12)
@given(bucket_mb=st.floats(1e-6, 2e-3), size=st.sampled_from([2, 3]), seed=st.integers(0, 99))
def test_every_parameter_is_reduced_exactly_once_at_any_bucket_size(bucket_mb, size, seed):
    """Whole numbers sum without rounding: a parameter reduced twice, or not at all, is off by a factor."""
    nets = [Net(4, seed) for _ in range(size)]

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, bucket_mb=bucket_mb, world=world)
        for _ in range(2):
            for parameter in net.parameters():
                parameter.grad = None
            loss = sum((world.rank + 1) * (i + 1) * p.sum() for i, p in enumerate(net.parameters()) if p.requires_grad)
            loss.backward()
            sync.reduce(samples=1)
        sync.close()

    run(size, body)
    ranks = sum(range(1, size + 1))
    for net in nets:
        for i, parameter in enumerate(net.parameters()):
            if parameter.requires_grad:
                assert torch.equal(parameter.grad, torch.full_like(parameter, ranks * (i + 1)) / size)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_stay_equal_bit_for_bit_over_many_steps(wire, size):
    nets = [Net(40, rank) for rank in range(size)]  # other weights on each rank: rank 0's are taken

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, wire=wire, bucket_mb=0.01, world=world, align_every=0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for i in range(30):
            samples = (2 * i + world.rank) % 5
            losses.append(step(net, sync, [(*batch(samples, 1000 * world.rank + i), True)]).loss)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sync.close()
        return losses

    losses = run(size, body)
    assert all(each == losses[0] for each in losses)
    for other in nets[1:]:
        for (name, mine), theirs in zip(nets[0].state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), name


def test_large_buffers_of_three_ranks_go_in_two_phases_and_keep_their_error_over_steps():
    """int8 rounds twice there; error feedback of both roundings keeps the running sum right."""
    numel = 200_000
    nets = [nn.Linear(numel, 1, bias=False) for _ in range(3)]
    fixed = [torch.randn(1, numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    applied = [torch.zeros(1, numel, dtype=torch.float64) for _ in range(3)]

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, wire="int8", world=world)
        for _ in range(20):
            net.weight.grad = None
            (net.weight * fixed[world.rank]).sum().backward()
            record = sync.reduce(samples=1)
            applied[world.rank] += net.weight.grad
        sync.close()
        return record.algorithm, record.bytes_sent

    kinds = run(3, body)
    assert {algorithm for algorithm, _ in kinds} == {"two-phase"}
    assert kinds[0][1] == pytest.approx(2 * 2 / 3 * numel * (1 + 4 / 256), rel=0.01)
    true = 20 * sum(fixed).double() / 3
    assert torch.equal(applied[0], applied[1])
    # Three ranks' last roundings and the last rounding of the sum, each half a step of its block: far less than 20
    # steps' worth.
    assert float((applied[0] - true).abs().max()) < 4 * 12 / 254


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_bad_gradient_is_named_on_all_ranks_and_poisons_nobody(bad, wire):
    nets = [Net(4, 0) for _ in range(3)]
    before = copy.deepcopy(nets[0].state_dict())

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, wire=wire, bucket_mb=1e-4, world=world)
        step(net, sync, [(*batch(2, world.rank), True)])
        net.zero_grad()
        x, y = batch(2, world.rank)
        poison = net.shared.weight.register_hook(lambda gradient: gradient * (bad if world.rank == 1 else 1.0))
        with pytest.raises(NonFiniteGradient) as told:
            step(net, sync, [(x, y, True)])
        assert all(gradient is None for gradient in gradients(net).values())
        poison.remove()
        step(net, sync, [(x, y, True)])  # the script may go on
        assert all(bool(each.isfinite().all()) for each in gradients(net).values() if each is not None)
        sync.close()
        return str(told.value), (told.value.rank, told.value.parameter, told.value.step)

    told = run(3, body)
    assert len(set(told)) == 1
    assert told[0][1] == (1, "shared.weight", 1)
    for net in nets:
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_second_backward_pass_outside_no_sync_is_an_error_on_all_ranks():
    nets = [Net(4, 0) for _ in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, world=world, bucket_mb=1e-4)
        backward(net, *batch(2, 0), True)
        if world.rank == 1:
            backward(net, *batch(2, 0), True)
        sync.reduce(samples=2)

    told = outcomes(2, body)
    assert all(isinstance(error, MisuseError) for error in told), told
    assert "on rank 1 at step 0 after it was exchanged: wrap all" in str(told[0])
    assert str(told[0]) == str(told[1])


def test_unfreezing_on_one_rank_is_an_error_on_all_ranks():
    nets = [Net(4, 0) for _ in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, world=world)
        if world.rank == 1:
            net.frozen.requires_grad_(True)
        step(net, sync, [(*batch(2, 0), True)])

    told = outcomes(2, body)
    assert all(isinstance(error, MisuseError) for error in told), told
    assert "frozen.weight was frozen and has a gradient on rank 1 at step 0" in str(told[0])


def test_a_rank_that_leaves_is_reported_within_the_deadline():
    nets = [Net(4, 0) for _ in range(2)]

    def body(world):
        sync = AllReduce(nets[world.rank], world=world, timeout=datetime.timedelta(seconds=2))
        if world.rank == 0:
            step(nets[0], sync, [(*batch(2, 0), True)])

    told = outcomes(2, body)
    assert isinstance(told[0], PeerLost), told
    assert "the rank that failed first says why" in str(told[0])


def test_no_samples_anywhere_leaves_no_gradient():
    nets = [Net(4, 0) for _ in range(2)]

    def body(world):
        sync = AllReduce(nets[world.rank], world=world)
        record = sync.reduce(samples=0)
        sync.close()
        return record.global_samples, record.loss

    assert run(2, body) == [(0, 0), (0, 0)]
    assert all(gradient is None for gradient in gradients(nets[0]).values())


def test_alone_it_is_the_plain_loop():
    net = Net(4, 0)
    sync = AllReduce(net, wire="int8", world=World.solo())
    micro_batches = [(*batch(3, i), bool(i)) for i in range(2)]
    record = step(net, sync, micro_batches)
    expected, loss = one_process(net, micro_batches)
    assert record.loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients(net).items():
        assert (gradient is None) == (expected[name] is None)
        if gradient is not None:
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-5, atol=1e-7)
    net.zero_grad()
    (net.leave.weight * float("nan")).sum().backward()
    with pytest.raises(NonFiniteGradient, match=r"leave\.weight is NaN or Inf on rank 0 at step 1"):
        sync.reduce(samples=1)


def test_weights_that_drifted_are_rank_0s_again_after_align_every_steps():
    nets = [Net(4, 0) for _ in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, world=world, align_every=2)
        step(net, sync, [(*batch(2, 0), True)])
        if world.rank == 1:
            with torch.no_grad():
                net.enter.weight.mul_(1 + 1e-6)
        before = float(net.enter.weight.detach().sum())
        step(net, sync, [(*batch(2, 0), True)])
        sync.close()
        return before

    before = run(2, body)
    assert before[0] != before[1]
    assert torch.equal(nets[0].enter.weight, nets[1].enter.weight)
