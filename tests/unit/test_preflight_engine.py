"""Which Docker engine is meant, and what is said when it cannot be used."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import multiprocessing
import os
import shutil
import socket
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetdeploy.errors import PreflightError
from hetdeploy.preflight import engine
from hetdeploy.preflight.engine import connect, resolve_endpoint


def write_context(home: Path, name: str, address: str, *, current: bool) -> None:
    folder = home / ".docker" / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    meta = {"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": address, "SkipTLSVerify": False}}}
    (folder / "meta.json").write_text(json.dumps(meta))
    if current:
        (home / ".docker" / "config.json").write_text(json.dumps({"currentContext": name}))


CHOICES = [
    ({}, "unix:///run/desk.sock"),
    ({"DOCKER_CONTEXT": "other"}, "unix:///run/other.sock"),
    ({"DOCKER_CONTEXT": "default"}, engine.DEFAULT_SOCKET),
    ({"DOCKER_HOST": "unix:///run/host.sock"}, "unix:///run/host.sock"),
    ({"DOCKER_HOST": "unix:///run/host.sock", "DOCKER_CONTEXT": "other"}, "unix:///run/host.sock"),
    ({"DOCKER_HOST": "", "DOCKER_CONTEXT": ""}, "unix:///run/desk.sock"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_context(tmp_path, "desk", "unix:///run/desk.sock", current=True)
    write_context(tmp_path, "other", "unix:///run/other.sock", current=False)
    return tmp_path


@pytest.mark.parametrize(("variables", "address"), CHOICES)
def test_the_engine_is_chosen_in_the_order_of_the_docker_command(
    home: Path, variables: dict[str, str], address: str
) -> None:
    assert resolve_endpoint({"HOME": str(home), **variables}).address == address


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker command to compare with")
@pytest.mark.parametrize(("variables", "address"), CHOICES)
def test_the_docker_command_itself_chooses_the_same(home: Path, variables: dict[str, str], address: str) -> None:
    command = ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == address


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket may have about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="hetdeploy-", dir="/tmp") as folder:
        yield Path(folder)


def test_without_any_setting_it_is_the_default_socket(tmp_path: Path) -> None:
    assert resolve_endpoint({"HOME": str(tmp_path)}).address == engine.DEFAULT_SOCKET


def test_a_context_that_does_not_exist_is_named(home: Path) -> None:
    with pytest.raises(PreflightError, match=r"no Docker context gone \(DOCKER_CONTEXT=gone\)"):
        resolve_endpoint({"HOME": str(home), "DOCKER_CONTEXT": "gone"})


def test_a_damaged_config_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text("{")
    assert resolve_endpoint({"HOME": str(tmp_path)}).address == engine.DEFAULT_SOCKET


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:2375", "ssh://me@box"])
def test_an_engine_on_another_machine_is_refused(address: str) -> None:
    with pytest.raises(PreflightError, match="is not this machine's"):
        connect({"DOCKER_HOST": address})


def test_no_engine(sockets: Path) -> None:
    with pytest.raises(PreflightError, match=r"no Docker engine answers at unix://.*/none \(DOCKER_HOST\): start it"):
        connect({"DOCKER_HOST": f"unix://{sockets}/none"})


def test_an_engine_that_has_gone_and_left_its_socket(sockets: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{sockets}/left")
    with pytest.raises(PreflightError, match="no Docker engine answers"):
        connect({"DOCKER_HOST": f"unix://{sockets}/left"})


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody without permission needs root")
def test_a_user_outside_the_docker_group_is_told_how_to_get_in(sockets: Path) -> None:
    sockets.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as engine_socket:
        engine_socket.bind(f"{sockets}/docker.sock")
        engine_socket.listen()
        (sockets / "docker.sock").chmod(0o660)
        spawn = multiprocessing.get_context("spawn")
        answers = spawn.Queue()
        process = spawn.Process(target=connect_as_nobody, args=(f"unix://{sockets}/docker.sock", answers))
        process.start()
        message = answers.get(timeout=60)
        process.join(timeout=60)
        answers.close()
        answers.join_thread()
    assert "this user may not use the Docker engine" in message
    assert "sudo usermod -aG docker $USER" in message
    assert "chmod" not in message


def connect_as_nobody(address: str, answers: multiprocessing.Queue[str]) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        connect({"DOCKER_HOST": address}).close()
        answers.put("connected")
    except PreflightError as error:
        answers.put(str(error))


def test_an_old_engine_is_named_with_its_version_and_the_needed_one(sockets: Path) -> None:
    old = r"too old \(API 1\.40; needed is 1\.41, Docker 20\.10\): update Docker"
    with engine_of_version("1.40", sockets / "docker.sock") as environ, pytest.raises(PreflightError, match=old):
        connect(environ)


def test_an_engine_of_the_oldest_version_will_do(sockets: Path) -> None:
    with engine_of_version("1.41", sockets / "docker.sock") as environ:
        connect(environ).close()


def test_something_that_is_no_engine_is_told_apart(sockets: Path) -> None:
    with engine_of_version(None, sockets / "docker.sock") as environ, pytest.raises(PreflightError, match="as one"):
        connect(environ)


@pytest.mark.docker
def test_the_real_engine_answers_whatever_version_the_shell_pins() -> None:
    info = engine.engine_info({**os.environ, "DOCKER_API_VERSION": "1.99"})
    assert tuple(map(int, info["ApiVersion"].split("."))) >= engine.OLDEST_API
    assert info["DockerRootDir"]


@contextlib.contextmanager
def engine_of_version(version: str | None, path: Path) -> Iterator[dict[str, str]]:
    """An HTTP server on a Unix socket that answers the one question with which the SDK begins."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"ApiVersion": version} if version else {}).encode()
            self.send_response(200 if version else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None: ...

    with socketserver.UnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield {"DOCKER_HOST": f"unix://{path}"}
        server.shutdown()
        thread.join(timeout=10)
