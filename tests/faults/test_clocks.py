"""A joiner whose clock is a minute off: it is told, and the job runs all the same."""

from __future__ import annotations

import re
from pathlib import Path

from harness import SCRIPTS, Command, join_code

from hetdeploy.network.probe import free_port

WRONG_CLOCK = """
import datetime, importlib.util, sys, time

SECONDS = 60
right = time.time
time.time = lambda: right() + SECONDS


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=SECONDS)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.distributed.elastic.rendezvous.dynamic_rendezvous":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.datetime = Shifted

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
"""For every process of the joiner: c10d compares the wall clocks of its nodes to tell which of them are alive."""


def test_a_minute_is_told_and_tolerated(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WRONG_CLOCK)
    script = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "1")
    ports = ("--port", str(free_port()), "--store-port", str(free_port()))
    with Command("up", "--native", "--nic", "lo", *ports, *script, cwd=tmp_path / "head") as up:
        env = {"PYTHONPATH": str(site)}
        with Command("join", join_code(up), cwd=tmp_path / "joiner", env=env) as join:
            assert join.wait(120) == 0, join.text
        assert up.wait() == 0, up.text
    assert re.search(
        r"warning: this machine's clock is (59|60) s ahead of the head's: switch on its network", join.text
    )
    assert re.search(r"versions .* clocks (59\.\d|60\.\d) s apart", join.text)
