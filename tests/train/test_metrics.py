import json
import sys

import pytest
import torch
from torch import nn

from hetdeploy import plot
from hetdeploy.train.allreduce import AllReduce
from hetdeploy.train.metrics import Metrics, covered, read_metrics
from hetdeploy.train.world import World

from .ranks import run


def measured_run(folder, steps=3):
    nets = [nn.Linear(3, 1) for _ in range(2)]

    def body(world):
        net = nets[world.rank]
        sync = AllReduce(net, wire="bf16", world=world)
        with Metrics(folder, world.rank, tensorboard=False) as metrics:
            for i in range(steps):
                samples = 2 + world.rank
                loss = net(torch.full((samples, 3), float(i))).sum()
                loss.backward()
                metrics.write(sync.reduce(samples, loss), validation=i / 2)
        sync.close()

    run(2, body)


def test_each_rank_writes_one_line_a_step_with_everything_in_it(tmp_path):
    measured_run(tmp_path)
    ranks = [read_metrics(tmp_path / f"metrics-rank{rank}.jsonl") for rank in range(2)]
    for rank, records in enumerate(ranks):
        assert [record["step"] for record in records] == [0, 1, 2]
        assert {record["rank"] for record in records} == {rank}
        assert {record["samples"] for record in records} == {2 + rank}
        assert {record["global_samples"] for record in records} == {5}
        assert {record["bytes_sent"] for record in records} == {2 * 4}
        assert [record["validation"] for record in records] == [0.0, 0.5, 1.0]
        for record in records:
            times = [value for name, value in record.items() if name.endswith("_s")]
            assert len(times) == 5
            assert all(value >= 0 for value in times)
    assert [record["loss"] for record in ranks[0]] == [record["loss"] for record in ranks[1]]


def test_the_times_of_a_step_add_up_to_the_step(tmp_path):
    """By intervals that do not overlap: computing, then exchanging while waiting, then waiting for slower ranks."""
    nets = [nn.Linear(200, 200) for _ in range(2)]

    def body(world):
        sync = AllReduce(nets[world.rank], world=world)
        nets[world.rank](torch.ones(1, 200)).sum().backward()
        began = sync._left
        record = sync.reduce(1)
        whole = sync._left - began
        sync.close()
        return whole, record.compute_s + record.exchange_exposed_s + record.idle_s

    for whole, parts in run(2, body):
        assert parts <= whole
        assert parts == pytest.approx(whole, abs=0.05)


def test_a_run_that_is_resumed_goes_on_in_the_same_file(tmp_path):
    measured_run(tmp_path)
    measured_run(tmp_path)
    assert len(read_metrics(tmp_path / "metrics-rank0.jsonl")) == 6


def test_a_line_that_a_killed_rank_left_unfinished_is_left_out(tmp_path):
    file = tmp_path / "metrics-rank0.jsonl"
    file.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "lo')
    assert read_metrics(file) == [{"step": 0}]


def test_covered_counts_overlapping_spans_once():
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4


def test_alone_nothing_is_sent():
    net = nn.Linear(3, 1)
    sync = AllReduce(net, world=World.solo())
    net(torch.ones(2, 3)).sum().backward()
    record = sync.reduce(2)
    assert (record.bytes_sent, record.idle_s, record.exchange_hidden_s) == (0, 0.0, 0.0)


def test_what_ranks_wrote_can_be_drawn(tmp_path):
    measured_run(tmp_path)
    assert [len(rank.records) for rank in plot.read(tmp_path)] == [3, 3]
    plot.draw(tmp_path, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_events(tmp_path):
    net = nn.Linear(3, 1)
    sync = AllReduce(net, world=World.solo())
    with Metrics(tmp_path) as metrics:
        net(torch.ones(2, 3)).sum().backward()
        metrics.write(sync.reduce(2))
    assert list((tmp_path / "rank0").glob("events.out.tfevents.*"))


def test_without_tensorboard_there_are_json_lines_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it fails
    net = nn.Linear(3, 1)
    sync = AllReduce(net, world=World.solo())
    with Metrics(tmp_path) as metrics:
        net(torch.ones(2, 3)).sum().backward()
        metrics.write(sync.reduce(2))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics-rank0.jsonl"]
