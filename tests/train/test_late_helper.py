"""A helper that comes when the leader is through, or almost: it must learn that, and not wait for half an hour."""

import threading

import pytest
import torch
from torch import nn

from hetdeploy.train import crew as crew_module
from hetdeploy.train.assist import Assist
from hetdeploy.train.crew import Crew

from .test_assist import expect, in_crew


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(crew_module, "NEXT_REIGN_SECONDS", 0.5)


def steps_taken(store, leads, steps):
    net, taken = nn.Linear(2, 1), 0
    with Assist(net, micro_batches=2, crew=Crew(leads, store)) as assist:
        for step in assist.steps(steps):
            for _ in step:
                net(torch.ones(1, 2)).sum().backward()
                step.count(1)
            step.reduce()
            net.zero_grad()
            taken += 1
    return taken


def test_a_helper_that_comes_after_the_last_step_ends_too():
    through = threading.Event()

    def lead(store):
        taken = steps_taken(store, True, 3)
        through.set()
        return taken

    def help_(store, _):
        assert through.wait(30)
        return steps_taken(store, False, 3)

    assert expect(in_crew(1, lead, help_)) == [3, 0]


def test_a_helper_that_comes_through_while_the_leader_ends_is_sent_home():
    for steps in range(1, 60, 6):  # so that some end while the helper and the leader meet
        assert expect(in_crew(1, lambda s, n=steps: steps_taken(s, True, n), lambda s, _: steps_taken(s, False, 0)))
