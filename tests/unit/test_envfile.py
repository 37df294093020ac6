"""What people write into env files, and what other tools make of the env files that hetdeploy writes."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st

from hetdeploy import envfile
from hetdeploy.errors import HetdeployError, UsageError

KNOWN = ("HETDEPLOY_NIC", "HETDEPLOY_PORT", "HETDEPLOY_NPROC_PER_NODE")
COMMAND_SECONDS = 60
BASE_IMAGE = "debian:bookworm-slim"

# Values that all three tools read as they are written.
ALIKE = {
    "EMPTY": "",
    "NUMBER": "29400",
    "ADDRESS": "192.168.1.10",
    "SPACES": "/home/ada lovelace/my job/.hetdeploy",
    "EQUALS": "a=b=c",
    "LEADING_EQUALS": "=x",
    "HASH_INSIDE": "a#b",
    "QUOTES_INSIDE": '/home/o\'brien/the "job"',
    "BACKSLASH": "a\\nb\\",
    "URL": "https://user@example.org:8443/simple/?a=1&b=%20#top",
    "PUNCTUATION": "!*?[]{}()<>|;&,~@%^`",
    "LETTERS": "Zoë/データ",
    "YAML_LIKE": "- key: {null}",
    "EXPORT": "export X",
}

DIFFERENT = {
    "double quotes": '"quoted"',
    "single quotes": "'quoted'",
    "one quote": "'tis",
    "dollar": "a$b",
    "dollar at the end": "a$",
    "comment": "a #b",
    "hash first": "#b",
    "line feed": "a\nEVIL=1",
    "carriage return": "a\rb",
    "tab": "a\t#b",
    "null": "a\0b",
    "space first": " a",
    "space last": "a ",
    "no-break space last": "a\u00a0",
    "line separator": "a\u2028b",
    "too long": "x" * 65536,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("HETDEPLOY_NIC=en0\n", "en0"),
        ("HETDEPLOY_NIC=en0", "en0"),
        ("HETDEPLOY_NIC = en0 \n", "en0"),
        ("export HETDEPLOY_NIC=en0\n", "en0"),
        ('HETDEPLOY_NIC="en0"\n', "en0"),
        ("HETDEPLOY_NIC='en0' # the wire\n", "en0"),
        ("HETDEPLOY_NIC=en0 # the wire\n", "en0"),
        ("HETDEPLOY_NIC=en#0\n", "en#0"),
        ("HETDEPLOY_NIC=$HOME/${X}\n", "$HOME/${X}"),
        ("HETDEPLOY_NIC=\n", ""),
        ("# a comment\n\n  HETDEPLOY_NIC=en0\n", "en0"),
    ],
)
def test_reads_what_people_write(tmp_path: Path, text: str, value: str) -> None:
    path = tmp_path / ".env"
    path.write_text(text)
    assert envfile.read(path, KNOWN)["HETDEPLOY_NIC"].value == value


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_byte_order_mark_and_line_ends_leave_no_trace(tmp_path: Path, mark: bytes, newline: str) -> None:
    path = tmp_path / ".env"
    path.write_bytes(mark + newline.join(["HETDEPLOY_PORT=29400", "", "# note", "HETDEPLOY_NIC=en0", ""]).encode())
    assert envfile.read(path, KNOWN) == {
        "HETDEPLOY_PORT": envfile.Entry("29400", 1),
        "HETDEPLOY_NIC": envfile.Entry("en0", 4),
    }


def test_keys_of_other_programs_are_left_to_them(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("WANDB_MODE=offline\nHETDEPLOYMENT=blue\n")
    assert list(envfile.read(path, KNOWN)) == ["WANDB_MODE", "HETDEPLOYMENT"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"HETDEPLOY_PORT=1\n\nHETDEPLOY_PORT=2\n", ":3: HETDEPLOY_PORT is already set on line 1: keep one of the two"),
        (b"HETDEPLOY_PROT=1\n", ":1: HETDEPLOY_PROT is not a setting of hetdeploy: did you mean HETDEPLOY_PORT?"),
        (b"hetdeploy_port=1\n", ":1: hetdeploy_port is not a setting of hetdeploy: did you mean HETDEPLOY_PORT?"),
        (b"HETDEPLOY-NIC=1\n", ":1: HETDEPLOY-NIC is not a setting of hetdeploy: did you mean HETDEPLOY_NIC?"),
        (b"A=1\nHETDEPLOY_XYZZY=1\n", ":2: HETDEPLOY_XYZZY is not a setting of hetdeploy: `hetdeploy env --explain`"),
        (b"\n\nHETDEPLOY_PORT\n", ":3: HETDEPLOY_PORT has no value: write HETDEPLOY_PORT=value"),
        (b"A=1\nHETDEPLOY_NIC='en0\n", ":2 cannot be read: write KEY=value, with quotes in pairs"),
        (b"HETDEPLOY_NIC: en0\n", ":1 cannot be read"),
        ("HETDEPLOY_NIC=en0\n".encode("utf-16"), " is not UTF-8 text; it looks like UTF-16: save it again as UTF-8"),
        ("HETDEPLOY_NIC=en0\n".encode("utf-16-le"), " is not UTF-8 text; it looks like UTF-16"),
        (b"A=1\nB=caf\xe9\n", ":2 is not UTF-8 text: save the file again as UTF-8"),
    ],
)
def test_bad_files_are_named_with_the_line_and_the_mend(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / ".env"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        envfile.read(path, KNOWN)
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_folder_in_the_files_place_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
        envfile.read(tmp_path)


def test_written_files_read_back_alike(tmp_path: Path) -> None:
    path = tmp_path / "head.env"
    assert envfile.write(path, ALIKE, "hetdeploy up", {})
    assert dotenv_values(path, interpolate=False) == ALIKE
    assert dotenv_values(path, interpolate=True) == ALIKE
    assert {key: entry.value for key, entry in envfile.read(path).items()} == ALIKE


@given(st.text(max_size=40))
def test_any_value_reads_back_or_is_refused(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    path = tmp_path_factory.mktemp("any") / "head.env"
    try:
        envfile.write(path, {"KEY": value, "NEXT": "1"}, "hetdeploy up", {})
    except UsageError:
        assert not path.exists()
    else:
        assert dotenv_values(path, interpolate=True) == {"KEY": value, "NEXT": "1"}


@pytest.mark.parametrize("value", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_values_the_tools_disagree_on_are_refused_by_key(tmp_path: Path, value: str) -> None:
    path = tmp_path / "head.env"
    with pytest.raises(UsageError) as caught:
        envfile.write(path, {"FINE": "1", "HETDEPLOY_RUNS": value}, "hetdeploy up", {})
    assert str(caught.value).startswith("HETDEPLOY_RUNS=")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'A KEY' cannot be a key"):
        envfile.write(tmp_path / "head.env", {"A KEY": "1"}, "hetdeploy up", {})


def compose_environment(path: Path) -> dict[str, str]:
    """What Compose puts in the place of ${KEY} for the keys of an env file."""
    keys = list(envfile.read(path))
    (path.parent / "compose.json").write_text(
        json.dumps({"services": {"s": {"image": "x", "environment": {key: f"${{{key}?}}" for key in keys}}}})
    )
    # Compose prefers a variable of the shell over the file's: this shell has none of the keys.
    shell = {name: value for name, value in os.environ.items() if name not in keys}
    command = ["docker", "compose", "--env-file", path.name, "-f", "compose.json", "config", "--format", "json"]
    answer = subprocess.run(
        command, cwd=path.parent, env=shell, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS
    )
    environment = json.loads(answer.stdout)["services"]["s"]["environment"]
    # `config` doubles each $, so that its output is a Compose file again.
    return {key: value.replace("$$", "$") for key, value in environment.items()}


def docker_run_environment(path: Path) -> dict[str, str]:
    command = ["docker", "run", "--rm", "--network=none", f"--env-file={path}", BASE_IMAGE, "env", "--null"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS)
    return dict(entry.split("=", 1) for entry in answer.stdout.split("\0") if entry)


@pytest.mark.docker
def test_compose_reads_written_files_alike(tmp_path: Path) -> None:
    path = tmp_path / "head.env"
    envfile.write(path, ALIKE, "hetdeploy up", {})
    assert compose_environment(path) == ALIKE


@pytest.mark.docker
def test_docker_run_reads_written_files_alike(tmp_path: Path) -> None:
    path = tmp_path / "head.env"
    envfile.write(path, ALIKE, "hetdeploy up", {})
    seen = docker_run_environment(path)
    assert {key: seen.get(key) for key in ALIKE} == ALIKE


def test_written_files_say_who_made_them_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "head.env"
    path.write_text("old")
    path.chmod(0o644)
    assert envfile.write(path, {"A": "1"}, "hetdeploy up", {})
    assert path.read_text().splitlines()[0].startswith("# Generated by `hetdeploy up`")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_values_leave_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "head.env"
    envfile.write(path, {"A": "1"}, "hetdeploy up", {})
    path.chmod(0o644)
    inode = path.stat().st_ino
    assert not envfile.write(path, {"A": "1"}, "hetdeploy up", {})
    assert path.stat().st_ino == inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert envfile.write(path, {"A": "2"}, "hetdeploy up", {})


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "head.env"
    envfile.write(path, {"A": "1"}, "hetdeploy up", {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HetdeployError, match=r"head.env cannot be written \(No space left on device\): see to"):
        envfile.write(path, {"A": "2"}, "hetdeploy up", {})
    assert envfile.read(path)["A"].value == "1"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
class TestOwner:
    def test_of_a_replaced_file_keeps_it(self, tmp_path: Path) -> None:
        path = tmp_path / "head.env"
        path.write_text("old")
        os.chown(path, 1234, 2345)
        envfile.write(path, {"A": "1"}, "hetdeploy up", {"SUDO_UID": "77", "SUDO_GID": "77"})
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)

    def test_under_sudo_is_the_caller_of_sudo(self, tmp_path: Path) -> None:
        path = tmp_path / "head.env"
        sudo = {"SUDO_UID": "1234", "SUDO_GID": "2345"}
        envfile.write(path, {"A": "1"}, "hetdeploy up", sudo)
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)

    def test_under_sudo_a_file_left_by_root_goes_to_the_caller(self, tmp_path: Path) -> None:
        path = tmp_path / "head.env"
        envfile.write(path, {"A": "1"}, "hetdeploy up", {})
        assert not envfile.write(path, {"A": "1"}, "hetdeploy up", {"SUDO_UID": "1234", "SUDO_GID": "2345"})
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)
