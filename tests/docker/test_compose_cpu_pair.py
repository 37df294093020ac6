"""compose/cpu-pair.yaml, run as its first lines say: what happens to a rank must be what the exit code tells."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetdeploy.nodes.containers import asset

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

STACK_SECONDS = 240.0
"""How long one run of the stack may take once its images are built."""

FIRST_COLLECTIVE = "rank 0: ok first collective"


class Stack:
    """One project of the file, under a name of its own."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.name = f"hetdeploy-pair-{uuid.uuid4().hex[:8]}"
        self.output = ""
        self._environ = {**os.environ, "MAX_MB": "1", **environ}

    def up(self, at_first_collective: Callable[[], None] | None = None) -> int:
        """Run the stack to its end; the exit code of `docker compose up`."""
        with subprocess.Popen(
            self._argv("up", "--no-color", "--exit-code-from", "rendezvous"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environ,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.output += line
                if at_first_collective is not None and FIRST_COLLECTIVE in line:
                    at_first_collective()
                    at_first_collective = None
            return process.wait(timeout=STACK_SECONDS)

    def kill(self, service: str, number: signal.Signals) -> None:
        self.compose("kill", "--signal", number.name, service)

    def compose(self, *command: str) -> None:
        subprocess.run(self._argv(*command), check=True, capture_output=True, env=self._environ)

    def _argv(self, *command: str) -> list[str]:
        return ["docker", "compose", "-p", self.name, "-f", str(asset("compose/cpu-pair.yaml")), *command]


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    stack = Stack(getattr(request, "param", {}))
    if not Path(asset("scripts/check_collectives.py")).exists():
        pytest.skip("the stack runs from a checkout")
    try:
        stack.compose("build", "--quiet")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


def test_all_checks_pass_through_link_and_bridge(stack: Stack) -> None:
    assert stack.up() == 0, stack.output
    for rank in (0, 1):
        assert f"rank {rank}: all " in stack.output


@pytest.mark.parametrize(
    ("stack", "broken"),
    [({"BREAK_RANK": "0"}, 0), ({"BREAK_RANK": "1"}, 1)],
    indirect=["stack"],
    ids=["head", "joiner"],
)
def test_a_rank_that_exits_in_the_middle_gives_the_stack_its_code(stack: Stack, broken: int) -> None:
    assert stack.up() == 3, stack.output
    assert f"failed first: rank {broken} " in stack.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("stack", [{"MAX_MB": "100"}], indirect=True, ids=[""])
def test_an_interrupted_or_killed_head_is_no_success(stack: Stack, number: signal.Signals) -> None:
    assert stack.up(at_first_collective=lambda: stack.kill("rank0", number)) not in (0, None), stack.output
    assert "rank 0: all " not in stack.output


@pytest.mark.parametrize("stack", [{"MAX_MB": "100"}], indirect=True, ids=[""])
def test_a_joiner_that_is_gone_is_no_success(stack: Stack) -> None:
    assert stack.up(at_first_collective=lambda: stack.kill("rank1", signal.SIGKILL)) not in (0, None), stack.output
    assert "rank 1: all " not in stack.output
