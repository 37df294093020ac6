"""A job as the head's settings would make it, for tests that need one to ask about."""

from __future__ import annotations

from typing import Any

from hetdeploy.nodes.bundle import Bundle
from hetdeploy.nodes.job import Job


def sample_job(**fields: Any) -> Job:
    """With these fields instead of its own."""
    own: dict[str, Any] = {
        "id": "j1",
        "script": "train.py",
        "arguments": (),
        "nodes": "2",
        "nproc_per_node": 1,
        "backend": "gloo",
        "link": "tunnel",
        "head_address": "192.168.1.10",
        "link_port": 29400,
        "store_port": 29500,
        "join_timeout": 60.0,
        "exit_timeout": 60.0,
        "torch": "2.13.0",
        "bundle": Bundle(()),
    }
    return Job(**(own | fields))
