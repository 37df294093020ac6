"""Entry point of the group ``torch.backends``: torch calls ``autoload`` at the end of its own import.

So a script that knows nothing of hetdeploy trains over the bridge. Every process that imports torch comes through here:
without the launcher's variables nothing happens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BRIDGE_VARIABLE = "HETDEPLOY_BRIDGE"
"""Path of the bridge's socket: this rank is on a joiner."""

JOB_VARIABLE = "HETDEPLOY_JOB"
"""Set on every rank of a job: gloo groups are guarded against mixed dialects."""

FACE_VARIABLE = "HETDEPLOY_FACE"
"""For tests and the self-test: the dialect that this rank is to show instead of its own (face.py)."""

FORWARDED_VARIABLE = "HETDEPLOY_FORWARDED"
"""The MASTER_ADDR:MASTER_PORT put in place here: data loader workers inherit them and must not do it again."""

_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
_NODES_VARIABLE = "GROUP_WORLD_SIZE"
"""torchrun's: how many nodes the world has. A world of this node alone (a crew's) has its store here."""

_log = logging.getLogger("hetdeploy.gloo")


def autoload() -> None:
    """Put the bridge or the guard in place where the launcher's environment says so; else return at once."""
    if BRIDGE_VARIABLE in os.environ or JOB_VARIABLE in os.environ:
        install(os.environ)


def install(environ: MutableMapping[str, str]) -> None:
    """Replace torch's ProcessGroupGloo, and lead a worker's MASTER_ADDR and MASTER_PORT through the bridge.

    Raises PeerUnreachable where the bridge is gone.
    """
    if environ.get(_LAZY_VARIABLE, "0") not in ("", "0"):
        # A lazy gloo connects long after its group is made, when nobody is left to answer its store.
        _log.warning("%s is switched off: gloo connects when a group is made", _LAZY_VARIABLE)
        environ[_LAZY_VARIABLE] = "0"
    if environ.get(BRIDGE_VARIABLE) and "RANK" in environ and environ.get(_NODES_VARIABLE) != "1":
        forward_master(environ)
    if "RANK" in environ:
        from hetdeploy.gloo.leave import leave_at_exit

        leave_at_exit()
    _replace_process_group(environ)


def forward_master(environ: MutableMapping[str, str]) -> None:
    """Lead MASTER_ADDR and MASTER_PORT through the bridge, unless that was done before in this environment."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port or environ.get(FORWARDED_VARIABLE) == f"{host}:{port}":
        return
    from hetdeploy.gloo.control import BridgeClient

    bridge = BridgeClient(environ[BRIDGE_VARIABLE])
    try:
        forwarded = bridge.request("forward", host=host, port=int(port))["port"]
    finally:
        bridge.close()
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = "127.0.0.1", str(forwarded)
    environ[FORWARDED_VARIABLE] = f"127.0.0.1:{forwarded}"


def _replace_process_group(environ: MutableMapping[str, str]) -> None:
    """Put a subclass where torch looks its gloo class up by name (torch tests groups with isinstance against it)."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return
    import torch.distributed.distributed_c10d as c10d

    original: Any = c10d.ProcessGroupGloo

    class AnyGloo(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            # torch hands a group back as the original class once its Python object is gone.
            return isinstance(instance, original)

    class ProcessGroupGloo(original, metaclass=AnyGloo):  # type: ignore[misc]
        """torch's gloo group over a store that leads to the bridge, or that notices a peer without one."""

        def __init__(self, store: Store, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            bent = _bend(store, rank, size, environ)
            try:
                super().__init__(bent, rank, size, *args, **kwargs)
            finally:
                bent.close()

    ProcessGroupGloo.__module__ = original.__module__
    ProcessGroupGloo.__qualname__ = original.__qualname__
    c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]
    dist.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def _bend(store: Store, rank: int, size: int, environ: MutableMapping[str, str]) -> Any:
    """The store that gloo is given; torch is complete by now."""
    from hetdeploy.gloo.control import BridgeClient
    from hetdeploy.gloo.dialect import Dialect, dialect_here, layout_here
    from hetdeploy.gloo.store import BridgedStore, GuardedStore, PassingStore

    dialect, layout, face = dialect_here(environ), layout_here(environ), environ.get(FACE_VARIABLE)
    if face == Dialect.TCP.value:
        from hetdeploy.gloo.face import LinuxFace

        return LinuxFace(PassingStore(store), rank, size, layout)
    if not environ.get(BRIDGE_VARIABLE):
        return GuardedStore(store, rank, size, dialect)
    bridged = BridgedStore(store, rank, size, BridgeClient(environ[BRIDGE_VARIABLE]), dialect, layout)
    if face == Dialect.UV.value:
        from hetdeploy.gloo.face import MacFace

        return MacFace(bridged, rank, size, layout)
    return bridged
