"""Every torch collective, torch on both ends, some ranks behind the bridge: by the script that knows nothing of it.

A rank with a face is a stock Linux rank that shows the uv dialect to its bridge, in either socket address layout.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
from peers import COLLECTIVES, Job

from hetdeploy.gloo.dialect import Dialect, Layout


@dataclass(frozen=True)
class Joiner:
    ranks: tuple[int, ...]
    face: Layout | None = None
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dialect", Dialect.UV if self.face else Dialect.TCP)

    def __str__(self) -> str:
        ranks = "+".join(str(rank) for rank in self.ranks)
        return f"{self.dialect.value}{f'-{self.face.value}' if self.face else ''}-rank{ranks}"


MATRIX = [
    (2, [Joiner((1,))]),
    (2, [Joiner((0,))]),
    (3, [Joiner((1, 2))]),
    (3, [Joiner((0,)), Joiner((2,))]),
    (2, [Joiner((1,), Layout.LINUX)]),
    (2, [Joiner((0,), Layout.DARWIN)]),
    (3, [Joiner((1,), Layout.DARWIN)]),
    (3, [Joiner((0,), Layout.DARWIN), Joiner((1,), Layout.DARWIN)]),
    (4, [Joiner((1, 3), Layout.DARWIN), Joiner((2,))]),
]


@pytest.mark.parametrize(
    ("size", "joiners"),
    MATRIX,
    ids=[f"{size}-ranks-{'-'.join(str(joiner) for joiner in joiners)}" for size, joiners in MATRIX],
)
def test_all_collectives(size: int, joiners: list[Joiner]) -> None:
    command = [sys.executable, str(COLLECTIVES), "--max-mb", "20" if size == 2 else "2"]
    with Job(size) as job:
        for number, joiner in enumerate(joiners):
            bridge = job.bridge(joiner.dialect, f"joiner{number}")
            face = {"HETDEPLOY_FACE": "uv", "HETDEPLOY_SOCKADDR": joiner.face.value} if joiner.face else {}
            for rank in joiner.ranks:
                job.start_bridged(rank, bridge, *command, **face)
        for rank in set(range(size)) - {rank for joiner in joiners for rank in joiner.ranks}:
            job.start(rank, *command, HETDEPLOY_JOB="test")  # as on the head: guarded, no bridge
        job.wait().check()
