"""Room for the images."""

from __future__ import annotations

import shutil
from pathlib import Path

from hetdeploy.errors import PreflightError

GIGABYTE = 10**9
IMAGE_BYTES = {"cpu": 3 * GIGABYTE, "cuda": 12 * GIGABYTE}
"""What building takes at its peak: torch's wheels, what they unpack to, and the layers made of that."""


def require_room(engine_root: Path, accelerator: str) -> None:
    """Raise PreflightError when the disk with Docker's data (``engine_root``) is too full to build an image."""
    if problem := shortage(engine_root, accelerator):
        raise PreflightError(problem, "`docker system prune` makes room, or point Docker's data-root at a larger disk")


def shortage(engine_root: Path, accelerator: str) -> str | None:
    """What is missing, in words, or None. An engine in a virtual machine keeps its data where nobody can look: None."""
    need = IMAGE_BYTES[accelerator]
    try:
        free = shutil.disk_usage(engine_root).free
    except OSError:
        return None
    if free >= need:
        return None
    has, takes = f"{free / GIGABYTE:.1f} GB free", f"{need / GIGABYTE:.0f} GB"
    return f"{engine_root} has {has}, building the {accelerator} image takes {takes}"
