"""One order of origins, one line for each wrong value, and an example file that cannot drift from the table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hetdeploy import envfile, settings
from hetdeploy.cli import env
from hetdeploy.errors import UsageError

REPOSITORY = Path(__file__).parents[2]


def load(folder: Path, flags: dict[str, str | None] | None = None, **environ: str) -> settings.Settings:
    return settings.load(flags or {}, environ, folder)


def refusal(folder: Path, flags: dict[str, str | None] | None = None, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, flags, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flag_beats_environment_beats_local_file_beats_file_beats_default(tmp_path: Path) -> None:
    key = "HETDEPLOY_PORT"
    assert load(tmp_path)[key] == settings.Value("29400", "default", "default")
    (tmp_path / ".env").write_text(f"\n{key}=1001\n")
    assert load(tmp_path)[key] == settings.Value("1001", ".env", ".env:2")
    (tmp_path / ".env.local").write_text(f"{key}=1002\n")
    assert load(tmp_path)[key] == settings.Value("1002", ".env.local", ".env.local:1")
    assert load(tmp_path, **{key: "1003"})[key] == settings.Value("1003", "environment", "the environment")
    assert load(tmp_path, {key: "1004"}, **{key: "1003"})[key] == settings.Value("1004", "flag", "--port")


def test_an_empty_value_is_no_value(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HETDEPLOY_PORT=1001\n")
    (tmp_path / ".env.local").write_text("HETDEPLOY_PORT=\n")
    assert load(tmp_path, {"HETDEPLOY_PORT": None}, HETDEPLOY_PORT="").port == 1001


def test_the_types_of_the_defaults(tmp_path: Path) -> None:
    defaults = load(tmp_path)
    assert list(defaults) == list(settings.KEYS)
    assert len(defaults) == len(settings.TABLE)
    assert (defaults.nic, defaults.port, defaults.store_port) == (None, 29400, 29500)
    assert (defaults.link, defaults.accelerator, defaults.backend) == ("tunnel", "auto", "gloo")
    assert (defaults.nodes, defaults.nproc_per_node, defaults.omp_num_threads) == ((2, 2), 1, None)
    assert not defaults.crew
    assert (defaults.code_ttl, defaults.join_timeout, defaults.exit_timeout, defaults.shm_size) == (
        86400,
        3600,
        60,
        "2g",
    )
    assert (defaults.runs_dir, defaults.data_dir) == (tmp_path / ".hetdeploy/runs", None)
    assert re.fullmatch(r"2\.\d+\.\d+", defaults.torch_version)


def test_values_in_their_types(tmp_path: Path) -> None:
    given = load(
        tmp_path,
        HETDEPLOY_NIC="en0",
        HETDEPLOY_NODES="1:4",
        HETDEPLOY_DATA_DIR="~/texts",
        HETDEPLOY_RUNS_DIR="/var/runs",
        HETDEPLOY_OMP_NUM_THREADS="8",
    )
    assert (given.nic, given.nodes, given.omp_num_threads) == ("en0", (1, 4), 8)
    assert (given.data_dir, given.runs_dir) == (Path.home() / "texts", Path("/var/runs"))


@pytest.mark.parametrize(
    ("value", "cpu", "cuda"),
    [
        ("auto", settings.CPU_INDEX, ""),
        ("none", "", ""),
        ("https://mirror.example/simple", "https://mirror.example/simple", "https://mirror.example/simple"),
    ],
)
def test_the_torch_index_follows_the_accelerator(tmp_path: Path, value: str, cpu: str, cuda: str) -> None:
    given = load(tmp_path, HETDEPLOY_TORCH_INDEX=value)
    assert (given.torch_index("cpu"), given.torch_index("cuda")) == (cpu, cuda)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("PORT", ["0", "65536", "-1", "http", "29400 ", "²", "9" * 5000]),
        ("LINK", ["Tunnel", "vpn"]),
        ("ACCELERATOR", ["gpu"]),
        ("NODES", ["0", "4:1", "1:", ":2", "two", "1:2:3"]),
        ("NPROC_PER_NODE", ["0", "65"]),
        ("CREW", ["Yes", "1", "true"]),
        ("BACKEND", ["mpi"]),
        ("TORCH_VERSION", ["2.13", "latest", "2.13.0 --index-url=x"]),
        ("TORCH_INDEX", ["ftp://x", "https://a b"]),
        ("RUNS_DIR", ["~nobody-of-this-name/x", "a\nb"]),
        ("CODE_TTL", ["1d", "-5"]),
        ("JOIN_TIMEOUT", ["0"]),
        ("EXIT_TIMEOUT", ["0", "forever"]),
        ("SHM_SIZE", ["2gigs", "0", "-1g"]),
        ("OMP_NUM_THREADS", ["0", "all"]),
    ],
)
def test_a_wrong_value_is_named_with_its_origin_and_what_is_allowed(
    tmp_path: Path, key: str, values: list[str]
) -> None:
    allowed = next(row.allowed for row in settings.TABLE if row.key == f"HETDEPLOY_{key}")
    for value in values:
        said = refusal(tmp_path, **{f"HETDEPLOY_{key}": value})
        assert said.startswith(f"HETDEPLOY_{key}={envfile.shown(value)} (the environment) is not {allowed}")
        assert len(said) < 400


def test_all_wrong_values_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# ours\nHETDEPLOY_LINK=wire\n")
    said = refusal(tmp_path, {"HETDEPLOY_NODES": "none"}, HETDEPLOY_PORT="70000")
    assert said == (
        "HETDEPLOY_PORT=70000 (the environment) is not a port from 1 to 65535; "
        "HETDEPLOY_LINK=wire (.env:2) is not tunnel or direct; "
        "HETDEPLOY_NODES=none (--nodes) is not a number such as 2, or a range such as 1:4: "
        "`hetdeploy env --explain` says what each setting means"
    )


def test_a_misspelt_key_in_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env.local").write_text("HETDEPLOY_NPROC=2\n")
    assert refusal(tmp_path).endswith(
        ".env.local:1: HETDEPLOY_NPROC is not a setting of hetdeploy: did you mean HETDEPLOY_NPROC_PER_NODE?"
    )


def test_a_flag_that_is_no_setting_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="HETDEPLOY_PROT"):
        load(tmp_path, {"HETDEPLOY_PROT": "1"})


def test_nccl_does_not_go_through_the_tunnel(tmp_path: Path) -> None:
    assert refusal(tmp_path, HETDEPLOY_BACKEND="nccl") == (
        "HETDEPLOY_BACKEND=nccl (the environment) cannot go through HETDEPLOY_LINK=tunnel (default): "
        "use --link direct, or --backend gloo"
    )
    assert load(tmp_path, HETDEPLOY_BACKEND="nccl", HETDEPLOY_LINK="direct").backend == "nccl"


def test_a_crew_has_one_rank_a_machine_and_no_nccl(tmp_path: Path) -> None:
    assert load(tmp_path, {"HETDEPLOY_CREW": "yes"}).crew
    assert refusal(tmp_path, {"HETDEPLOY_CREW": "yes"}, HETDEPLOY_NPROC_PER_NODE="2") == (
        "HETDEPLOY_CREW=yes (--crew) has one rank on each machine, and HETDEPLOY_NPROC_PER_NODE is 2 "
        "(the environment): use --nproc-per-node 1"
    )
    nccl = {"HETDEPLOY_BACKEND": "nccl", "HETDEPLOY_LINK": "direct", "HETDEPLOY_CREW": "yes"}
    assert "exchange in pairs over gloo" in refusal(tmp_path, **nccl)


def test_one_port_cannot_serve_two_in_direct_mode(tmp_path: Path) -> None:
    assert "are both 29400" in refusal(tmp_path, HETDEPLOY_STORE_PORT="29400", HETDEPLOY_LINK="direct")
    assert load(tmp_path, HETDEPLOY_STORE_PORT="29400").store_port == 29400


def test_a_forced_gloo_transport_is_refused_and_explained(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("GLOO_DEVICE_TRANSPORT=UV\n")
    said = refusal(tmp_path, GLOO_DEVICE_TRANSPORT="TCP")
    assert said.startswith(
        "GLOO_DEVICE_TRANSPORT is set (the environment, .env:1), but torch has a single gloo transport"
    )
    assert said.endswith("remove GLOO_DEVICE_TRANSPORT")


def test_the_environment_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("HETDEPLOY_PORT=1001\nOTHER=1\n")
    before = dict(os.environ)
    settings.load({}, os.environ, tmp_path)
    assert dict(os.environ) == before


SHELL = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "GLOO_SOCKET_IFNAME": "en0",
    "TORCHELASTIC_RUN_ID": "x",
    "PET_NNODES": "3",
    "NCCL_SOCKET_IFNAME": "en0",
    "HETDEPLOY_BRIDGE": "/tmp/x",
    "HETDEPLOY_CREW_STORE": "10.0.0.1:29500",
}
HARMLESS = {"HOME": "/root", "NCCL_DEBUG": "INFO", "RANKING": "1", "HETDEPLOY_PORT": "1", "MY_RANK": "1"}


def test_a_launchers_leftovers_are_named_and_scrubbed() -> None:
    assert settings.inherited(SHELL | HARMLESS) == sorted(SHELL)
    assert settings.scrubbed(SHELL | HARMLESS) == HARMLESS


def test_the_shell_is_warned_about() -> None:
    assert settings.shell_warnings(HARMLESS) == []
    assert settings.shell_warnings({"MASTER_ADDR": "x", "RANK": "0"}) == [
        "the shell has MASTER_ADDR, RANK; the ranks will not see them (`unset MASTER_ADDR RANK`)"
    ]
    assert settings.shell_warnings({"HETDEPLOY_PROT": "1"}) == [
        "the shell's HETDEPLOY_PROT is not a setting of hetdeploy: did you mean HETDEPLOY_PORT?"
    ]


def test_the_example_in_the_repository_is_the_tables() -> None:
    assert (REPOSITORY / ".env.example").read_text() == settings.example()


def test_the_example_taken_as_it_is_sets_the_defaults(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(settings.example())
    assert {value.origin for value in load(tmp_path).values()} == {"default"}
    uncommented = re.sub(r"(?m)^#(?=HETDEPLOY_)", "", settings.example())
    (tmp_path / ".env").write_text(uncommented)
    assert {key: entry.value for key, entry in envfile.read(tmp_path / ".env", settings.KEYS).items()} == {
        row.key: row.default for row in settings.TABLE
    }
    load(tmp_path)


class TestEnvCommand:
    @pytest.fixture(autouse=True)
    def job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A job's folder with two files, and a shell without settings."""
        for name in [name for name in os.environ if name.startswith("HETDEPLOY_")] + settings.inherited(os.environ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        (tmp_path / ".env").write_text("HETDEPLOY_NODES=1:4\nHETDEPLOY_NIC=eno1\n")
        (tmp_path / ".env.local").write_text("HETDEPLOY_NIC=eno2\n")

    def call(self, *arguments: str, **environ: str) -> Result:
        result = CliRunner().invoke(env.command, arguments, env=environ, catch_exceptions=False)
        assert result.exit_code == 0
        return result

    def test_shows_each_value_and_where_it_is_from(self) -> None:
        lines = self.call(HETDEPLOY_PORT="1003").stdout.splitlines()
        assert [line.partition("=")[0] for line in lines] == list(settings.KEYS)
        assert lines[0].split() == ["HETDEPLOY_NIC=eno2", ".env.local:1"]
        assert lines[1].split() == ["HETDEPLOY_PORT=1003", "the", "environment"]
        assert "HETDEPLOY_NODES=1:4 .env:1" in [" ".join(line.split()) for line in lines]
        assert "HETDEPLOY_LINK=tunnel default" in [" ".join(line.split()) for line in lines]

    def test_explains_each_setting(self) -> None:
        blocks = self.call("--explain").stdout.split("\n\n")
        assert len(blocks) == len(settings.TABLE)
        for block, row in zip(blocks, settings.TABLE, strict=True):
            assert block.startswith(f"{row.key}=")
            assert row.meaning in block
            assert row.allowed in block
        assert "from     .env.local:1 (default: empty)" in blocks[0]

    def test_prints_json_with_warnings_inside(self) -> None:
        result = self.call("--json", MASTER_ADDR="10.0.0.1")
        document = json.loads(result.stdout)
        assert document["schema_version"] == 1
        assert list(document["settings"]) == list(settings.KEYS)
        nodes = document["settings"]["HETDEPLOY_NODES"]
        assert (nodes["value"], nodes["origin"], nodes["where"], nodes["default"]) == ("1:4", ".env", ".env:1", "2")
        assert [warning.partition(";")[0] for warning in document["warnings"]] == ["the shell has MASTER_ADDR"]
        assert result.stderr == ""

    def test_warns_on_stderr(self) -> None:
        result = self.call(RANK="1")
        assert result.stderr == "warning: the shell has RANK; the ranks will not see them (`unset RANK`)\n"

    def test_prints_the_example_whatever_the_files_say(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("HETDEPLOY_PORT=http\n")
        assert self.call("--example").stdout == settings.example()

    def test_refuses_a_wrong_value_with_the_usage_exit_code(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("HETDEPLOY_PORT=http\n")
        answer = subprocess.run(
            [sys.executable, "-c", "from hetdeploy.cli import main; main()", "env"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (answer.returncode, answer.stdout) == (2, "")
        assert answer.stderr.startswith("error: HETDEPLOY_PORT=http (.env:1) is not a port from 1 to 65535: ")
        assert answer.stderr.count("\n") == 1
