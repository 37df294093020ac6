"""Checks of this machine's ports, names, firewall and Python."""

from __future__ import annotations

from typing import ClassVar

from hetdeploy.preflight.facts import Facts
from hetdeploy.preflight.report import Result

PYTHON = ((3, 10), (3, 13))
"""The oldest and the newest Python that hetdeploy is tested with."""


class FreePort:
    """Can the head listen where it is told to?"""

    name: ClassVar[str] = "port"

    def run(self, facts: Facts) -> Result | None:
        if facts.address is None:
            return None
        if facts.port_problems:
            first = facts.port_problems[0]
            return Result(self.name, "failure", "; ".join(each.problem for each in facts.port_problems), first.fix)
        return Result(self.name, "ok", f"{facts.address}:{facts.port} is free")


class Network:
    """Is anything about the NIC a trap?"""

    name: ClassVar[str] = "network"

    def run(self, facts: Facts) -> Result | None:
        if not facts.cautions:
            return Result(self.name, "ok", "nothing in the way")
        first, *others = facts.cautions
        return Result(self.name, "warning", "; ".join([*map(str, others), first.problem]), first.fix)


class HostName:
    """Does this machine's own name lead elsewhere? Ubuntu's default does; hetdeploy goes by addresses alone."""

    name: ClassVar[str] = "hostname"

    def run(self, facts: Facts) -> Result | None:
        if facts.hostname is None:
            return Result(self.name, "ok", "this machine's name is no trap")
        return Result(self.name, "warning", facts.hostname.problem, facts.hostname.fix)


class Wsl:
    """Is this a WSL 2 machine that the LAN cannot reach?"""

    name: ClassVar[str] = "wsl"

    def run(self, facts: Facts) -> Result | None:
        if "microsoft" not in facts.kernel.lower() or facts.address is None:
            return None
        if facts.wsl_mode in ("mirrored", "bridged"):
            return Result(self.name, "ok", f"WSL with {facts.wsl_mode} networking")
        return Result(
            self.name,
            "warning",
            f"this is WSL behind a NAT of its own, so no other machine reaches port {facts.port}",
            "write networkingMode=mirrored below [wsl2] in .wslconfig of your Windows user folder, call"
            " `wsl --shutdown`, and open the port in Windows' firewall (New-NetFirewallHyperVRule)",
        )


class Firewall:
    """Does ufw close what joiners have to reach? It does not see what Docker publishes for containers."""

    name: ClassVar[str] = "firewall"

    def run(self, facts: Facts) -> Result | None:
        if not facts.is_ufw_on or facts.address is None:
            return None
        if facts.docker is not None and facts.link == "tunnel":
            text = (
                f"ufw is on and has no say over containers: port {facts.port} of {facts.address} is open to its network"
            )
            return Result(self.name, "ok", text)
        if facts.link == "direct":
            text = "ufw is on and closes the store's and gloo's ports to joiners"
        else:
            text = f"ufw is on and may close port {facts.port} to joiners"
        return Result(self.name, "warning", text, f"`{ufw_command(facts)}`")


class PythonVersion:
    """Is this a Python that hetdeploy is tested with?"""

    name: ClassVar[str] = "python"

    def run(self, facts: Facts) -> Result | None:
        version = ".".join(map(str, facts.python))
        oldest, newest = (".".join(map(str, each)) for each in PYTHON)
        if not PYTHON[0] <= facts.python <= PYTHON[1]:
            return Result(
                self.name,
                "failure",
                f"this is Python {version}",
                f"install hetdeploy with one from {oldest} to {newest}",
            )
        return Result(self.name, "ok", f"Python {version}")


class TorchVersion:
    """Can a rank run in this environment? Only asked where ranks are native."""

    name: ClassVar[str] = "torch"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is not None:
            return None
        wanted = f"`pip install torch=={facts.torch_version}`"
        if facts.torch is None:
            return Result(self.name, "failure", "torch is not installed in this environment", wanted)
        line = facts.torch_version.split(".")[:2]
        if facts.torch.split(".")[:2] != line:
            return Result(self.name, "failure", f"torch {facts.torch} is not of the {'.'.join(line)} line", wanted)
        return Result(self.name, "ok", f"torch {facts.torch}")


def ufw_command(facts: Facts) -> str:
    """The narrowest rule that lets joiners in: from the head's own network, to its address alone."""
    scope = f"from {facts.subnet or 'any'} to {facts.address}"
    if facts.link == "direct":
        # gloo listens on a port that the kernel picks; there is none to name.
        return f"sudo ufw allow proto tcp {scope}"
    return f"sudo ufw allow proto tcp {scope} port {facts.port}"
