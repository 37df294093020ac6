"""Lets a rank leave its process group before Python ends, where its script does not.

gloo's worker threads need the interpreter once more when a collective is over. A script that ends right after its last
one, without ``destroy_process_group``, can be gone by then, and the process aborts: "terminate called without an active
exception" instead of exit code 0 (seen with torch 2.13 alone; every few runs).
"""

from __future__ import annotations

import atexit
import threading

LEAVE_SECONDS = 3.0
"""A collective that the other ranks never answer would keep the group busy: then the process ends without waiting."""


def leave_at_exit() -> None:
    """Destroy what process groups there are when the interpreter ends."""
    atexit.register(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    thread = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter takes no new threads any more
        return
    thread.join(LEAVE_SECONDS)
