"""What a node does otherwise on a Mac; tests/lan/test_fake_mac.py has all of it in one job."""

from __future__ import annotations

import ast
import os
import platform
import sys
from pathlib import Path

import psutil
import pytest
from sample_job import sample_job

import hetdeploy
from hetdeploy.nodes import accelerator
from hetdeploy.nodes.joiner import _stay_awake
from hetdeploy.nodes.launch import Node, rank_environment
from hetdeploy.nodes.member import Machine, gloo_address, is_bridged

LISTING = "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-00000000-0000-0000-0000-000000000000)"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that alone is searched for programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def on(monkeypatch: pytest.MonkeyPatch, system: str, machine: str = "arm64") -> None:
    monkeypatch.setattr(sys, "platform", system.lower())
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)


class TestStayAwake:
    @pytest.fixture
    def started(self, programs: Path, tmp_path: Path) -> Path:
        """A pipe on which caffeinate says by which process id and arguments it was started."""
        pipe = tmp_path / "started"
        os.mkfifo(pipe)
        add_program(programs, "caffeinate", f'echo $$ "$@" > {pipe}\nexec /bin/sleep 60')
        return pipe

    def test_caffeinate_runs_as_long_as_the_job(self, started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, "Darwin")
        with _stay_awake():
            pid, *arguments = started.read_text().split()
            assert arguments == ["-i", "-m", "-s", "-w", str(os.getpid())]
            assert psutil.pid_exists(int(pid))
        assert not psutil.pid_exists(int(pid))

    def test_caffeinate_ends_when_the_job_fails(self, started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, "Darwin")
        with pytest.raises(KeyboardInterrupt), _stay_awake():
            pid = int(started.read_text().split()[0])
            raise KeyboardInterrupt
        assert not psutil.pid_exists(pid)

    @pytest.mark.usefixtures("programs")
    def test_a_mac_without_caffeinate_runs_the_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, "Darwin")
        before = psutil.Process().children()
        with _stay_awake():
            assert psutil.Process().children() == before

    @pytest.mark.usefixtures("started")
    def test_linux_has_no_use_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, "Linux")
        before = psutil.Process().children()
        with _stay_awake():
            assert psutil.Process().children() == before


class TestAccelerator:
    @pytest.mark.parametrize(("machine", "found"), [("arm64", "mps"), ("x86_64", "cpu")])
    def test_of_a_mac(self, machine: str, found: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_program(programs, "nvidia-smi", f"echo '{LISTING}'")
        on(monkeypatch, "Darwin", machine)
        assert accelerator.detect("auto") == found

    @pytest.mark.parametrize(
        ("script", "found"),
        [
            (f"echo '{LISTING}'", "cuda"),
            ("echo 'No devices found.'; exit 6", "cpu"),
            ("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9", "cpu"),
            (f"echo '{LISTING}'; exit 1", "cpu"),
            (None, "cpu"),
        ],
    )
    def test_of_linux(self, script: str | None, found: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if script is not None:
            add_program(programs, "nvidia-smi", script)
        on(monkeypatch, "Linux", "x86_64")
        assert accelerator.detect("auto") == found

    def test_a_program_that_cannot_be_run_finds_no_card(self, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (programs / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
        (programs / "nvidia-smi").chmod(0o755)
        on(monkeypatch, "Linux", "x86_64")
        assert accelerator.detect("auto") == "cpu"

    @pytest.mark.parametrize("wanted", ["cpu", "cuda", "mps"])
    def test_that_was_asked_for(self, wanted: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        on(monkeypatch, "Darwin")
        assert accelerator.detect(wanted) == wanted


@pytest.mark.parametrize(("kind", "fallback"), [("mps", "1"), ("cuda", None), ("cpu", None)])
def test_ranks_on_mps_fall_back_to_the_cpu(kind: str, fallback: str | None, tmp_path: Path) -> None:
    node = Node(
        name="mac",
        role="joiner",
        rendezvous="127.0.0.1:29500",
        local_address="node-mac",
        gloo_interface="lo0",
        nproc_per_node=1,
        accelerator=kind,
        dialect="uv",
        folder=tmp_path,
        bridge="/tmp/bridge",
    )
    env = rank_environment(sample_job(), node)
    assert env.get("PYTORCH_ENABLE_MPS_FALLBACK") == fallback
    assert (env["GLOO_SOCKET_IFNAME"], env["HETDEPLOY_DIALECT"]) == ("lo0", "uv")


@pytest.mark.parametrize(
    ("system", "role", "link", "bridged"),
    [
        ("Darwin", "joiner", "tunnel", True),
        ("Darwin", "joiner", "direct", True),
        ("Linux", "joiner", "tunnel", True),
        ("Linux", "joiner", "direct", False),
        ("Linux", "head", "tunnel", False),
        ("Linux", "head", "direct", False),
    ],
)
def test_who_has_a_bridge(system: str, role: str, link: str, bridged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, system)
    machine = Machine(role, Path("runs"), "cpu", 1, "192.168.1.23")
    assert is_bridged(sample_job(link=link), machine) == bridged
    assert gloo_address(sample_job(link=link), machine) == ("127.0.0.1" if bridged else "192.168.1.23")


def test_nothing_forks() -> None:
    """macOS ends a process that was forked, and not replaced, once Objective-C or Metal has been in use."""
    modules = sorted(Path(hetdeploy.__file__).parent.rglob("*.py"))
    assert not {f"{path}:{line}" for path in modules for line in forks(path.read_text())}


@pytest.mark.parametrize(
    "code",
    [
        "os.fork()",
        "pty.fork()",
        "subprocess.Popen(['a'], preexec_fn=os.setsid)",
        "multiprocessing.get_context('fork')",
        "multiprocessing.get_context()",
        "multiprocessing.set_start_method('forkserver')",
        "multiprocessing.Process(target=f)",
        "mp.Pool(4)",
    ],
)
def test_a_fork_is_found(code: str) -> None:
    assert forks(code) == [1]


def test_a_spawn_is_no_fork() -> None:
    assert not forks("context = multiprocessing.get_context('spawn'); context.Process(target=f)")


def forks(code: str) -> list[int]:
    """The lines with a call that forks, or may do so."""
    return [node.lineno for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and _may_fork(node)]


def _may_fork(call: ast.Call) -> bool:
    if any(keyword.arg == "preexec_fn" for keyword in call.keywords):
        return True
    module, _, name = ast.unparse(call.func).rpartition(".")
    if name in ("get_context", "set_start_method"):
        return [ast.unparse(argument) for argument in call.args] != ["'spawn'"]
    return name in ("fork", "forkpty") or (module in ("multiprocessing", "mp") and name in ("Process", "Pool"))
