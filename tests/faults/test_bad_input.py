"""Bad input gets one clear line, the right exit code, and leaves nothing behind."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from harness import Command, join_code, run, write_script

from hetdeploy.link.invitation import Invitation
from hetdeploy.network.probe import free_port

WAITING = "import time\nwhile True: time.sleep(1)\n"


@pytest.fixture
def ports() -> tuple[str, ...]:
    return ("--native", "--nic", "lo", "--port", str(free_port()), "--store-port", str(free_port()))


def error_line(text: str) -> str:
    """The one line of error in a command's output."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, text
    assert "Traceback" not in text
    return errors[0]


def test_the_script_is_missing(tmp_path: Path) -> None:
    code, text = run("up", "--native", "--nic", "lo", "train.py", cwd=tmp_path)
    assert (code, error_line(text)) == (
        2,
        "error: there is no script train.py: check the path; it is relative to the folder you are in",
    )


@pytest.mark.parametrize(
    ("nic", "says"),
    [
        ("^lo", "NCCL's way to leave one out"),
        ("eth*", "is a pattern"),
        ("127.0.0.1", "is an address"),
        ("nic7", "is not on this machine"),
    ],
)
def test_a_nic_that_gloo_cannot_take(nic: str, says: str, tmp_path: Path) -> None:
    write_script(tmp_path, WAITING)
    code, text = run("up", "--native", "--nic", nic, "job.py", cwd=tmp_path)
    assert code == 2
    assert says in error_line(text)
    assert not (tmp_path / ".hetdeploy" / "head.env").exists()


def test_the_port_is_taken_and_by_whom(tmp_path: Path) -> None:
    write_script(tmp_path, WAITING)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, text = run("up", "--native", "--nic", "lo", "--port", port, "job.py", cwd=tmp_path)
    assert code == 3
    assert f"port {port} of 127.0.0.1 is taken by " in text
    assert "HETDEPLOY_PORT" in text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("hd1-AAAA", "cut short"),
        ("gibberish", "not a join code"),
        ("", "join code"),
    ],
)
def test_a_code_that_is_none(code: str, says: str, tmp_path: Path) -> None:
    exit_code, text = run("join", code, cwd=tmp_path)
    assert exit_code == 2
    assert says in error_line(text)


def test_an_altered_code(tmp_path: Path) -> None:
    code = Invitation("127.0.0.1", 29400, bytes(16), bytes(16), 0).encode()
    altered = code[:20] + ("A" if code[20] != "A" else "B") + code[21:]
    exit_code, text = run("join", altered, cwd=tmp_path)
    assert exit_code == 2
    error_line(text)


def test_an_expired_code_is_not_waited_with(tmp_path: Path) -> None:
    code = Invitation("127.0.0.1", free_port(), bytes(16), bytes(16), int(time.time()) - 60).encode()
    exit_code, text = run("join", code, cwd=tmp_path)
    assert exit_code == 2
    assert "expired" in error_line(text)


def test_nobody_answers_within_the_join_timeout(tmp_path: Path) -> None:
    port = free_port()
    code = Invitation("127.0.0.1", port, bytes(16), bytes(16), 0).encode()
    exit_code, text = run("join", "--join-timeout", "2", code, cwd=tmp_path)
    assert exit_code == 4
    assert f"127.0.0.1:{port} did not answer within 2 s" in error_line(text)
    assert f"waiting for the head: cannot reach 127.0.0.1:{port}" in text


def test_codes_that_the_head_does_not_take(ports: tuple[str, ...], tmp_path: Path) -> None:
    write_script(tmp_path / "head", WAITING)
    with Command("up", *ports, "job.py", cwd=tmp_path / "head") as up:
        old = join_code(up)
        known = Invitation.decode(old)
        wrong = Invitation(known.host, known.port, bytes(16), known.pin, 0).encode()
        elsewhere = Invitation(known.host, known.port, known.secret, bytes(16), 0).encode()
        assert run("code", "--rotate", cwd=tmp_path / "head")[0] == 0
        for code, says in (
            (old, "replaced by a newer one"),
            (wrong, "not one of this head's"),
            (elsewhere, "another certificate"),
        ):
            exit_code, text = run("join", code, cwd=tmp_path / "joiner")
            assert exit_code == 2, text
            assert says in error_line(text)
        new = run("code", cwd=tmp_path / "head")[1].split()[-1]
        assert new != old
        with Command("join", new, cwd=tmp_path / "joiner") as join:
            up.wait_for(r"\S+ joined from .*\n(.*\n)*.* joined from")
            exit_code, text = run("join", new, cwd=tmp_path / "third")
            assert exit_code == 1
            assert "the job has its 2 nodes already (head, " in error_line(text)
            assert run("down", cwd=tmp_path / "head")[0] == 0
            assert join.wait() == 130, join.text
        assert up.wait() == 130, up.text


def test_other_versions_are_refused_with_both_named(ports: tuple[str, ...], tmp_path: Path) -> None:
    write_script(tmp_path / "head", WAITING)
    # Another release of torch on the joiner, as far as its metadata goes: what `join` reads before torch is imported.
    fake = tmp_path / "fake" / "torch-2.13.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.1\n")
    with Command("up", *ports, "job.py", cwd=tmp_path / "head") as up:
        env = {"PYTHONPATH": str(fake.parent)}
        exit_code, text = run("join", join_code(up), cwd=tmp_path / "joiner", env=env)
    assert exit_code == 5, text
    assert "2.13.0" in error_line(text)
    assert "2.13.1" in error_line(text)


def test_a_second_up_changes_nothing_and_another_job_is_refused(ports: tuple[str, ...], tmp_path: Path) -> None:
    write_script(tmp_path, WAITING)
    write_script(tmp_path, WAITING + "# another\n", "other.py")
    assert run("up", "--detach", *ports, "job.py", cwd=tmp_path)[0] == 0
    try:
        before = (tmp_path / ".hetdeploy" / "job.json").read_text()
        code, text = run("up", "--detach", *ports, "job.py", cwd=tmp_path)
        assert code == 0
        assert "already up" in text
        assert "hetdeploy join hd1-" in text
        assert (tmp_path / ".hetdeploy" / "job.json").read_text() == before
        code, text = run("up", "--detach", *ports, "other.py", cwd=tmp_path)
        assert code == 2
        assert "another job is up in this folder" in error_line(text)
    finally:
        assert run("down", cwd=tmp_path)[0] == 0
    code, text = run("down", cwd=tmp_path)
    assert code == 0
    assert "nothing to end" in text


def test_verbs_without_a_job(tmp_path: Path) -> None:
    for verb in ("status", "logs", "code"):
        code, text = run(verb, cwd=tmp_path)
        assert code == 2
        assert "no job was started in" in error_line(text)
    assert run("down", cwd=tmp_path)[0] == 0


def test_variables_of_another_launcher_do_not_reach_the_ranks(ports: tuple[str, ...], tmp_path: Path) -> None:
    show = "import os\nprint('seen', os.environ.get('WORLD_SIZE'), os.environ.get('PET_NNODES'), flush=True)\n"
    write_script(tmp_path, show)
    env = {"RANK": "7", "MASTER_ADDR": "10.9.8.7", "WORLD_SIZE": "99", "PET_NNODES": "5"}
    code, text = run("up", *ports, "--nodes", "1", "job.py", cwd=tmp_path, env=env)
    assert code == 0, text
    assert "seen 1 None" in text
    assert "warning: the shell has MASTER_ADDR, PET_NNODES, RANK, WORLD_SIZE" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"HETDEPLOY_PROT=1\n", "HETDEPLOY_PROT is not a setting of hetdeploy: did you mean HETDEPLOY_PORT"),
        (b"HETDEPLOY_PORT=1\nHETDEPLOY_PORT=2\n", "is already set on line 1"),
        (b"HETDEPLOY_PORT=http\n", "HETDEPLOY_PORT=http (.env:1) is not a port"),
        ("HETDEPLOY_PORT=1\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_env_files(content: bytes, says: str, tmp_path: Path) -> None:
    write_script(tmp_path, WAITING)
    (tmp_path / ".env").write_bytes(content)
    code, text = run("up", "--native", "--nic", "lo", "job.py", cwd=tmp_path)
    assert code == 2
    assert says in error_line(text)


def test_an_env_file_from_a_windows_editor_is_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfexport HETDEPLOY_PORT='29444'\r\nHETDEPLOY_DATA_DIR=\"a $HOME\"\r\n")
    code, text = run("env", cwd=tmp_path)
    assert code == 0
    assert "HETDEPLOY_PORT=29444" in text
    assert "HETDEPLOY_DATA_DIR=a $HOME" in text


def test_no_engine(tmp_path: Path) -> None:
    write_script(tmp_path, WAITING)
    env = {"DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    code, text = run("up", "--nic", "lo", "job.py", cwd=tmp_path, env=env)
    assert code == 3
    assert "Docker engine" in error_line(text)


def test_debug_shows_the_trace(tmp_path: Path) -> None:
    code, text = run("--debug", "up", "--native", "--nic", "lo", "train.py", cwd=tmp_path)
    assert code == 2
    assert "Traceback" in text
    assert "error: there is no script train.py" in text
