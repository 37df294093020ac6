"""scripts/bench_bridge.py: every way carries right sums, and the result has its shape. Never how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_bridge
import bench_bridge_parts
import pytest

SCRIPT = Path(bench_bridge.__file__)
DEADLINE = 150  # seconds; it takes about 12 on a machine that does nothing else


@pytest.mark.lan
@pytest.mark.parametrize("flags", [[], ["--face", "--one-way"]], ids=["as-it-is", "face"])
def test_quick(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-W", "error::ResourceWarning", str(SCRIPT), "--quick", "--json", str(file), *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr
    result = json.loads(file.read_text())
    assert result["schema_version"] == bench_bridge.SCHEMA_VERSION
    assert (result["rate"], result["megabytes"], result["rounds"]) == ("1gbit", 4.0, 2)
    if flags:
        assert (result["uv_rank"], result["operation"]) == ("torch behind a uv face", "broadcast")
    parts = {way["name"]: [relay["part"] for relay in way["relays"]] for way in result["ways"]}
    direct, tls = ["bridge"], ["bridge", "server"]
    assert parts == {"stock": [], "tcp-direct": direct, "uv-direct": direct, "tcp-tls": tls, "uv-tls": tls}
    for way in result["ways"]:
        least, most = way["ratio_range"]
        assert 0 < least <= way["ratio"] <= most
        assert way["mb_per_s"] > 0
        assert way["name"] in run.stdout
        for relay in way["relays"]:
            # Memory is no matter of the machine's mood.
            assert 0 < relay["peak_mb_above_bare"] < result["memory_target_mb"]
    assert result["ways"][0]["ratio_range"] == [1.0, 1.0]


def test_turns_go_there_and_back_again() -> None:
    names = [(turn, setup["name"]) for turn, setup in bench_bridge_parts.schedule([{"name": "a"}, {"name": "b"}], 2)]
    assert names == [(0, "b"), (0, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "a")]


@pytest.mark.parametrize("operation", bench_bridge.CARRIED)
def test_a_wrong_result_is_noticed(operation: str) -> None:
    """A group that does nothing: what a relay that loses or repeats bytes could look like."""
    import torch

    class Nothing:
        def allreduce(self, tensors: list[torch.Tensor]) -> Nothing:
            return self

        def broadcast(self, tensor: torch.Tensor, root: int) -> Nothing:
            return self

        def wait(self) -> None:
            pass

    with pytest.raises(SystemExit, match="rank 1 got a wrong result"):
        bench_bridge_parts.perform(operation, Nothing(), 1, torch.arange(10.0))
