"""What about this machine's network works but spoils a run, for checks to warn of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetdeploy.network.interfaces import Interface
from hetdeploy.network.select import is_candidate

RESOLVE_SECONDS = 3.0
ETHERNET_MTU = 1500
SLOW_MBITS = 1000


@dataclass(frozen=True)
class Caution:
    """Something to know, in one line, and how to mend it."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.fix}"


def nic_cautions(nic: Interface, interfaces: Sequence[Interface]) -> list[Caution]:
    """What may make the chosen NIC a slow or a broken way to the other machine."""
    cautions = []
    wired = [one for one in interfaces if one.kind == "wired" and one.name != nic.name and is_candidate(one)]
    if nic.kind == "wifi":
        mend = f"--nic {wired[0].name} is wired" if wired else "use a cable where you can"
        cautions.append(Caution(f"{nic.name} is Wi-Fi, slower than a cable and unsteady", mend))
    if nic.kind == "tunnel":
        cautions.append(Caution(f"{nic.name} is a tunnel", "use a NIC of the local network where you can"))
    if nic.kind == "loopback":
        cautions.append(Caution(f"{nic.name} is loopback: no other machine can join", "choose another with --nic"))
    if nic.mtu < ETHERNET_MTU:
        cautions.append(
            Caution(
                f"{nic.name} takes packets of {nic.mtu} bytes where Ethernet takes {ETHERNET_MTU}, as tunnels do",
                "check that it is the NIC of the local network",
            )
        )
    if 0 < nic.speed < SLOW_MBITS:
        cautions.append(Caution(f"{nic.name} runs at {nic.speed} Mbit/s", "check the cable and the switch"))
    return cautions


def hostname_caution(
    name: str | None = None,
    resolve: Callable[[str], Sequence[str]] | None = None,
    timeout: float = RESOLVE_SECONDS,
) -> Caution | None:
    """Whether this machine's name leads back to loopback, as Debian and Ubuntu write it into /etc/hosts.

    Programs that advertise what their host name resolves to are then not reached from anywhere else
    (pytorch/pytorch#15592). A name that does not resolve at all misleads nobody.
    """
    name = name or socket.gethostname()
    addresses = _resolve_within(name, resolve or _addresses, timeout)
    if addresses is None:
        return Caution(
            f"looking up this machine's own name {name} takes over {timeout:.0f} s", f"add {name} to /etc/hosts"
        )
    loopback = [address for address in addresses if address.startswith("127.")]
    if not loopback:
        return None
    return Caution(
        f"this machine's name {name} resolves to {loopback[0]}",
        "hetdeploy names the NIC and is not misled; for other programs, change that line of /etc/hosts",
    )


def _resolve_within(name: str, resolve: Callable[[str], Sequence[str]], timeout: float) -> Sequence[str] | None:
    """What ``name`` resolves to, None if that takes too long: the system's resolver has no deadline of its own."""
    found: list[Sequence[str]] = []
    # It cannot be stopped; as a daemon it keeps nobody from leaving.
    thread = threading.Thread(target=lambda: found.append(resolve(name)), name="resolve own name", daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0] if found else None


def _addresses(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(answer[4][0]) for answer in answers]
