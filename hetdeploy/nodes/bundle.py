"""The job's files: the script and what lies beside it, named by digest, so that every machine runs the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hetdeploy.errors import UsageError

MAX_BUNDLE_BYTES = 64 * 2**20
"""A job's files travel before it starts. Data does not belong there: it has HETDEPLOY_DATA_DIR."""

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "env", "build", "dist", "runs", "wandb", "lightning_logs"}


@dataclass(frozen=True)
class BundleFile:
    """One file: ``path`` relative to the script's folder, with forward slashes; SHA-256 in hex; size in bytes."""

    path: str
    sha256: str
    size: int
    executable: bool = False


@dataclass(frozen=True)
class Bundle:
    """All files of a job, sorted by path."""

    files: tuple[BundleFile, ...]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 in hex over paths, modes and contents."""
        listing = "".join(f"{f.path}\0{f.sha256}\0{f.executable}\n" for f in self.files)
        return hashlib.sha256(listing.encode()).hexdigest()

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(file) for file in self.files]

    @classmethod
    def from_json(cls, listing: Iterable[dict[str, Any]]) -> Bundle:
        """Rebuild a bundle that another machine described.

        Raises UsageError for a path that would leave the folder it is unpacked into.
        """
        files = tuple(BundleFile(**entry) for entry in listing)
        for file in files:
            path = PurePosixPath(file.path)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in file.path:
                raise UsageError(
                    f"the head sent a file path that leaves the job's folder: {file.path!r}", "do not join it"
                )
        return cls(files)


def collect(script: Path, blobs: Path) -> Bundle:
    """Copy ``script`` and the files of its folder into ``blobs`` under their digests, and describe them.

    Left out: hidden files and folders, virtual environments, caches, build results and run folders.

    Raises UsageError when the script is missing or the files are larger than MAX_BUNDLE_BYTES.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}", "check the path; it is relative to the folder you are in")
    blobs.mkdir(parents=True, exist_ok=True)
    files = []
    total = 0
    for path in sorted(_walk(script.parent)):
        size = path.stat().st_size
        total += size
        if total > MAX_BUNDLE_BYTES:
            raise UsageError(
                f"the files beside {script.name} come to more than {MAX_BUNDLE_BYTES // 2**20} MiB (at {path.name})",
                "put the script into a folder of its own and the data into HETDEPLOY_DATA_DIR",
            )
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        blob = blobs / digest
        if not blob.exists():
            shutil.copyfile(path, blob)
        executable = bool(path.stat().st_mode & stat.S_IXUSR)
        files.append(BundleFile(path.relative_to(script.parent).as_posix(), digest, size, executable))
    return Bundle(tuple(files))


def unpack(bundle: Bundle, folder: Path, fetch: Callable[[str, int, Path], None]) -> None:
    """Write the files below ``folder``; ``fetch(sha256, size, destination)`` gets one's bytes and verifies them."""
    for file in bundle.files:
        destination = folder / file.path
        destination.parent.mkdir(parents=True, exist_ok=True)
        fetch(file.sha256, file.size, destination)
        destination.chmod(0o755 if file.executable else 0o644)


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
            and not (here / name / "pyvenv.cfg").exists()
        ]
        for name in names:
            path = here / name
            if not name.startswith(".") and not name.endswith(".pyc") and path.is_file():
                yield path
