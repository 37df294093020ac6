"""The soak, some seconds of it; that it finds a bridge that leaks or alters what it carries; and what a face leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import soak_bridge
from peers import Job

from hetdeploy.gloo.dialect import Dialect

RELAYS_LEFT_OPEN = """
kept = []

class Keeping(bridge.Relay):
    def __init__(self, near, far, *directions):
        kept.append(near.dup())
        super().__init__(near, far, *directions)

bridge.Relay = Keeping
"""

PAYLOAD_ALTERED = """
def altering(codec):
    unaltered = codec.feed

    def feed(data):
        chunks = unaltered(data)
        if chunks and len(chunks[-1]) > 20_000:  # no header
            chunks[-1] = bytes(chunks[-1][:-1]) + bytes([chunks[-1][-1] ^ 0xFF])
        return chunks

    codec.feed = feed
    return codec

right = bridge.codecs
bridge.codecs = lambda *arguments: tuple(altering(codec) for codec in right(*arguments))
"""

FACES = """
import threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for turn in range(5):
    group = dist.new_group()
    total = torch.tensor([turn])
    dist.all_reduce(total, group=group)
    assert total.item() == 2 * turn
    dist.barrier(group)
    dist.destroy_process_group(group)
dist.barrier()
dist.destroy_process_group()
deadline = time.monotonic() + 10
for thread in threading.enumerate():
    if thread.name.startswith("face"):
        thread.join(deadline - time.monotonic())
        assert not thread.is_alive(), thread
"""


def test_holds_no_more_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    soak_bridge.main(["10", "--json", str(tmp_path / "soak.json")])
    printed, result = capfd.readouterr().out, json.loads((tmp_path / "soak.json").read_text())
    assert not result["problems"]
    assert "Verdict: " in printed
    row = result["minutes"][0]
    assert row["groups"] > 5
    assert row["operations"] > row["groups"]
    assert row["megabytes"] > 1
    assert set(row["processes"]) == {soak_bridge.BRIDGE, soak_bridge.RENDEZVOUS, *soak_bridge.RANKS}
    assert row["processes"][soak_bridge.BRIDGE]["memory_mb"] < 100, "it has imported torch"
    # Memory needs longer than this to show anything but the warm-up.
    counts = [comparison for comparison in result["comparisons"] if "memory" not in comparison["quantity"]]
    assert len(counts) == 8
    assert not [comparison for comparison in counts if comparison["grows"]], printed


def test_finds_a_bridge_that_leaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_altered(RELAYS_LEFT_OPEN, tmp_path) == 1
    assert "GROWS bridge: descriptors" in capfd.readouterr().out


def test_finds_a_bridge_that_alters_a_payload(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_altered(PAYLOAD_ALTERED, tmp_path) == 1
    assert "a wrong answer from" in capfd.readouterr().out


def test_memory_is_compared() -> None:
    samples = [
        soak_bridge.Sample(float(second), 0, 0, 0.0, {"bridge": soak_bridge.Reading(40 + second / 10, 19, 7)})
        for second in range(1, 101)
    ]
    growing = [comparison.quantity for comparison in soak_bridge.compare(samples) if comparison.grows]
    assert growing == ["memory, MB"]


def test_faces_end_with_their_groups() -> None:
    command = [sys.executable, "-c", FACES]
    with Job(2) as job:
        face = {"HETDEPLOY_FACE": "uv", "HETDEPLOY_SOCKADDR": "darwin"}
        job.start_bridged(1, job.bridge(Dialect.UV), *command, **face)
        job.start(0, *command, HETDEPLOY_JOB="test")
        job.wait().check()


def run_altered(alteration: str, folder: Path) -> int:
    """A soak whose bridge's process runs ``alteration`` first."""
    program = folder / "member.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(soak_bridge.PARTS.parent)!r})\n"
        f"import bench_bridge_parts\nfrom hetdeploy.gloo import bridge\n{alteration}\n"
        "bench_bridge_parts.member(*sys.argv[1:])\n"
    )
    return soak_bridge.main(["8"], member=(sys.executable, str(program)))
