"""What happens at ``import torch``, with and without the launcher's environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hetdeploy.errors import PeerUnreachable, UsageError
from hetdeploy.gloo.bridge import BridgeService
from hetdeploy.gloo.control import BridgeClient
from hetdeploy.gloo.dialect import Dialect, Layout, dialect_here, layout_here
from hetdeploy.gloo.install import forward_master

REPORT = """
import json, os, sys, torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(json.dumps({
    "modules": sorted(name for name in sys.modules if name.startswith("hetdeploy")),
    "class": str(c10d.ProcessGroupGloo.__mro__[:2]),
    "same": dist.ProcessGroupGloo is c10d.ProcessGroupGloo,
    "instance": isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), c10d.ProcessGroupGloo),
    "lazy": os.environ.get("TORCH_GLOO_LAZY_INIT"),
    "master": [os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")],
}))
dist.destroy_process_group()
"""


@pytest.fixture
def bridge() -> Iterator[BridgeService]:
    service = BridgeService(lambda host, port: socket.create_connection((host, port), 5), Dialect.TCP)
    service.start()
    yield service
    service.close()


def imported(**environ: str) -> dict[str, object]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HETDEPLOY_", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=own | environ, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_nothing_happens_without_the_launcher() -> None:
    report = imported(RANK="0")
    assert report["modules"] == ["hetdeploy", "hetdeploy.gloo", "hetdeploy.gloo.install"]
    assert "hetdeploy" not in str(report["class"])
    assert report["same"]


def test_rank_of_the_head_is_guarded() -> None:
    report = imported(HETDEPLOY_JOB="job", TORCH_GLOO_LAZY_INIT="1")
    assert "hetdeploy.gloo.store" in report["modules"]
    assert report["same"]
    assert report["instance"]
    assert report["lazy"] == "0"


def test_worker_of_a_joiner_is_led_to_the_store_by_the_bridge(bridge: BridgeService) -> None:
    environ = {"HETDEPLOY_BRIDGE": str(bridge.path), "HETDEPLOY_JOB": "job"}
    report = imported(**environ, RANK="1", MASTER_ADDR="172.18.0.3", MASTER_PORT="29511")
    host, port = report["master"]
    assert host == "127.0.0.1"
    assert port != "29511"
    # A world of this node alone, as in a crew, has its store on this machine.
    report = imported(**environ, RANK="0", GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    assert report["master"] == ["127.0.0.1", "29511"]
    # torchrun itself is no worker.
    report = imported(**environ, MASTER_ADDR="172.18.0.3", MASTER_PORT="29511")
    assert report["master"] == ["172.18.0.3", "29511"]


def test_master_is_forwarded_once(bridge: BridgeService) -> None:
    """Data loader workers inherit the environment and import torch; a restarted rank gets a new MASTER_PORT."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = str(master.getsockname()[1])
        environ = {"HETDEPLOY_BRIDGE": str(bridge.path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        forward_master(environ)
        forwarded = dict(environ)
        assert forwarded["MASTER_PORT"] != port
        forward_master(environ)
        assert environ == forwarded
        environ |= {"MASTER_PORT": port}
        forward_master(environ)
        assert environ == forwarded  # another rank of this machine: the same forward

        with socket.create_connection(("127.0.0.1", int(forwarded["MASTER_PORT"])), 5) as worker:
            with master.accept()[0] as head:
                worker.sendall(b"ping")
                assert head.recv(4, socket.MSG_WAITALL) == b"ping"
            assert worker.recv(1) == b""


def test_bridge_refuses_with_its_reason(bridge: BridgeService) -> None:
    client = BridgeClient(bridge.path)
    with pytest.raises(PeerUnreachable, match=r"knows no request 'sing'.*one hetdeploy"):
        client.request("offer", token="t", rank=0, size=2, peers={})
        client.request("sing", token="t", peer=1)
    with pytest.raises(PeerUnreachable, match="cannot read a request"):
        client.request("connect", token="of nobody", peer=0)
    client.close()


def test_offers_last_as_long_as_the_connection(bridge: BridgeService) -> None:
    client = BridgeClient(bridge.path)
    client.request("offer", token="t", rank=0, size=2, peers={"1": ["127.0.0.1", 1, 0, 0]})
    assert "t" in bridge._offers
    client.close()
    deadline = time.monotonic() + 5
    while bridge._offers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not bridge._offers


@pytest.mark.parametrize(("platform", "dialect", "layout"), [("darwin", "uv", "darwin"), ("linux", "tcp", "linux")])
def test_platform_decides(monkeypatch: pytest.MonkeyPatch, platform: str, dialect: str, layout: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert dialect_here({}) is Dialect(dialect)
    assert layout_here({}) is Layout(layout)
    assert dialect_here({"HETDEPLOY_DIALECT": "uv"}) is Dialect.UV
    assert layout_here({"HETDEPLOY_SOCKADDR": "linux"}) is Layout.LINUX
    with pytest.raises(UsageError, match="HETDEPLOY_DIALECT=udp is not one of tcp, uv"):
        dialect_here({"HETDEPLOY_DIALECT": "udp"})
