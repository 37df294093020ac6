import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetdeploy.train.balance import HYSTERESIS, PROBE_EVERY, Balancer, fastest, gather_seconds, step_seconds
from hetdeploy.train.errors import MisuseError

from .ranks import run

paces = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def simulate(balancer, pace, steps, jitter=0.0, seed=0):
    """So many steps on machines of this pace; the shares that each step was computed with."""
    noise = random.Random(seed)
    used = []
    for _ in range(steps):
        used.append(list(balancer.shares))
        balancer.update(
            [
                share * seconds * noise.uniform(1 - jitter, 1 + jitter)
                for share, seconds in zip(balancer.shares, pace, strict=True)
            ]
        )
    return used


# --- the rule ---


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3), st.integers(1, 8), st.integers(0, 1))
def test_fastest_is_the_best_of_all_splits(pace, micros, least):
    assume(micros >= least * len(pace))
    shares = fastest(micros, pace, least)
    every = itertools.product(range(least, micros + 1), repeat=len(pace))
    best = min(step_seconds(split, pace) for split in every if sum(split) == micros)
    assert sum(shares) == micros
    assert min(shares) >= least
    assert step_seconds(shares, pace) == best


def test_a_rank_too_slow_for_one_micro_batch_gets_none():
    assert fastest(8, [1.0, 9.0]) == [8, 0]
    assert fastest(8, [1.0, 7.5]) == [7, 1]
    assert fastest(8, [1.0, 9.0], least=1) == [7, 1]


# --- the balancer ---


@given(paces, st.integers(1, 64), st.integers(0, 1), st.floats(0, 0.5), st.integers(0, 99))
def test_shares_always_sum_to_the_batch(pace, micros, least, jitter, seed):
    assume(micros >= least * len(pace))
    balancer = Balancer(len(pace), micros, least=least)
    for shares in simulate(balancer, pace, 120, jitter, seed):
        assert sum(shares) == micros
        assert min(shares) >= least


@given(paces, paces, st.integers(4, 64))
def test_a_few_steps_after_a_change_of_speed_the_step_is_within_hysteresis_of_the_best(before, after, micros):
    ranks = min(len(before), len(after))
    before, after = before[:ranks], after[:ranks]
    assume(max(before + after) / min(before + after) < micros / ranks)  # else a rank is rightly left out, see below
    balancer = Balancer(ranks, micros, least=1)
    simulate(balancer, before, 12)
    simulate(balancer, after, 12)
    best = step_seconds(fastest(micros, after, 1), after)
    # Twelve steps leave 2^-12 of the difference between old and new pace in the average.
    left_over = 2**-12 * max(before) / min(after) * micros
    assert step_seconds(balancer.shares, after) <= best / (1 - HYSTERESIS) * (1 + left_over)


def test_a_machine_that_slows_down_gives_work_away_within_four_steps():
    balancer = Balancer(2, 30)
    simulate(balancer, [1.0, 1.0], 5)
    assert balancer.shares == [15, 15]
    used = simulate(balancer, [1.0, 2.0], 5)
    assert used[4] in ([20, 10], [19, 11])
    assert simulate(balancer, [1.0, 1.0], 5)[4] in ([15, 15], [16, 14])


@given(st.lists(st.floats(1.0, 4.0), min_size=2, max_size=4), st.integers(0, 99))
def test_noise_does_not_make_micro_batches_wander(pace, seed):
    """1 % of noise may tip shares that were on the edge, once. To tip them again it would take 5 %."""
    balancer = Balancer(len(pace), 16)
    simulate(balancer, pace, 20)
    assume(0 not in balancer.shares)  # no probes
    used = simulate(balancer, pace, 40, jitter=0.01, seed=seed)
    assert sum(before != after for before, after in itertools.pairwise(used)) <= 1


def test_a_rank_left_out_is_probed_and_taken_back_when_it_is_fast_again():
    balancer = Balancer(2, 8)
    used = simulate(balancer, [1.0, 20.0], PROBE_EVERY + 5)
    assert used[0] == [4, 4]
    assert used[1] == [8, 0]
    probes = [step for step, shares in enumerate(used) if step and shares[1]]
    assert probes == [PROBE_EVERY + 1]
    assert used[probes[0]] == [7, 1]
    simulate(balancer, [1.0, 1.0], 4 * PROBE_EVERY)
    assert balancer.shares[1] > 0


def test_more_ranks_than_micro_batches_are_all_measured_in_turn():
    balancer = Balancer(5, 3)
    simulate(balancer, [5.0, 4.0, 3.0, 2.0, 1.0], 12)
    assert None not in balancer.pace
    assert sum(balancer.shares) == 3
    assert step_seconds(balancer.shares, [5.0, 4.0, 3.0, 2.0, 1.0]) == 2.0


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_ignored(odd):
    balancer = Balancer(2, 8)
    simulate(balancer, [1.0, 1.0], 3)
    assert balancer.update([4.0, odd]) == [4, 4]
    assert balancer.pace == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Balancer(3, 2, least=1), "2 micro-batches for 3 ranks, at least 1 each"),
        (lambda: Balancer(0, 2), "2 micro-batches for 0 ranks"),
        (lambda: Balancer(2, 0), "0 micro-batches for 2 ranks"),
        (lambda: Balancer(2, 2, smoothing=0), "smoothing=0"),
        (lambda: Balancer(2, 2).update([1.0]), "1 times for 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(MisuseError, match=message):
        make()


@given(paces, paces, st.integers(5, 30))
def test_a_restored_balancer_goes_on_as_if_nothing_had_been(before, after, micros):
    after = (after * len(before))[: len(before)]
    balancer, restored = Balancer(len(before), micros), Balancer(len(before), micros)
    simulate(balancer, before, 3)
    restored.load_state_dict(balancer.state_dict())
    assert simulate(balancer, after, 8) == simulate(restored, after, 8)


def test_state_of_another_world_is_refused():
    with pytest.raises(MisuseError, match="this run has 3 ranks and 8 micro-batches"):
        Balancer(3, 8).load_state_dict(Balancer(2, 8).state_dict())


def test_ranks_agree_without_being_told():
    """Three real ranks, each with a balancer of its own and its own time only."""

    def body(world):
        balancer = Balancer(world.size, 12)
        group = world.open("balance")
        for _ in range(5):
            seconds = balancer.shares[world.rank] * (1.0 + world.rank) / 3
            balancer.update(gather_seconds(group, seconds))
        return balancer.shares

    shares = run(3, body)
    assert shares[0] == shares[1] == shares[2]
    assert step_seconds(shares[0], [1.0, 2.0, 3.0]) == step_seconds(fastest(12, [1.0, 2.0, 3.0]), [1.0, 2.0, 3.0])
