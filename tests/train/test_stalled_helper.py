"""A helper's measured pace must not outlive what made it slow."""

import time

import torch
from torch import nn

from hetdeploy.train.assist import Assist
from hetdeploy.train.crew import Crew

from .test_assist import expect, in_crew

MICRO_BATCHES, STEPS = 8, 40
WORK_SECONDS, STALL_SECONDS = 0.01, 1.0


def train(store, leads, stall):
    """One micro-batch takes ``WORK_SECONDS``, this machine's first one ``stall`` seconds more."""
    net, records = nn.Linear(2, 1), []
    assist = Assist(net, micro_batches=MICRO_BATCHES, patience=0.5, crew=Crew(leads, store))
    with assist:
        if assist.leads:
            assist.wait_for(1)
        for step in assist.steps(STEPS):
            for _ in step:
                time.sleep(WORK_SECONDS + stall)
                stall = 0.0
                net(torch.ones(1, 2)).sum().backward()
                step.count(1)
            records.append(step.reduce())
            net.zero_grad()
    return records


def test_a_helper_whose_first_share_took_long_is_back_within_a_few_steps():
    records, _ = expect(
        in_crew(1, lambda store: train(store, True, 0.0), lambda store, _: train(store, False, STALL_SECONDS))
    )
    assert records[0].samples == MICRO_BATCHES, "the stall should have made it late"
    helped = [record.global_samples - record.samples > 1 for record in records]
    assert sum(helped[STEPS // 2 :]) > STEPS // 4, [record.algorithm for record in records]
