"""What torchrun is called with, in a fixed world and in a crew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_job import sample_job

from hetdeploy.nodes.launch import Node, agent_spec

FOLDER = Path("/runs/j1/mac")
JOB = sample_job(nodes="1:4", arguments=("--epochs", "3"))


def node(role: str = "joiner") -> Node:
    return Node(
        name="mac",
        role=role,
        rendezvous="127.0.0.1:51234",
        local_address="node-mac",
        gloo_interface="lo0",
        nproc_per_node=1,
        accelerator="mps",
        dialect="uv",
        folder=FOLDER,
        bridge="/tmp/bridge",
    )


def test_the_nodes_of_a_fixed_world_meet_in_the_jobs_store() -> None:
    spec = agent_spec(JOB, node())
    conf = "is_host=0,join_timeout=60,last_call_timeout=10,keep_alive_interval=5,keep_alive_max_attempt=24"
    assert spec.arguments == [
        "--nnodes=1:4",
        "--rdzv-endpoint=127.0.0.1:51234",
        "--rdzv-id=j1",
        f"--rdzv-conf={conf}",
        "--local-addr=node-mac",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--max-restarts=0",
        "--log-dir=/runs/j1/mac/logs",
        "--tee=3",
        str(FOLDER / "work" / "train.py"),
        "--epochs",
        "3",
    ]
    assert not [name for name in spec.env if "CREW" in name]


@pytest.mark.parametrize(("role", "in_crew"), [("head", "leader"), ("joiner", "helper")])
def test_each_node_of_a_crew_is_a_world_of_its_own(role: str, in_crew: str) -> None:
    spec = agent_spec(replace(JOB, crew=True), node(role))
    assert spec.arguments[:5] == [
        "--nnodes=1",
        "--rdzv-endpoint=/runs/j1/mac/rendezvous",
        "--rdzv-id=j1-mac",
        "--rdzv-conf=store_type=file,keep_alive_interval=86400",
        "--local-addr=127.0.0.1",
    ]
    assert spec.env["HETDEPLOY_CREW_ROLE"] == in_crew
    assert spec.env["HETDEPLOY_CREW_STORE"] == "127.0.0.1:51234"
