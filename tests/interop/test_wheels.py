"""The wheel check against the wheels themselves, for the torch version that hetdeploy supports.

The macOS wheel (about 110 MB) is downloaded once and kept in the check's own cache. Linux's library is the installed
one where torch is installed in that version.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import check_wheels
import pytest
from wheel_witness import tcp, uv, wheels
from wheel_witness.images import MappedImage, open_image

from hetdeploy import settings
from hetdeploy.errors import HetdeployError

CACHE = check_wheels.default_cache()
VERSION = settings.load({}, {}, Path()).torch_version
IS_LAB = os.environ.get("HETDEPLOY_LAB") == "1"

MOST_MEGABYTES = 400
SECONDS = 900

pytestmark = pytest.mark.timeout(SECONDS)


MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Starts a command from a small process: a child's peak begins with the size of the one that it was forked from."""


class Run(NamedTuple):
    """One run of the script: its exit code, what it printed, and the most memory that it held, in MB."""

    code: int
    output: str
    megabytes: int


@pytest.fixture(scope="module")
def macos_wheel() -> Path:
    """The macOS wheel in the cache. Without a network there is none, and nothing to test."""
    try:
        return wheels.wheel(VERSION, wheels.MACOS, CACHE)
    except HetdeployError as error:
        if IS_LAB:
            raise
        pytest.skip(str(error))


def test_supported_version_is_what_the_bridge_expects(macos_wheel: Path):
    run = check(VERSION, "--json", "--prove", "--cache", str(CACHE))
    assert run.code == 0, run.output
    report = json.loads(run.output)
    assert report["torch"] == VERSION
    assert [entry["name"] for entry in report["checks"]] == [item.name for item in (*uv.CHECKS, *tcp.CHECKS)]
    assert all(entry["ok"] and entry["evidence"] for entry in report["checks"])
    silent = [entry["name"] for entry in report["checks"] if not entry["changes_noticed"]]
    assert silent == ["uv.transport", "tcp.transport"]  # counts of symbols, no instruction
    assert run.megabytes < MOST_MEGABYTES


def test_version_with_another_header_is_refused(macos_wheel: Path, tmp_path: Path):
    """The real macOS library but for one instruction, which asks for a header of 0x21 bytes."""
    folder = tmp_path / macos_wheel.parent.name
    folder.mkdir()
    library = tmp_path / "libtorch_cpu.dylib"
    with zipfile.ZipFile(macos_wheel) as archive, library.open("wb") as file:
        shutil.copyfileobj(archive.open("torch/lib/libtorch_cpu.dylib"), file)
    replace(library, "_ZN4gloo9transport2uv4Pair10readNextOpEv", "02048052", "22048052")  # mov w2, #0x20 and #0x21
    with zipfile.ZipFile(folder / macos_wheel.name, "w") as archive:
        archive.write(library, "torch/lib/libtorch_cpu.dylib")
    library.unlink()
    linux = CACHE / f"torch-{VERSION}-{wheels.LINUX.tag}"
    if linux.is_dir():
        (tmp_path / linux.name).symlink_to(linux)

    run = check(VERSION, "--cache", str(tmp_path))
    assert run.code == 5, run.output
    assert [line for line in run.output.splitlines() if line.startswith("FAIL")] == [
        "FAIL uv.header-size: the header read first is 0x21 at gloo::transport::uv::Pair::readNextOp+0x80 "
        "`mov w2, #0x21`; the bridge expects 0x20"
    ]
    assert run.output.endswith(f"torch {VERSION} differs from what the bridge relies on in: uv.header-size\n")


def check(*arguments: str) -> Run:
    """Runs the script as a person would, with everything it prints."""
    command = [sys.executable, "-c", MEASURE, sys.executable, str(Path(check_wheels.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *complaints, peak = done.stderr.splitlines()
    assert not complaints
    return Run(done.returncode, done.stdout, int(peak) >> (20 if sys.platform == "darwin" else 10))


def replace(library: Path, symbol: str, old: str, new: str) -> None:
    """Replaces, in the file, the one place where ``symbol`` has the bytes ``old`` (hexadecimal)."""
    image: MappedImage = open_image(library)
    address, code = image.symbols[symbol], image.function(symbol).code
    extent = next(extent for extent in image.extents if extent.start <= address < extent.end)
    image.close()
    assert code.count(bytes.fromhex(old)) == 1
    with library.open("r+b") as file:
        file.seek(extent.offset + address - extent.start + code.index(bytes.fromhex(old)))
        file.write(bytes.fromhex(new))
