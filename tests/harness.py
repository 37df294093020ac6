"""The command line as a user has it: processes that are started, read line by line, signalled and waited for."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from two_hosts import TwoHosts, clean_environment

SCRIPTS = Path(__file__).parent.parent / "scripts"
HETDEPLOY = (sys.executable, "-W", "error::ResourceWarning", "-m", "hetdeploy.cli")
END_SECONDS = 60.0


class Command:
    """A running ``hetdeploy`` command; stdout and stderr are one text. Killed at the end of its ``with`` block."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        host: TwoHosts | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        command = [*HETDEPLOY, *arguments]
        self.arguments = arguments
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._process = subprocess.Popen(
            host.command(*command) if host else command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            # The ranks of a test share one small machine: with threads for every core they would starve each other.
            env={**clean_environment(), "HETDEPLOY_OMP_NUM_THREADS": "1", **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        with self._more:
            return "".join(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, pattern: str, seconds: float = END_SECONDS) -> re.Match[str]:
        """The first match of ``pattern`` in the output, now or within ``seconds``."""
        return self._wait(lambda: re.search(pattern, "".join(self.lines)), seconds, f"show {pattern!r}")

    def wait(self, seconds: float = END_SECONDS) -> int:
        """The exit code."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.arguments} did not end within {seconds} s:\n{self.text}") from None
        self._reader.join(timeout=5)
        return code

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(timeout=5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                with self._more:
                    self.lines.append(line)
                    self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def _wait(self, found: Callable[[], Any], seconds: float, purpose: str) -> Any:
        with self._more:
            self._more.wait_for(lambda: found() or (not self._reader.is_alive() and self._is_over()), seconds)
            if match := found():
                return match
        raise AssertionError(f"{self.arguments} did not {purpose} within {seconds} s:\n{''.join(self.lines)}")

    def _is_over(self) -> bool:
        return self._process.poll() is not None


def run(*arguments: str, cwd: Path, **options: Any) -> tuple[int, str]:
    """Exit code and output of a command that ends by itself."""
    with Command(*arguments, cwd=cwd, **options) as command:
        return command.wait(), command.text


def join_code(up: Command, seconds: float = END_SECONDS) -> str:
    """The code that `up` printed, once it waits for joiners."""
    return str(up.wait_for(r"hetdeploy join (hd1-\S+)\n", seconds)[1])


def write_script(folder: Path, text: str, name: str = "job.py") -> Path:
    """A script in a folder of its own, as a job has it."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    script.write_text(text)
    return script
