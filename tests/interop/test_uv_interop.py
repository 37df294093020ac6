"""gloo's real ``uv`` transport and stock torch's ``tcp`` in one group, through the real store wrapper and bridge."""

from __future__ import annotations

import operations
import pytest
from peers import LARGEST_BYTES, run_operations

LOW, HIGH = "127.0.0.1", "127.0.0.2"
"""gloo compares addresses to decide who dials: each side takes each part once."""


@pytest.mark.parametrize(
    ("uv_ranks", "size", "uv_host", "tcp_host", "joiners"),
    [
        ([1], 2, LOW, HIGH, 1),
        ([0], 2, HIGH, LOW, 1),
        ([1], 3, HIGH, LOW, 1),
        ([0, 2], 3, LOW, HIGH, 2),
        ([1, 2], 4, HIGH, LOW, 1),
        ([3], 4, LOW, LOW, 1),
    ],
)
def test_every_operation(uv_ranks: list[int], size: int, uv_host: str, tcp_host: str, joiners: int) -> None:
    largest = LARGEST_BYTES if (uv_ranks, size) == ([1], 2) else LARGEST_BYTES // 8
    script = operations.mixed_traffic(size, largest)
    run_operations(uv_ranks, size, script, uv_host, tcp_host, joiners).check()
