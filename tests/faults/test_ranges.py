"""A range of nodes: the job runs with the least, and ends when those that came are done."""

from __future__ import annotations

from pathlib import Path

from harness import run, write_script

from hetdeploy.network.probe import free_port


def test_a_head_alone_is_enough_for_one_to_three(tmp_path: Path) -> None:
    write_script(
        tmp_path, "import torch.distributed as d\nd.init_process_group('gloo')\nprint('world', d.get_world_size())\n"
    )
    ports = ("--port", str(free_port()), "--store-port", str(free_port()))
    code, text = run("up", "--native", "--nic", "lo", "--nodes", "1:3", *ports, "job.py", cwd=tmp_path)
    assert code == 0, text
    assert "waiting for 0 to 2 more" in text
    assert "rank 0 | world 1" in text
    assert "1 rank on 1 node finished" in text
