"""What Linux says about network interfaces: sysfs for their kind, procfs for the default route."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetdeploy.network.interfaces import Kind

SYS_CLASS_NET = Path("/sys/class/net")
PROC_NET_ROUTE = Path("/proc/net/route")

# Hardware types, from linux/if_arp.h.
_LOOPBACK = 772
_TUNNELS = frozenset(
    {512, 768, 769, 776, 778, 823, 65534}
)  # ppp, ipip, ip6tnl, sit, gre, ip6gre, none (tun, wireguard)

# Route flags, from linux/route.h.
_RTF_UP = 0x0001
_RTF_REJECT = 0x0200

_STACKED_AT_MOST = 8


def kinds(names: Iterable[str], sys_class_net: Path = SYS_CLASS_NET) -> dict[str, Kind]:
    """What each interface is. Bonds, bridges and VLANs are what the NIC under them is."""
    return {name: _kind(sys_class_net / name, _STACKED_AT_MOST) for name in names}


def default_route(table: Path = PROC_NET_ROUTE) -> str | None:
    """The interface of the IPv4 default route with the lowest metric; None if there is no such route."""
    best: tuple[int, str] | None = None
    for line in table.read_text().splitlines()[1:]:
        # Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT; addresses and flags in hex.
        name, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if int(destination, 16) or int(mask, 16) or int(flags, 16) & (_RTF_UP | _RTF_REJECT) != _RTF_UP:
            continue
        if best is None or int(metric) < best[0]:
            best = int(metric), name
    return best[1] if best else None


def _kind(folder: Path, depth: int) -> Kind:
    try:
        hardware = int((folder / "type").read_text())
    except (OSError, ValueError):
        return "virtual"  # gone since it was listed, or not shown to this process
    if hardware == _LOOPBACK:
        return "loopback"
    if hardware in _TUNNELS or (folder / "tun_flags").exists():
        return "tunnel"
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wifi"
    if (folder / "device").exists():
        return "wired"
    if depth == 0:
        return "virtual"
    below = {_kind(lower, depth - 1) for lower in folder.glob("lower_*")}
    if "wired" in below:
        return "wired"
    return "wifi" if "wifi" in below else "virtual"
