"""The self-test in both address layouts, and with a bridge that is wrong; and the face that it uses on a Mac."""

from __future__ import annotations

import json

import operations
import pytest
from peers import HERE, Job, LineStore, bridged_store, pygloo_python

from hetdeploy.gloo import selftest
from hetdeploy.gloo.dialect import Dialect, Layout
from hetdeploy.gloo.face import LinuxFace
from hetdeploy.gloo.store import PassingStore


@pytest.mark.parametrize("layout", Layout)
def test_passes(layout: Layout) -> None:
    report = selftest.run(layout)
    assert report.problem is None
    assert report.ok
    assert len(report.checks) == 7
    assert report.torch.startswith("2.")


def test_finds_a_bridge_that_speaks_the_wrong_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wrong platform or a changed torch would look like."""
    right = selftest.BridgeService
    monkeypatch.setattr(selftest, "BridgeService", lambda dial, _, node: right(dial, Dialect.TCP, node=node))
    report = selftest.run(Layout.LINUX)
    assert not report.ok
    assert "rank 1" in report.problem


def test_both_ranks_of_a_mac() -> None:
    """The pair of a Mac's self-test: two real uv gloos, one as it is behind the bridge, one with a Linux face."""
    script = [operation for operation in operations.mixed_traffic(2, 4_000_000) if operation["op"] != "send"]
    with Job(2) as job:
        faced = LinuxFace(PassingStore(job.group_store()), 0, 2, Layout.LINUX)
        stores = [LineStore(faced), LineStore(bridged_store(job, job.bridge(Dialect.UV), 1))]
        for rank, store in enumerate(stores):
            program = [str(pygloo_python()), str(HERE / "uv_rank.py"), str(store.port)]
            job.start(rank, *program, str(rank), "2", "127.0.0.1", json.dumps(script))
        result = job.wait()
        for store in stores:
            store.close()
    result.check()
