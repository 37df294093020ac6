import copy
import datetime
import math
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hetdeploy.train import crew as crew_module
from hetdeploy.train.assist import Assist
from hetdeploy.train.crew import Crew, join
from hetdeploy.train.errors import LayoutMismatch, MisuseError, NonFiniteGradient, PeerLost
from hetdeploy.train.shares import MARGIN, Pace, split

DEADLINE = 60.0
PATIENT = 1e6  # shares of these tests take a millisecond: "in time" must not depend on how busy the machine is


def evenly(micros, _leader, paces):
    """Shares that do not depend on measured times, which mean nothing here."""
    return [micros // (len(paces) + 1)] * len(paces)


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.unused = nn.Linear(7, 2)
        self.leave = nn.Linear(7, 3)

    def forward(self, x):
        x = self.frozen(torch.tanh(self.enter(x)))
        return self.leave(x + self.norm.running_mean)


def micro_batch(step, micro):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    samples = (step + micro) % 4
    return torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator)


def train(net, assist, steps, applied=None, visit=None):
    """The loop of the module's text. Returns this machine's records."""
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.05)
    records = []
    with assist:
        for step in assist.steps(steps):
            if visit is not None:
                visit(step)
            for micro in step:
                x, y = micro_batch(step.number, micro)
                if len(x):
                    loss = functional.cross_entropy(net(x), y, reduction="sum")
                    loss.backward()
                    step.count(len(x), loss)
            if step.reduce() is not None:
                optimizer.step()
                optimizer.zero_grad()
            records.append(step.record)
    assert assist.leads or not optimizer.state, "a helper holds no optimizer state"
    return records


def in_crew(helpers, lead, help_):
    """``lead(store)`` and as many ``help_(store, i)`` in threads; the outcomes, the leader's first."""
    store = dist.HashStore()
    outcomes = [TimeoutError("still running") for _ in range(helpers + 1)]

    def main(i):
        try:
            outcomes[i] = lead(store) if i == 0 else help_(store, i)
        except BaseException as error:
            outcomes[i] = error

    threads = [threading.Thread(target=main, args=(i,), daemon=True) for i in range(helpers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return outcomes


def expect(outcomes):
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def alone(net, steps, micro_batches):
    return train(net, Assist(net, micro_batches=micro_batches, crew=Crew.alone()), steps)


def crew_of(store, leads):
    return Crew(leads, store)


@settings(max_examples=8)
@given(
    micro_batches=st.integers(4, 9),
    helpers=st.integers(1, 3),
    wire=st.sampled_from(["fp32", "bf16", "int8"]),
    late=st.sampled_from(["redo", "drop"]),
)
def test_every_loss_is_that_of_the_leader_alone_with_the_same_global_batch(micro_batches, helpers, wire, late):
    steps = 12
    expected = alone(Net(), steps, micro_batches)
    nets = [Net(seed=i) for i in range(helpers + 1)]
    arguments = {"micro_batches": micro_batches, "wire": wire, "late": late}

    def lead(store):
        assist = Assist(nets[0], patience=PATIENT, split=evenly, crew=crew_of(store, True), **arguments)
        assist.wait_for(helpers, DEADLINE)
        return train(nets[0], assist, steps)

    def help_(store, i):
        return train(nets[i], Assist(nets[i], crew=crew_of(store, False), **arguments), steps)

    records = expect(in_crew(helpers, lead, help_))[0]
    tolerance = {"fp32": 1e-4, "bf16": 2e-2, "int8": 2e-2}[wire]
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=tolerance)
    assert [record.global_samples for record in records] == [record.global_samples for record in expected]
    assert {record.algorithm for record in records} == {f"assist {helpers}/{helpers}"}


def test_200_steps_with_fp32_agree_to_rounding():
    expected = alone(Net(), 200, 6)
    nets = [Net(0), Net(1)]

    def lead(store):
        assist = Assist(
            nets[0], micro_batches=6, wire="fp32", patience=PATIENT, split=evenly, crew=crew_of(store, True)
        )
        assist.wait_for(1, DEADLINE)
        return train(nets[0], assist, 200)

    def help_(store, _):
        return train(nets[1], Assist(nets[1], micro_batches=6, wire="fp32", crew=crew_of(store, False)), 200)

    records, helped = expect(in_crew(1, lead, help_))
    assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=1e-3)
    assert {record.algorithm for record in records} == {"assist 1/1"}
    assert [record.step for record in helped] == list(range(200))
    assert {record.rank for record in helped} == {1}
    samples = [mine.samples + theirs.samples for mine, theirs in zip(records, helped, strict=True)]
    assert samples == [record.global_samples for record in records]


@pytest.mark.parametrize("late", ["redo", "drop"])
def test_a_late_helper_costs_its_share_of_that_step_only(late):
    """The helper stops in step 3 until the leader has finished it, and is then one step behind."""
    steps, stuck = 8, 3
    expected = alone(Net(), steps, 4)
    nets = [Net(0), Net(1)]
    over, caught_up = threading.Event(), threading.Event()

    def lead(store):
        assist = Assist(
            nets[0], micro_batches=4, wire="fp32", late=late, patience=1000, split=evenly, crew=crew_of(store, True)
        )
        assist.wait_for(1, DEADLINE)
        member = []

        def visit(step):
            if step.number == 0:
                member.append(assist._part._members[0])
            if step.number == stuck + 1:
                # The late gradient has to have arrived for the helper to be free again in the next step.
                over.set()
                member[0].result.result(DEADLINE)

        return train(nets[0], assist, steps, visit=visit)

    def help_(store, _):
        def visit(step):
            if step.number == stuck:
                assert over.wait(DEADLINE)

        train(nets[1], Assist(nets[1], micro_batches=4, wire="fp32", crew=crew_of(store, False)), steps, visit=visit)
        caught_up.set()

    records = expect(in_crew(1, lead, help_))[0]
    samples = [record.global_samples for record in records]
    whole = [record.global_samples for record in expected]
    assert caught_up.is_set()
    if late == "redo":
        assert samples == whole
        assert [record.loss for record in records] == pytest.approx([record.loss for record in expected], rel=1e-3)
    else:
        # The divisor is the count of what arrived.
        assert samples[stuck] < whole[stuck]
        assert samples[stuck] == records[stuck].samples
        assert [*samples[:stuck], *samples[stuck + 1 :]] == [*whole[:stuck], *whole[stuck + 1 :]]
    assert records[stuck].algorithm == "assist 0/1"
    assert any(record.algorithm == "assist 1/1" for record in records[stuck + 2 :]), "it never came back into step"


def test_a_helper_that_leaves_is_missed_for_one_step_and_another_may_come():
    steps, leaves = 30, 3
    expected = alone(Net(), steps, 4)
    nets = [Net(0), Net(1), Net(2)]
    left, second = threading.Event(), threading.Event()

    def lead(store):
        assist = Assist(nets[0], micro_batches=4, wire="fp32", patience=1000, split=evenly, crew=crew_of(store, True))
        assist.wait_for(1, DEADLINE)

        def visit(step):
            if step.number == 10:
                second.set()
                assist.wait_for(1, DEADLINE)

        return train(nets[0], assist, steps, visit=visit)

    def help_(store, i):
        if i == 2:
            assert second.wait(DEADLINE)
        assist = Assist(nets[i], micro_batches=4, wire="fp32", crew=crew_of(store, False))
        if i == 2:
            return train(nets[i], assist, steps)
        for step in assist.steps(steps):
            for _ in step:
                pass
            if step.number == leaves:
                break
            step.reduce()
        left.set()
        return None  # with the last reference its group's connections close, as they would with its process

    outcomes = expect(in_crew(2, lead, help_))
    records = outcomes[0]
    assert [record.global_samples for record in records[10:]] == [record.global_samples for record in expected[10:]]
    assert len(records) == steps
    assert {record.algorithm for record in records[leaves + 1 : 10]} == {"assist 0/0"}
    assert "assist 1/1" in {record.algorithm for record in records[10:]}


@pytest.mark.parametrize("bad_at", [0, 1])
def test_a_bad_gradient_is_named_on_both_and_no_weight_changes(bad_at):
    nets = [Net(0), Net(1)]
    seen = {}

    def poisoned(net, assist):
        for step in assist.steps(5):
            if assist.leads and step.number == 2:
                seen["before"] = copy.deepcopy(net.state_dict())
            for micro in step:
                x, y = micro_batch(1, micro + 1)
                loss = functional.cross_entropy(net(x), y, reduction="sum") if len(x) else net.leave.bias.sum() * 0
                if step.number == 2 and assist.leads == (bad_at == 0):
                    loss = loss + net.leave.weight.sum() * float("inf")
                loss.backward()
                step.count(len(x), loss)
            if step.reduce() is not None:
                with torch.no_grad():
                    net.leave.weight.sub_(net.leave.weight.grad)
                net.zero_grad()

    def lead(store):
        with Assist(nets[0], micro_batches=3, patience=PATIENT, split=evenly, crew=crew_of(store, True)) as assist:
            assist.wait_for(1, DEADLINE)
            poisoned(nets[0], assist)

    def help_(store, _):
        poisoned(nets[1], Assist(nets[1], micro_batches=3, crew=crew_of(store, False)))

    told = in_crew(1, lead, help_)
    assert all(isinstance(error, NonFiniteGradient) for error in told), told
    assert str(told[0]) == str(told[1])
    assert (told[0].rank, told[0].parameter, told[0].step) == (bad_at, "leave.weight", 2)
    assert all(torch.equal(value, seen["before"][name]) for name, value in nets[0].state_dict().items())


def test_another_model_is_refused_and_the_leader_goes_on(caplog):
    refused = threading.Event()
    net = Net(0)

    def lead(store):
        assist = Assist(net, micro_batches=2, crew=crew_of(store, True))
        assert refused.wait(DEADLINE)
        return train(net, assist, 3)

    def help_(store, _):
        try:
            Assist(nn.Linear(5, 3), micro_batches=2, crew=crew_of(store, False))
        finally:
            refused.set()

    outcomes = in_crew(1, lead, help_)
    assert isinstance(outcomes[1], LayoutMismatch)
    assert "'parameter enter.weight (7, 5) float32' against 'parameter weight (3, 5) float32'" in str(outcomes[1])
    assert len(outcomes[0]) == 3


def test_frozen_parameters_and_buffers_are_the_leaders():
    nets = [Net(0), Net(1)]
    with torch.no_grad():
        nets[0].norm.running_mean.fill_(0.5)

    def lead(store):
        assist = Assist(nets[0], micro_batches=2, patience=PATIENT, split=evenly, crew=crew_of(store, True))
        assist.wait_for(1, DEADLINE)
        train(nets[0], assist, 2)

    def help_(store, _):
        train(nets[1], Assist(nets[1], micro_batches=2, crew=crew_of(store, False)), 2)

    expect(in_crew(1, lead, help_))
    assert torch.equal(nets[0].frozen.weight, nets[1].frozen.weight)
    assert torch.equal(nets[1].norm.running_mean, torch.full((7,), 0.5))


def test_a_helper_without_a_leader_says_so_within_its_deadline():
    with pytest.raises(PeerLost, match="no leader answered within 0 s: start the leader"):
        join(dist.HashStore(), Net(), [], datetime.timedelta(seconds=0.3))


def test_a_leader_that_waits_says_who_is_missing():
    assist = Assist(Net(), micro_batches=2, crew=crew_of(dist.HashStore(), True))
    with assist, pytest.raises(PeerLost, match="0 of 2 helpers came within 0 s"):
        assist.wait_for(2, timeout=0.1)


def test_a_step_that_is_not_reduced_is_an_error():
    assist = Assist(Net(), micro_batches=2, crew=Crew.alone())
    with pytest.raises(MisuseError, match="step 0 was not reduced"):
        for _ in assist.steps(2):
            pass


def test_a_crew_is_found_in_the_environment(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert Crew.current() == Crew(True, None)
    monkeypatch.setenv(crew_module.STORE_VARIABLE, f"127.0.0.1:{server.port}")
    monkeypatch.setenv(crew_module.ROLE_VARIABLE, "helper")
    crew = Crew.current()
    assert not crew.leads
    crew.store.set("a", "b")
    assert server.get("a") == b"b"
    monkeypatch.setenv(crew_module.ROLE_VARIABLE, "boss")
    with pytest.raises(MisuseError, match="use leader or helper"):
        Crew.current()
    monkeypatch.delenv(crew_module.STORE_VARIABLE)
    with pytest.raises(MisuseError, match="a helper needs a leader"):
        Crew.current("helper")


# --- shares: pure arithmetic ---

times = st.floats(0.001, 10.0)


@given(
    micros=st.integers(1, 64),
    leader=times,
    paces=st.lists(st.builds(Pace, times, st.floats(0, 5)), max_size=4),
)
def test_shares_leave_the_leader_something_and_arrive_before_it_is_through(micros, leader, paces):
    shares = split(micros, leader, paces)
    own = micros - sum(shares)
    assert own >= 1
    for share, pace in zip(shares, paces, strict=True):
        assert share == 0 or share * pace.per_micro + pace.link <= own * leader * (1 - MARGIN) * (1 + 1e-6)


@given(micros=st.integers(8, 64), k=st.floats(1, 8), link=st.floats(0, 0.5))
def test_one_helper_gets_the_largest_share_that_is_in_time(micros, k, link):
    (share,) = split(micros, 1.0, [Pace(k, link)])
    more = share + 1
    assert more * k + link > (micros - more) * (1 - MARGIN) - 1e-6 or more == micros


def test_the_gain_is_the_formula_of_the_design():
    """Whole micro-batches aside, throughput is 1 + (1/k)(1 - L/W) of the leader's alone."""
    micros, k, link = 10_000, 4.0, 500.0
    (share,) = split(micros, 1.0, [Pace(k, link)], margin=0.0)
    ready = micros - share
    assert micros / ready == pytest.approx(1 + (1 / k) * (1 - link / ready), rel=1e-3)


def test_who_has_not_been_measured_gets_one_and_who_is_too_slow_none():
    assert split(8, None, [Pace(), Pace()]) == [1, 1]
    assert split(2, None, [Pace(), Pace()]) == [1, 0]
    assert split(8, 1.0, [Pace(), Pace(1.0, 0.0)])[0] == 1
    assert split(8, 1.0, [Pace(9.0, 0.0)]) == [0]
    assert split(8, 1.0, [Pace(1.0, 9.0), Pace(1.0, 0.0)]) == [0, 3]
    assert split(1, 1.0, [Pace(0.01, 0.0)]) == [0]


def test_a_change_of_pace_is_followed_within_a_few_steps():
    pace = Pace()
    for _ in range(5):
        pace.measured(2, compute=2.0, round_trip=2.5)
    assert (pace.per_micro, pace.link) == (1.0, 0.5)
    steps = 0
    while not math.isclose(pace.per_micro, 4.0, rel_tol=0.1):
        pace.measured(2, compute=8.0, round_trip=8.5)
        steps += 1
    assert steps <= 7
