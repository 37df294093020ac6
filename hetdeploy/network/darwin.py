"""What macOS says about network interfaces, through its own commands."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetdeploy.network.interfaces import Kind

Runner = Callable[[Sequence[str]], str]

COMMAND_SECONDS = 5.0
# By full path: a job started by launchd or over ssh may have neither folder in its PATH.
HARDWARE_PORTS = ("/usr/sbin/networksetup", "-listallhardwareports")
DEFAULT_ROUTE = ("/sbin/route", "-n", "get", "default")

# macOS's number; Linux has another (113), and another error under this one.
EHOSTUNREACH = 65
# Apple's technical note TN3179: the permission is that of the app which started this process, `ping` needs none, and
# macOS may never have asked for it.
LOCAL_NETWORK_PRIVACY = (
    "macOS keeps this program from the local network: allow your terminal or editor under "
    "System Settings > Privacy & Security > Local Network, and start it again"
)

_TUNNELS = ("utun", "ipsec", "ppp", "gif", "stf", "tun", "tap", "wg")
# Borrowed networks, no LAN: a telephone on a cable, or one over Bluetooth.
_TETHERS = ("bluetooth", "iphone", "ipad")


def kinds(names: Iterable[str], run: Runner | None = None) -> dict[str, Kind]:
    """What each interface is, by the hardware port that `networksetup` says is behind it."""
    ports = _hardware_ports((run or run_command)(HARDWARE_PORTS))
    return {name: _kind(name, ports.get(name)) for name in names}


def default_route(run: Runner | None = None) -> str | None:
    """The interface of the IPv4 default route; None if there is no such route."""
    for line in (run or run_command)(DEFAULT_ROUTE).splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "interface":
            return value.strip() or None
    return None


def run_command(command: Sequence[str]) -> str:
    """What a command prints; nothing if it fails, is not there or takes longer than COMMAND_SECONDS."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def _hardware_ports(listing: str) -> dict[str, str]:
    """Port names by device, from blocks of ``Hardware Port: Wi-Fi`` / ``Device: en0`` / ``Ethernet Address: ...``."""
    ports = {}
    port = ""
    for line in listing.splitlines():
        field, _, value = line.partition(":")
        if field == "Hardware Port":
            port = value.strip()
        elif field == "Device":
            ports[value.strip()] = port
    return ports


def _kind(name: str, port: str | None) -> Kind:
    if name.startswith("lo"):
        return "loopback"
    if name.startswith(_TUNNELS):
        return "tunnel"
    if port is None:
        # VLANs and bonds are not listed as ports; the rest are the system's own: awdl0, llw0, ap1, anpi0, vmenet0.
        return "wired" if name.startswith(("vlan", "bond")) else "virtual"
    if port in ("Wi-Fi", "AirPort"):
        return "wifi"
    return "virtual" if port.lower().startswith(_TETHERS) else "wired"
