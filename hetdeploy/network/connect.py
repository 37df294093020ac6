"""Why a connection to the other machine did not come about, in words that say what to do."""

from __future__ import annotations

import errno
import os
import platform
import socket

from hetdeploy.errors import HetdeployError, PeerUnreachable
from hetdeploy.network import darwin
from hetdeploy.network.interfaces import Interface, interface_of, source_address


def explain_connect_error(
    error: OSError,
    host: str,
    port: int,
    interface: Interface | None = None,
    system: str | None = None,
) -> PeerUnreachable:
    """The error to show for a failed connect to ``host``:``port``: its name, source address, NIC, likely cause, mend.

    ``interface`` is the NIC that was used; without it, the one that the route leaves by.
    """
    system = system or platform.system()
    interface = interface or _interface_towards(host)
    way = f" from {interface.address} ({interface.name})" if interface and interface.ipv4 else ""
    return PeerUnreachable(
        f"cannot reach {host}:{port}{way}: {_reason(error, system)}", _mend(error, host, port, interface, system)
    )


def _interface_towards(host: str) -> Interface | None:
    try:
        return interface_of(source_address(host))
    except HetdeployError:
        return None


def _reason(error: OSError, system: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"no such host ({error.strerror})"
    if _is_timeout(error):
        return "no answer (ETIMEDOUT)"
    if _is_unreachable(error, system):
        return "no route to host (EHOSTUNREACH)"
    if error.errno is None:
        return str(error) or type(error).__name__
    return f"{os.strerror(error.errno).lower()} ({errno.errorcode.get(error.errno, error.errno)})"


def _mend(error: OSError, host: str, port: int, interface: Interface | None, system: str) -> str:
    if isinstance(error, socket.gaierror):
        return "use the address in numbers"
    if _is_unreachable(error, system):
        if system == "Darwin" and (interface is None or interface.is_neighbour(host)):
            return f"check that the machine is on; if `ping` reaches it, {darwin.LOCAL_NETWORK_PRIVACY}"
        return "check that the machine is on, and on the network that this NIC is on"
    if error.errno == errno.ECONNREFUSED:
        return "the machine is there but nothing listens: run `hetdeploy up` on it, and compare the address and port"
    if _is_timeout(error):
        source = interface.address if interface and interface.ipv4 else "ADDRESS"
        return (
            "check that the machine is on and awake; behind a firewall, run there: "
            f"sudo ufw allow proto tcp from {source} to any port {port}"
        )
    if error.errno == errno.ENETUNREACH:
        return "this machine has no route there: connect it to the same network"
    if error.errno == errno.EADDRNOTAVAIL:
        return "the NIC lost its address: look at the cable, or choose another with --nic"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "a firewall on this machine forbids it"
    return "try again; `hetdeploy doctor` looks at this machine's network"


def _is_timeout(error: OSError) -> bool:
    return isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT


def _is_unreachable(error: OSError, system: str) -> bool:
    return error.errno == (darwin.EHOSTUNREACH if system == "Darwin" else errno.EHOSTUNREACH)
