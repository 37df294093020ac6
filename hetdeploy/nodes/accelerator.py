"""What this machine's ranks compute on."""

from __future__ import annotations

import platform
import shutil
import subprocess

_PROBE_SECONDS = 10.0


def detect(wanted: str) -> str:
    """``cuda``, ``mps`` or ``cpu``: ``wanted``, or for ``auto`` the best that this machine has.

    torch is not imported: a card counts when ``nvidia-smi`` lists one.
    """
    if wanted != "auto":
        return wanted
    if platform.system() == "Darwin":
        return "mps" if platform.machine() == "arm64" else "cpu"
    return "cuda" if _lists_a_card() else "cpu"


def _lists_a_card() -> bool:
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU 0" in listing.stdout
