"""The demo: both ends of the whole path on this one machine, and what came of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hetdeploy.network.probe import free_port
from hetdeploy.nodes.head import Started
from hetdeploy.nodes.job import RunFolder
from hetdeploy.nodes.journal import JournalReader
from hetdeploy.nodes.progress import parse
from hetdeploy.settings import KEYS, Settings, load

JOINER_END_SECONDS = 60.0


def prepare(folder: Path, environ: Mapping[str, str]) -> Settings:
    """Settings for a run that touches nothing of the user's: a folder of its own, ports that are free."""
    (folder / "joiner").mkdir(parents=True, exist_ok=True)
    flags: dict[str, str | None] = {
        "HETDEPLOY_PORT": str(free_port()),
        "HETDEPLOY_STORE_PORT": str(free_port()),
        "HETDEPLOY_NODES": "2",
        "HETDEPLOY_CREW": "no",
        "HETDEPLOY_LINK": "tunnel",
        "HETDEPLOY_OMP_NUM_THREADS": _half_the_cores(),
        "HETDEPLOY_RUNS_DIR": ".hetdeploy/runs",
    }
    return load(flags, environ, folder.resolve())


@contextmanager
def second_machine(started: Started, folder: Path) -> Iterator[None]:
    """`hetdeploy join` in a process and a folder of its own, as on another machine."""
    joiner = folder.resolve() / "joiner"
    environ = {key: value for key, value in os.environ.items() if key not in KEYS}
    environ["HETDEPLOY_OMP_NUM_THREADS"] = _half_the_cores()
    with (joiner / "join.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetdeploy.cli", "join", "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=joiner,
            env=environ,
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(f"{started.code}\n".encode())
        try:
            yield
            process.wait(timeout=JOINER_END_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=JOINER_END_SECONDS)


def _half_the_cores() -> str:
    """Threads for each of the two ranks: with all cores for both they would spend their time waiting for each other."""
    return str(max(1, (os.cpu_count() or 2) // 2))


def losses(run: RunFolder) -> list[tuple[int, float, float]]:
    """Rank, first and last loss of every rank that printed any, from the journal."""
    seen: dict[int, list[float]] = {}
    for event in JournalReader(run.journal).new_events():
        if event["event"] != "log":
            continue
        for rank, text in event["lines"]:
            progress = parse(text)
            if rank is not None and progress and "loss" in progress:
                seen.setdefault(rank, []).append(progress["loss"])
    return [(rank, values[0], values[-1]) for rank, values in sorted(seen.items())]
