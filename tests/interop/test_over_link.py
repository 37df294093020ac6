"""The whole way: real ``uv`` gloo, store wrapper, bridge, TLS link, stock torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import operations
import pytest
from peers import COLLECTIVES, LARGEST_BYTES, Job, run_operations

from hetdeploy.gloo.dialect import Dialect
from hetdeploy.link.client import LinkClient
from hetdeploy.link.credentials import Credentials
from hetdeploy.link.server import LinkServer, Member


class Head:
    """Lets the joiner in and dials on its behalf wherever it wants: the job's rules are tested elsewhere."""

    def admit(self, role: str, hello: dict[str, Any], peer: str) -> dict[str, Any]:
        return {}

    def connected(self, member: Member) -> None:
        pass

    def message(self, member: Member, msg: dict[str, Any]) -> None:
        pass

    def lost(self, member: Member, reason: str) -> None:
        pass

    def dial_address(self, member: Member, host: str, port: int) -> tuple[str, int]:
        return host, port

    def file(self, member: Member, digest: str) -> Path:
        raise AssertionError("no files here")


@pytest.fixture
def link(tmp_path: Path) -> Iterator[LinkClient]:
    credentials = Credentials.create(tmp_path / "link", 600)
    server = LinkServer(tmp_path / "link", ("127.0.0.1", 0), Head())
    server.start()
    client = LinkClient.connect(credentials.invitation("joiner", "127.0.0.1", server.port), "joiner", {})
    yield client
    client.close()
    server.close()


def test_uv_rank_over_the_link(link: LinkClient) -> None:
    script = operations.mixed_traffic(2, LARGEST_BYTES // 4)
    run_operations([1], 2, script, "127.0.0.1", "127.0.0.2", dial=link.dial).check()


def test_all_collectives_over_the_link(link: LinkClient) -> None:
    """The store goes over the link too; the mac's layout all the way to the bridge."""
    command = [sys.executable, str(COLLECTIVES), "--max-mb", "20"]
    with Job(2) as job:
        face = {"HETDEPLOY_FACE": "uv", "HETDEPLOY_SOCKADDR": "darwin"}
        job.start_bridged(1, job.bridge(Dialect.UV, dial=link.dial), *command, **face)
        job.start(0, *command, HETDEPLOY_JOB="test")
        job.wait().check()
