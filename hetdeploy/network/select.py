"""Which network interface to use on this machine.

Both ends decide for themselves: a NIC's name means nothing on another machine (horovod/horovod#2568). What a container
engine, a hypervisor or a VPN put there is used only when it is named: two hosts that both advertise Docker's 172.17.0.1
connect to themselves (sgl-project/sglang#3226).
"""

from __future__ import annotations

import difflib
import fnmatch
import ipaddress
from collections.abc import Callable, Sequence

from hetdeploy.envfile import shown
from hetdeploy.errors import HetdeployError, PreflightError, UsageError
from hetdeploy.network.interfaces import Interface, outgoing

ONLY_WHEN_NAMED = (
    # container engines and hypervisors
    "docker*",
    "br-*",
    "veth*",
    "virbr*",
    "vnet*",
    "vmnet*",
    "vboxnet*",
    "lxcbr*",
    "lxdbr*",
    "cni*",
    "flannel*",
    "cali*",
    "podman*",
    # VPNs
    "utun*",
    "tun*",
    "tap*",
    "wg*",
    "tailscale*",
    "zt*",
    "feth*",
    # macOS's own: AirDrop and its like, bridges for sharing and Thunderbolt, virtual machines
    "awdl*",
    "llw*",
    "bridge*",
    "anpi*",
    "vmenet*",
)

_KIND_RANK = {"wired": 0, "wifi": 1, "virtual": 2, "tunnel": 3, "loopback": 4}


def choose(
    interfaces: Sequence[Interface],
    route_to: str | None,
    named: str | None,
    named_by: str = "--nic",
    route: Callable[[str | None], str | None] = outgoing,
) -> Interface:
    """The NIC to use out of ``interfaces``: the one ``named``, else the best on the way to the peer ``route_to``.

    Without a peer the default route counts. ``named_by`` says where the name comes from, for the message; ``route``
    tells which interface the way to a peer leaves by.

    Raises UsageError for a name that is not a usable NIC and where two are equally good, PreflightError where there is
    none, PeerUnreachable where no way leads to the peer.
    """
    if named:
        return _by_name(interfaces, named, named_by)
    way = route(route_to)
    on_route = next((interface for interface in interfaces if interface.name == way), None)
    if on_route is not None and (is_candidate(on_route) or (route_to and on_route.kind == "loopback")):
        return on_route
    if on_route is not None and route_to:
        raise UsageError(
            f"the way to {route_to} leaves by {on_route.describe()}, which is not used unasked",
            f"name it if that is meant: --nic {on_route.name}",
        )
    ranked = sorted((interface for interface in interfaces if is_candidate(interface)), key=_rank)
    if not ranked:
        raise PreflightError(
            f"no NIC of this machine is up and has an IPv4 address (there is {_listed(interfaces)})",
            "plug in the cable or join the network, or name one of these with --nic",
        )
    equals = [interface for interface in ranked if _rank(interface) == _rank(ranked[0])]
    if len(equals) > 1:
        raise UsageError(
            f"{' and '.join(interface.describe() for interface in equals)} are equally good and no route decides",
            f"choose one, such as --nic {equals[0].name}",
        )
    return ranked[0]


def is_candidate(interface: Interface) -> bool:
    """Whether a NIC may be chosen without being named."""
    if not interface.up or not interface.ipv4 or interface.kind in ("loopback", "tunnel"):
        return False
    return not any(fnmatch.fnmatchcase(interface.name, pattern) for pattern in ONLY_WHEN_NAMED)


def _rank(interface: Interface) -> tuple[bool, int, int]:
    return interface.self_assigned, _KIND_RANK[interface.kind], -interface.speed


def _by_name(interfaces: Sequence[Interface], name: str, named_by: str) -> Interface:
    what = f"NIC {shown(name)} ({named_by})"
    found = next((interface for interface in interfaces if interface.name == name), None)
    if found is None:
        raise _no_such(interfaces, name, what)
    if not found.up:
        raise UsageError(f"{what} is down or has no cable", f"bring it up, or use {_offer(interfaces)}")
    if not found.ipv4:
        raise UsageError(f"{what} has no IPv4 address, which gloo needs", f"give it one, or use {_offer(interfaces)}")
    return found


def _no_such(interfaces: Sequence[Interface], name: str, what: str) -> HetdeployError:
    """The error for a name that no interface has. Gloo takes one plain name: NCCL's ^lo and prefixes, lists and
    addresses end in `Unable to find address` there (aws-samples/aws-do-eks#51)."""
    if name.startswith("^"):
        return UsageError(f"{what} is NCCL's way to leave one out; gloo takes one name", f"use {_offer(interfaces)}")
    if "," in name:
        return UsageError(f"{what} is a list, but one NIC is used", f"use {_offer(interfaces)}")
    if any(character in name for character in "*?[="):
        return UsageError(f"{what} is a pattern; gloo takes one name", f"use {_offer(interfaces)}")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        close = difflib.get_close_matches(name, [interface.name for interface in interfaces], n=1)
        guess = f"did you mean {close[0]}? There is {_listed(interfaces)}" if close else f"use {_offer(interfaces)}"
        return UsageError(f"{what} is not on this machine", guess)
    owner = next((one for one in interfaces if any(own.ip == address for own in one.ipv4)), None)
    if owner is None:
        return UsageError(f"{what} is an address, and of no NIC of this machine", f"use {_offer(interfaces)}")
    return UsageError(f"{what} is an address, where a name is wanted", f"use --nic {owner.name}")


def _offer(interfaces: Sequence[Interface]) -> str:
    usable = [interface for interface in interfaces if interface.up and interface.ipv4]
    return f"--nic with one of {_listed(usable)}" if usable else "another machine: none of this one's NICs is usable"


def _listed(interfaces: Sequence[Interface]) -> str:
    """The interfaces in one line, the likely ones first."""
    ordered = sorted(interfaces, key=lambda interface: (not is_candidate(interface), _rank(interface)))
    return ", ".join(interface.describe() for interface in ordered) or "no interface at all"
