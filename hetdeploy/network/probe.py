"""TCP ports of this machine: which are free, and who listens on the others."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetdeploy.errors import PreflightError

if TYPE_CHECKING:
    from psutil._ntuples import addr

_WILDCARDS = ("0.0.0.0", "::")
_HIDDEN = "a process of another user"


def require_free_port(address: str, port: int, key: str) -> None:
    """Raise PreflightError unless this process could listen on ``address``:``port``; ``key`` is the setting of it."""
    owner = owner_of_port(address, port)
    if owner is not None:
        raise PreflightError(f"port {port} of {address} is taken by {owner}", f"end it, or set {key} to a free port")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: connections of an earlier run that are still in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise _refused(error, address, port, key) from error


def owner_of_port(address: str, port: int) -> str | None:
    """Who listens on ``address``:``port``, by name and process id as far as this user may know; None if nobody does.

    On macOS without root only this user's own processes are seen.
    """
    for pid, local in _listening():
        if local.port == port and (address in _WILDCARDS or local.ip in (address, *_WILDCARDS)):
            return _name(pid)
    return None


def free_port(address: str = "127.0.0.1") -> int:
    """A port on which nobody listens at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _listening() -> Iterator[tuple[int | None, addr]]:
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                for one in process.net_connections(kind="tcp"):
                    if one.status == psutil.CONN_LISTEN:
                        yield process.pid, one.laddr
        return
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            yield connection.pid, connection.laddr


def _name(pid: int | None) -> str:
    import psutil

    if pid is None:
        return _HIDDEN
    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


def _refused(error: OSError, address: str, port: int, key: str) -> PreflightError:
    if error.errno == errno.EADDRINUSE:
        return PreflightError(f"port {port} of {address} is taken by {_HIDDEN}", f"set {key} to a free port")
    if error.errno == errno.EADDRNOTAVAIL:
        return PreflightError(f"{address} is not an address of this machine", "choose a NIC with --nic")
    if error.errno == errno.EACCES:
        return PreflightError(f"this user may not listen on port {port}", f"set {key} to a port above 1023")
    return PreflightError(f"cannot listen on {address}:{port} ({error.strerror})", f"set {key} to another port")
