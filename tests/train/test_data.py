import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hetdeploy.train.data import (
    Batches,
    ShareSampler,
    TokenBlocks,
    apportion,
    collate,
    pad,
    parts,
    seed_for,
    shares,
)
from hetdeploy.train.errors import MisuseError

weights_of_ranks = st.lists(st.floats(0, 1e300) | st.integers(0, 9), min_size=1, max_size=6).filter(any)


@st.composite
def plans(draw):
    """A run's batches and weights that go with them."""
    weights = draw(weights_of_ranks)
    size = draw(st.integers(len(weights), 40))
    length = draw(st.integers(size, 300))
    return Batches(
        length, size, seed=draw(st.integers(0, 2**40)), last=draw(st.sampled_from(["keep", "drop"]))
    ), weights


# --- apportion ---


@given(st.integers(0, 10**12), weights_of_ranks)
def test_apportion_sums_exactly_and_is_less_than_one_off(total, weights):
    counts = apportion(total, weights)
    whole = sum(map(Fraction, weights))
    assert sum(counts) == total
    assert all(abs(count - total * Fraction(weight) / whole) < 1 for count, weight in zip(counts, weights, strict=True))
    assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0)


@given(st.integers(1, 50), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_whole_micro_batches_stay_whole(micro, counts):
    assert apportion(micro * sum(counts), counts) == [micro * count for count in counts]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(MisuseError, match="weights"):
        apportion(10, weights)


@given(st.integers(0, 1000), weights_of_ranks)
def test_parts_are_the_whole_in_order(length, weights):
    assert [i for part in parts(length, weights) for i in part] == list(range(length))


# --- shares of a step ---


@given(plans(), st.data())
def test_an_epoch_is_complete_and_disjoint_whatever_the_weights(plan, data):
    """Weights that change at every step included: every sample exactly once in an epoch ('drop': at most once)."""
    batches, weights = plan
    epoch = data.draw(st.integers(0, 3))
    seen = []
    for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
        changed = [weight * data.draw(st.integers(1, 5)) for weight in weights]
        by_rank = batches.shares(step, changed)
        assert [sample for share in by_rank for sample in share] == batches.at(step)
        seen += batches.at(step)
    assert len(seen) == len(set(seen))
    assert len(seen) == (batches.length if batches.last == "keep" else batches.per_epoch * batches.size)
    assert set(seen) <= set(range(batches.length))


@given(plans(), st.integers(0, 500))
def test_shares_are_by_weight(plan, step):
    batches, weights = plan
    by_rank = batches.shares(step, weights)
    assert [len(share) for share in by_rank] == apportion(len(batches.at(step)), weights)


@given(plans(), st.integers(0, 500), st.integers(1, 12))
def test_micro_batches_are_the_step_in_order(plan, step, count):
    batches, _ = plan
    micros = batches.micro_batches(step, count)
    assert len(micros) == count
    assert [sample for micro in micros for sample in micro] == batches.at(step)
    assert max(map(len, micros)) - min(map(len, micros)) <= 1


def test_the_plain_function_counts_steps_within_an_epoch():
    batches = Batches(100, 8, seed=3)
    assert shares(100, 8, [2, 1], seed=3, epoch=2, step=5) == batches.shares(2 * 13 + 5, [2, 1])
    assert [len(share) for share in shares(100, 8, [1, 1], seed=3, epoch=0, step=12)] == [2, 2]
    with pytest.raises(MisuseError, match="step 13 is not in an epoch of 13"):
        shares(100, 8, [2, 1], step=13)


def test_epochs_and_seeds_have_other_orders():
    orders = {
        tuple(sample for step in range(5) for sample in Batches(50, 10, seed).at(5 * epoch + step))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_pinned():
    """Every machine and every torch must agree: a checkpoint's run goes on with these very samples."""
    assert Batches(10, 10, seed=7).at(0) == [8, 9, 3, 7, 2, 5, 0, 4, 1, 6]
    assert seed_for(7, 0) == 3730124918431372671


def test_first_samples_are_spread_evenly():
    """Over many epochs each sample comes first about equally often (chi-square, 9 degrees of freedom, p = 0.001)."""
    batches = Batches(10, 1, seed=0)
    counts = torch.bincount(torch.tensor([batches.at(10 * epoch)[0] for epoch in range(2000)]), minlength=10)
    assert float((counts - 200).square().sum() / 200) < 27.9


@given(st.integers(0, 2**70), st.integers(0, 100), st.integers(0, 100))
def test_seeds_differ_by_part_and_fit_torch(seed, rank, other):
    torch.Generator().manual_seed(seed_for(seed, rank))
    assert (seed_for(seed, rank) == seed_for(seed, other)) == (rank == other)
    assert seed_for(seed, rank, 0) != seed_for(seed, rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batches(3, 4).shares(0, [1, 1, 1, 1]), "a dataset of 3 samples is smaller than the world of 4 ranks"),
        (lambda: Batches(9, 3).shares(0, [1, 1, 1, 1]), "a global batch of 3 samples is smaller than the world of 4"),
        (lambda: ShareSampler(Batches(3, 4), 0, [1] * 4, stop=5), "a dataset of 3 samples is smaller than the world"),
        (lambda: Batches(0, 4), "0 samples in batches of 4"),
        (lambda: Batches(4, 0), "4 samples in batches of 0"),
        (lambda: Batches(3, 4, last="drop"), "3 samples do not fill one batch of 4"),
        (lambda: Batches(8, 4, last="repeat"), "last='repeat' is not known"),
        (lambda: ShareSampler(Batches(8, 4), 2, [1, 1], stop=5), "rank 2 has no weight among 2"),
        (lambda: ShareSampler(Batches(8, 4), 0, [1, 1], start=6, stop=5), "steps from 6 to 5"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(MisuseError, match=message):
        make()


# --- the sampler ---


@given(plans(), st.integers(0, 30), st.integers(0, 30))
def test_all_ranks_take_equally_many_steps_and_their_union_is_each_batch(plan, start, steps):
    batches, weights = plan
    samplers = [ShareSampler(batches, rank, weights, start=start, stop=start + steps) for rank in range(len(weights))]
    by_rank = [list(sampler) for sampler in samplers]
    assert {len(taken) for taken in by_rank} == {steps} == {len(sampler) for sampler in samplers}
    for step in range(steps):
        assert [sample for taken in by_rank for sample in taken[step]] == batches.at(start + step)


@given(plans(), st.integers(0, 20), st.integers(1, 20), st.data())
def test_a_resumed_run_with_another_crew_goes_on_with_the_same_batches(plan, before, after, data):
    batches, weights = plan
    crew = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=min(batches.length, batches.size, 5)))
    first = [list(ShareSampler(batches, rank, weights, stop=before)) for rank in range(len(weights))]
    second = [list(ShareSampler(batches, rank, crew, start=before, stop=before + after)) for rank in range(len(crew))]
    for step in range(before):
        assert [sample for taken in first for sample in taken[step]] == batches.at(step)
    for step in range(after):
        assert [sample for taken in second for sample in taken[step]] == batches.at(before + step)


def test_new_weights_count_from_their_step_on():
    sampler = ShareSampler(Batches(100, 8), 0, [1, 1], stop=6)
    taken = []
    for step, samples in enumerate(sampler):
        taken.append(len(samples))
        if step == 1:
            sampler.reweigh([3, 1], 4)
            sampler.reweigh([7, 1], 5)
            sampler.reweigh([0, 1], 4)  # takes the place of both
    assert taken == [4, 4, 4, 4, 0, 0]


def test_new_weights_for_samples_that_are_already_out_are_refused():
    sampler = ShareSampler(Batches(100, 8), 0, [1, 1], stop=6)
    steps = iter(sampler)
    next(steps), next(steps)
    with pytest.raises(MisuseError, match="weights from step 1 on come too late, samples are out up to step 1"):
        sampler.reweigh([3, 1], 1)
    with pytest.raises(MisuseError, match="3 weights for 2 ranks"):
        sampler.reweigh([3, 1, 1], 2)


def test_a_data_loader_takes_it_and_an_empty_share_is_none():
    dataset = TensorDataset(torch.arange(10))
    batches = Batches(10, 4, seed=1)  # 4, 4, 2
    loaders = [
        DataLoader(dataset, batch_sampler=ShareSampler(batches, rank, [7, 1], stop=6), collate_fn=collate)
        for rank in range(2)
    ]
    for step, (left, right) in enumerate(zip(*loaders, strict=True)):
        got = [batch[0] for batch in (left, right) if batch is not None]
        assert torch.cat(got).tolist() == batches.at(step)
    assert right is None  # an eighth of two samples


def test_a_checkpoint_of_other_batches_is_refused_by_name():
    batches = Batches(100, 8, seed=3)
    batches.load_state_dict(Batches(100, 8, seed=3).state_dict())
    with pytest.raises(MisuseError, match="the checkpoint's batches have seed 4, this run's have 3"):
        batches.load_state_dict(Batches(100, 8, seed=4).state_dict())


# --- token streams ---


@given(st.integers(2, 200), st.integers(1, 30), st.sampled_from([torch.uint8, torch.int16, torch.int64]))
def test_blocks_cover_the_stream_once(length, context, dtype):
    tokens = (torch.arange(length) % 251).to(dtype)
    if length <= context:
        with pytest.raises(MisuseError, match=f"{length} tokens do not fill a block of {context}"):
            TokenBlocks(tokens, context)
        return
    blocks = TokenBlocks(tokens, context)
    samples = [blocks[i] for i in range(len(blocks))]
    used = len(blocks) * context
    assert length - 1 - context < used <= length - 1
    assert torch.equal(torch.cat([inputs for inputs, _ in samples]), tokens[:used].long())
    assert torch.equal(torch.cat([targets for _, targets in samples]), tokens[1 : used + 1].long())
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_several_blocks_at_once_are_the_single_ones():
    blocks = TokenBlocks(torch.arange(100, dtype=torch.uint8), 8)
    inputs, targets = blocks.batch([3, 0, 3])
    assert torch.equal(inputs, torch.stack([blocks[i][0] for i in (3, 0, 3)]))
    assert torch.equal(targets, torch.stack([blocks[i][1] for i in (3, 0, 3)]))
    assert blocks.batch([])[0].shape == (0, 8)


def test_a_stream_that_is_none_is_refused():
    for tokens in (torch.zeros(5, 5, dtype=torch.int64), torch.zeros(50)):
        with pytest.raises(MisuseError, match="give a 1-D tensor of integers"):
            TokenBlocks(tokens, 2)


# --- fixed shapes ---


@given(st.lists(st.integers(0, 99), max_size=8), st.integers(0, 8))
def test_padding_keeps_the_weighted_sum(indices, more):
    size = len(indices) + more
    padded, weights = pad(indices, size)
    assert len(padded) == len(weights) == size
    kept = [index for index, weight in zip(padded, weights.tolist(), strict=True) if weight]
    assert kept == indices
    assert weights.sum() == len(indices)


def test_padding_does_not_cut():
    with pytest.raises(MisuseError, match="3 samples do not fit into 2"):
        pad([1, 2, 3], 2)
