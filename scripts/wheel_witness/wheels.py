"""Gets at the libtorch_cpu of a torch version: installed here, in the cache, or downloaded by pip as a wheel."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hetdeploy.errors import HetdeployError

DOWNLOAD_SECONDS = 1800
PYTHON = "3.11"  # any: the library is the same in a version's wheels for every Python


class Platform(NamedTuple):
    """One operating system's wheels: pip's tag, the library's name, and where it is native (sys.platform, machine)."""

    title: str
    tag: str
    library: str
    native: tuple[str, str]


MACOS = Platform("macOS", "macosx_14_0_arm64", "libtorch_cpu.dylib", ("darwin", "arm64"))
LINUX = Platform("Linux", "manylinux_2_28_x86_64", "libtorch_cpu.so", ("linux", "x86_64"))


class Source(NamedTuple):
    """A library file and where it is from, for the report."""

    path: Path
    origin: str


@contextmanager
def library(version: str, system: Platform, cache: Path) -> Iterator[Source]:
    """The library of ``version`` for ``system``, unpacked for as long as the context lasts.

    Raises HetdeployError when pip finds no such wheel, or when the wheel has no such library.
    """
    installed = _installed(version, system)
    if installed is not None:
        yield installed
        return
    packed = wheel(version, system, cache)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        path = Path(folder) / system.library
        try:
            with zipfile.ZipFile(packed) as archive, path.open("wb") as file:
                shutil.copyfileobj(archive.open(f"torch/lib/{system.library}"), file, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise HetdeployError(f"{packed} has no torch/lib/{system.library} ({error})", f"delete {packed}") from error
        yield Source(path, packed.name)


def wheel(version: str, system: Platform, cache: Path) -> Path:
    """The wheel in ``cache``, downloaded into it if need be. A download that breaks off leaves nothing there.

    Raises HetdeployError when pip finds no such wheel.
    """
    folder = cache / f"torch-{version}-{system.tag}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            _download(version, system, Path(unfinished) / "wheel")
            (Path(unfinished) / "wheel").rename(folder)
    wheels = sorted(folder.glob("torch-*.whl"))
    if not wheels:
        raise HetdeployError(f"{folder} holds no wheel", f"delete {folder}")
    return wheels[0]


def _installed(version: str, system: Platform) -> Source | None:
    if (sys.platform, platform.machine()) != system.native:
        return None
    try:
        found = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(f"torch/lib/{system.library}")))
    if version not in (found.version, found.version.partition("+")[0]) or not path.is_file():
        return None
    return Source(path, f"torch {found.version} as installed in {sys.prefix}")


def _download(version: str, system: Platform, folder: Path) -> None:
    print(f"downloading the {system.title} wheel of torch {version} ...", file=sys.stderr, flush=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary=:all:", "--platform", system.tag, "--python-version", PYTHON, "--implementation", "cp"),
        *("--dest", str(folder), f"torch=={version}"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        problem = f"pip has not downloaded the {system.title} wheel of torch {version} in {DOWNLOAD_SECONDS} s"
        raise HetdeployError(problem, "run it again on a faster connection") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"pip cannot download torch {version} for {system.title} ({system.tag}): {reason}"
        raise HetdeployError(problem, "pip index versions torch")
