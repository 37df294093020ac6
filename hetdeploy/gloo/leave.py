"""Lets a rank leave its process groups before Python ends, where its script does not.

gloo's worker threads need the interpreter once more when a collective is over, to give back its tensors. A script whose
last collective is its last line can be gone by then, and the process aborts ("terminate called without an active
exception") instead of ending with 0; torch 2.13 does so by itself every few runs (compare pytorch/pytorch#179291).
"""

from __future__ import annotations

import atexit
import gc
import threading
import time

LEAVE_SECONDS = 3.0
"""A collective that the other ranks never answer would keep a group busy: then the process ends without waiting."""

_LAST_RELEASE_SECONDS = 0.05


def leave_at_exit() -> None:
    """Destroy what process groups there are when the interpreter ends."""
    # An optimizer's first step imports this module, whose default arguments hold on to the group of that moment.
    import torch.distributed.nn.functional  # noqa: F401

    atexit.register(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        thread = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter takes no new threads any more
            return
        thread.join(LEAVE_SECONDS)
    gc.collect()
    time.sleep(_LAST_RELEASE_SECONDS)
