"""Checkpoints that can be trusted: written whole or not at all, checked before use, safe to open anywhere.

    checkpoints = Checkpoints("runs/one", keep=3)
    shared = {"model": model, "optimizer": optimizer, "batches": batches}
    own = {"exchange": allreduce}
    start = checkpoints.load(shared, own)              # 0 if there is nothing to go on from
    for step in range(start, total):
        ...
        if (step + 1) % 100 == 0:
            checkpoints.save(step + 1, shared, own)    # on every rank; no rank waits for another

*Shared* parts are the same on all ranks (model, optimizer, scaler, batches): rank 0 writes them. *Own* parts differ
(AllReduce and DiLoCo hold a rank's error feedback), and so do random number generators: every rank writes its own, each
to its own disk. ``load`` is collective: rank 0's newest sound file decides, its shared parts go to all ranks, and each
takes its own parts of the same step from its own folder. Training resumed on CPU goes on bit for bit.

A file is what ``torch.save`` writes, with CPU tensors and plain Python values only, so that
``torch.load(file, weights_only=True)`` opens it on any machine. Its name holds step, rank and the start of its SHA-256
(torch's own reader does not notice a flipped bit): ``step-00000100.rank0.0123456789abcdef.pt``. It is written beside
its place, flushed to the disk, and renamed, so that there is never half a file under such a name.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from hetdeploy.train.errors import MisuseError, TrainError
from hetdeploy.train.portable import difference, portable, random_state, restore_random_state
from hetdeploy.train.world import Group, World

FORMAT = 1
DIGEST_LENGTH = 16
"""Hexadecimal digits of the SHA-256 in a file's name."""
CHUNK_BYTES = 1 << 26
"""Read, and sent to other ranks, at once."""
NAME = re.compile(rf"step-(\d{{8,}})\.rank(\d+)\.([0-9a-f]{{{DIGEST_LENGTH}}})\.pt")

log = logging.getLogger(__name__)


class CheckpointError(TrainError):
    """A checkpoint cannot be written, or cannot be used."""


class Stateful(Protocol):
    """A part of a checkpoint: a module, an optimizer, a scaler, Batches, AllReduce, DiLoCo, Balancer, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values, in dicts, lists and tuples."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Go on from there."""


Parts = Mapping[str, Stateful]


class Checkpoints:
    """A folder of checkpoints, of which the last ``keep`` are kept. world: by default that of the script."""

    def __init__(self, folder: Path | str, *, keep: int = 3, world: World | None = None) -> None:
        if keep < 1:
            raise MisuseError(f"keep={keep} cannot be", "keep at least one checkpoint")
        self._folder = Path(folder)
        self._keep = keep
        self._world = World.current() if world is None else world

    def save(self, step: int, shared: Parts, own: Parts | None = None) -> Path:
        """Write what this rank has to remember after ``step`` completed steps. Not collective.

        Raises CheckpointError (no space, no permission: what was there before is intact), MisuseError for a part whose
        state is not plain, or when the folder already holds later steps.
        """
        rank = self._world.rank
        later = [file.step for file in self._files() if file.step > step]
        if later:
            raise MisuseError(
                f"{self._folder} already holds step {max(later)}, so step {step} cannot be saved there",
                "load that one first, or use a new folder",
            )
        content = {
            "format": FORMAT,
            "step": step,
            "rank": rank,
            "shared": _states(shared) if rank == 0 else {},
            "own": _states(own or {}),
            "random": portable(random_state(), "random"),
        }
        path = self._write(step, content)
        self._prune(path)
        return path

    def load(self, shared: Parts, own: Parts | None = None) -> int:
        """Go on from the newest sound checkpoint. The number of steps it had completed; 0 if there is none.

        Collective. A damaged file is set aside as ``*.damaged``, with an error in the log, and the one before is taken.
        A rank without own parts of that step (a new machine) takes rank 0's, which costs one step's rounding error in
        an error feedback, and keeps its random numbers.

        Raises CheckpointError on all ranks if files are there and none is sound, for a checkpoint of another model
        (naming the first difference), and for one that lacks a part. Nothing has been loaded then, unless a part
        itself refuses its state.
        """
        if self._world.size == 1:
            file = self._newest_sound()
            if file is None:
                return 0
            content = _read(file.path, str(file.path))
            return _restore(content, content, shared, own or {})
        return self._load_together(shared, own or {})

    def _load_together(self, shared: Parts, own: Parts) -> int:
        group = self._world.open("checkpoint")
        problem, step = "", 0
        try:
            packed = _broadcast_file(group, self._newest_sound if self._world.rank == 0 else lambda: None)
            if packed is not None:
                content = _read(io.BytesIO(packed.numpy().data), "rank 0's checkpoint")
                step = _restore(content, self._own_content(content), shared, own)
            self._forget_after(step)
        except CheckpointError as error:
            problem = str(error)
        except (MisuseError, OSError, RuntimeError, ValueError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [each.decode() for each in group.gather_bytes(problem.encode())]
        for rank, text in enumerate(problems):
            if text:
                raise CheckpointError(f"rank {rank} cannot load the checkpoint: {text}")
        return step

    def _own_content(self, shared: dict[str, Any]) -> dict[str, Any] | None:
        """This rank's file of the same step as rank 0's."""
        if self._world.rank == 0:
            return shared
        for file in self._files():
            if file.step == shared["step"] and self._sound(file):
                return _read(file.path, str(file.path))
        log.warning(
            "rank %d has no file of its own for step %d and starts from rank 0's", self._world.rank, shared["step"]
        )
        return None

    def _forget_after(self, step: int) -> None:
        """Remove this rank's files of steps that rank 0 does not remember: they are done again, or of another run."""
        for file in self._files():
            if file.step > step:
                log.warning("%s is newer than what rank 0 goes on from and is removed", file.path)
                file.path.unlink()

    def _newest_sound(self) -> _File | None:
        files = self._files()
        for file in reversed(files):
            if self._sound(file):
                return file
        if files or any(self._folder.glob(f"step-*.rank{self._world.rank}.*.pt.damaged")):
            raise CheckpointError(
                f"no checkpoint in {self._folder} is sound", "use a new folder to start from the beginning"
            )
        return None

    def _sound(self, file: _File) -> bool:
        """Whether a file is what was written. Sets it aside if not."""
        digest = hashlib.sha256()
        try:
            with file.path.open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    digest.update(chunk)
            if digest.hexdigest().startswith(file.digest):
                return True
            aside = file.path.with_name(file.path.name + ".damaged")
            log.error("checkpoint %s is damaged: it is now %s, and the one before is used", file.path, aside.name)
            file.path.rename(aside)
        except OSError as error:
            log.error("checkpoint %s cannot be read: %s", file.path, error)
        return False

    def _files(self) -> list[_File]:
        """This rank's checkpoints, oldest first."""
        files = []
        for path in self._folder.glob("step-*.pt"):
            match = NAME.fullmatch(path.name)
            if match and int(match[2]) == self._world.rank:
                files.append(_File(int(match[1]), path.stat().st_mtime_ns, match[3], path))
        return sorted(files, key=lambda file: (file.step, file.written))

    def _write(self, step: int, content: dict[str, Any]) -> Path:
        beginning = f"step-{step:08d}.rank{self._world.rank}"
        unfinished = self._folder / f".{beginning}.unfinished"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as stream:
                digest = _save(content, stream)
                _flush_to_disk(stream.fileno())
            path = self._folder / f"{beginning}.{digest[:DIGEST_LENGTH]}.pt"
            unfinished.replace(path)
            _flush_folder(self._folder)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {error.strerror or error}",
                "make room or use another folder; earlier checkpoints are intact",
            ) from error
        return path

    def _prune(self, written: Path) -> None:
        """Remove all but the last, and what earlier processes left unfinished."""
        files = self._files()
        newest = max(file.step for file in files)
        same_step = [file.path for file in files if file.step == newest and file.path != written]
        kept = sorted({file.step for file in files})[-self._keep :]
        old = [file.path for file in files if file.step not in kept]
        unfinished = list(self._folder.glob(f".step-*.rank{self._world.rank}.unfinished"))
        for path in [*same_step, *old, *unfinished]:
            try:
                path.unlink()
            except OSError as error:
                log.warning("%s could not be removed: %s", path, error)


@dataclass(frozen=True)
class _File:
    step: int
    written: int
    digest: str
    path: Path


class _Hashing:
    """A stream that hashes what it passes on, and remembers the operating system's error: torch reports another."""

    def __init__(self, stream: BinaryIO) -> None:
        self.error: OSError | None = None
        self.digest = hashlib.sha256()
        self._stream = stream

    def write(self, data: bytes) -> int:
        """As a file's."""
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        return written

    def flush(self) -> None:
        """As a file's."""
        self._stream.flush()


def _save(content: dict[str, Any], stream: BinaryIO) -> str:
    """The SHA-256 of what was written. Raises OSError."""
    hashing = _Hashing(stream)
    try:
        torch.save(content, hashing)  # type: ignore[arg-type]
        stream.flush()
    except RuntimeError:
        if hashing.error is not None:
            raise hashing.error from None
        raise
    return hashing.digest.hexdigest()


def _flush_to_disk(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        with suppress(OSError):  # not every file system there can
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync alone leaves it in the drive's cache
            return
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(source: Path | BinaryIO, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # an unsuitable file makes torch and pickle raise all sorts of things
        raise CheckpointError(
            f"{name} cannot be opened: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            f"open it with the torch that wrote it (this is {torch.__version__})",
        ) from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{name} has format {content.get('format')}, this version reads {FORMAT}")
    return content


def _broadcast_file(group: Group, choose: Callable[[], _File | None]) -> Tensor | None:
    """Collective: rank 0's chosen file, as bytes on all ranks; None if there is none. Raises what ``choose`` raises on
    rank 0, CheckpointError elsewhere.
    """
    nothing, failed = -1, -2
    length = torch.tensor([failed])
    data = torch.empty(0, dtype=torch.uint8)
    try:
        if group.rank == 0:
            file = choose()
            length[0] = nothing if file is None else file.path.stat().st_size
            if file is not None:
                data = torch.from_file(str(file.path), size=int(length), dtype=torch.uint8)
    finally:
        group.broadcast(length, 0).wait("comparing checkpoints")
    if int(length) == failed:
        raise CheckpointError("rank 0 has none that is sound")
    if int(length) == nothing:
        return None
    if group.rank != 0:
        data = torch.empty(int(length), dtype=torch.uint8)
    for chunk in torch.split(data, CHUNK_BYTES):
        group.broadcast(chunk, 0).wait("sending the checkpoint")
    return data


def _restore(content: dict[str, Any], mine: dict[str, Any] | None, shared: Parts, own: Parts) -> int:
    """Compare everything, then load everything. ``mine``: where own parts come from; None: from rank 0."""
    for kind, parts, states in (
        ("shared", shared, content["shared"]),
        ("own", own, (mine or content)["own"]),
    ):
        for name, part in parts.items():
            if name not in states:
                raise CheckpointError(
                    f"the checkpoint of step {content['step']} has no {kind} part {name!r}, it has {sorted(states)}",
                    "resume with the parts that were saved",
                )
            different = difference(part, states[name])
            if different:
                raise CheckpointError(
                    f"the checkpoint of step {content['step']} is of another {name}: {different}",
                    "resume with the script and arguments that wrote it, or use a new folder",
                )
    for name, part in shared.items():
        part.load_state_dict(content["shared"][name])
    for name, part in own.items():
        part.load_state_dict((mine or content)["own"][name])
    if mine is not None:
        restore_random_state(mine["random"])
    step: int = content["step"]
    return step


def _states(parts: Parts) -> dict[str, Any]:
    return {name: portable(part.state_dict(), name) for name, part in parts.items()}
