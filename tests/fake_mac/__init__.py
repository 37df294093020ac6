"""A Mac made of the second host of ``two_hosts``, for everything that `hetdeploy join` itself does.

Its interfaces are named en0 and lo0; at their real paths lie programs of macOS that print what was recorded and refuse
all else (tool.py); the process of `join` finds itself on Darwin (site/sitecustomize.py). Its ranks are Linux ranks with
the face of a Mac's gloo, in macOS's address layout.

What it does not show: gloo's own ``uv`` code, the kernel (sockets, processes, /proc) and the file system of macOS, MPS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from two_hosts import TwoHosts, two_hosts

HERE = Path(__file__).parent
RECORDED = HERE.parent / "recorded" / "macos"

ON_WIFI = "networksetup-listallhardwareports.txt"
ON_A_CABLE = "networksetup-listallhardwareports-studio.txt"

HOST_NAME = "Annas-MacBook-Pro.local"
NODE_NAME = "Annas-MacBook-Pro"

_WITH_MACOS_TOOLS = """
root=$1; shift
for folder in "$root"/*/*; do
    mount -t overlay overlay -o "lowerdir=$folder:${folder#"$root"}" "${folder#"$root"}" || exit 125
done
exec "$@"
"""


@dataclass(frozen=True)
class FakeMac:
    """Takes the place of the ``TwoHosts`` that a command is run on. ``env`` is for commands that are to see a Mac."""

    hosts: TwoHosts
    folder: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": str(HERE / "site"), "FAKE_MAC": str(self.folder), "HOME": str(self.home)}

    def command(self, *arguments: str) -> list[str]:
        """``arguments`` as a command line that runs there. Its mounts are its own: `ip netns exec` sees to that."""
        return self.hosts.command("sh", "-c", _WITH_MACOS_TOOLS, "sh", str(self.folder / "root"), *arguments)

    def another_mac(self, name: str) -> FakeMac:
        """At the same address."""
        return replace(self, hosts=self.another_linux(name))

    def another_linux(self, name: str) -> TwoHosts:
        """At the same address."""
        return replace(self.hosts, host_name=name)

    def events(self) -> list[dict[str, Any]]:
        """What tools and ranks left word of, in the order in which it happened: ``what`` says which."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def fake_mac(folder: Path, home: Path, hardware_ports: str = ON_A_CABLE) -> Iterator[FakeMac]:
    """A Mac on a gigabit cable; ``hardware_ports`` is the recording that says what it takes its en0 for.

    ``home`` is the user's, where `join` remembers the self-test of an earlier time.
    """
    with two_hosts(host_name=HOST_NAME) as hosts:
        for step in (("set", "lo", "down"), ("set", "lo", "name", "lo0"), ("set", "lo0", "up")):
            hosts.run("ip", "link", *step).check_returncode()
        _install_tools(folder, hardware_ports)
        yield FakeMac(hosts, folder, home)


def _install_tools(folder: Path, hardware_ports: str) -> None:
    programs: dict[str, dict[str, str]] = {
        "/usr/sbin/networksetup": {"-listallhardwareports": (RECORDED / hardware_ports).read_text()},
        "/sbin/route": {"-n get default": (RECORDED / "route-get-default-wifi.txt").read_text()},
        "/usr/bin/caffeinate": {},
        # Nothing calls these so far: without a recording they refuse, and the tests see it.
        "/sbin/ifconfig": {},
        "/usr/bin/pmset": {},
        "/usr/bin/sw_vers": {},
    }
    for path in map(Path, programs):
        # Where /sbin is a link to /usr/sbin, both are one folder.
        program = folder / "root" / str(path.parent.resolve()).lstrip("/") / path.name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!{sys.executable} -IS\n{(HERE / 'tool.py').read_text()}")
        program.chmod(0o755)
    answers = {Path(path).name: recorded for path, recorded in programs.items()}
    (folder / "answers.json").write_text(json.dumps(answers))
