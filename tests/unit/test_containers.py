"""What `up` asks of Docker, as data."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetdeploy
from hetdeploy.errors import HetdeployError, UsageError
from hetdeploy.nodes import containers
from hetdeploy.nodes.containers import ComposeProject, Images

IMAGES = Images("hetdeploy-rendezvous:t", "hetdeploy-rank:t")
TORCH, INDEX = "2.13.0", "https://download.pytorch.org/whl/cpu"


def plan(folder: Path, *, accelerator: str = "cpu", link: str = "tunnel", has_data: bool = False) -> ComposeProject:
    return containers.plan_project(
        folder, folder / "head.env", IMAGES, accelerator=accelerator, link=link, has_data=has_data
    )


def test_the_whole_command_line_of_each_call(tmp_path: Path) -> None:
    project = plan(tmp_path)
    compose = ["docker", "compose", "-p", project.name, "--env-file", f"{tmp_path}/head.env", "-f"]
    compose += [str(containers.asset("compose/compose.yaml"))]
    assert project.build() == [*compose, "--progress", "plain", "build"]
    assert project.up("rank") == [*compose, "up", "--detach", "--no-build", "--no-deps", "rank"]
    assert project.stop() == [*compose, "stop", "--timeout", "30"]
    assert project.ps() == [*compose, "ps", "--all", "--format", "json"]
    # Nothing but the name: what was started can be removed when its files are gone.
    assert project.down() == ["docker", "compose", "-p", project.name, "down", "--remove-orphans", "--timeout", "30"]


def test_tensorboard_adds_an_override_and_its_profile(tmp_path: Path) -> None:
    images = containers.plan_images("cpu", TORCH, INDEX, tensorboard=True)
    assert images.names == (*containers.plan_images("cpu", TORCH, INDEX).names, images.tensorboard)
    project = containers.plan_project(
        tmp_path, tmp_path / "head.env", images, accelerator="cpu", link="direct", has_data=False
    )
    assert [path.name for path in project.files] == ["compose.yaml", "direct.yaml", "tensorboard.yaml"]
    assert project.build()[-5:] == ["--profile", "tensorboard", "--progress", "plain", "build"]


def test_what_is_asked_for_chooses_the_overrides(tmp_path: Path) -> None:
    def names(project: ComposeProject) -> list[str]:
        return [path.name for path in project.files]

    assert names(plan(tmp_path)) == ["compose.yaml"]
    assert names(plan(tmp_path, accelerator="cuda", has_data=True)) == ["compose.yaml", "cuda.yaml", "data.yaml"]
    assert names(plan(tmp_path, link="direct")) == ["compose.yaml", "direct.yaml"]
    assert all(path.is_file() for path in plan(tmp_path, accelerator="cuda", link="direct", has_data=True).files)
    with pytest.raises(UsageError, match="containers cannot use mps"):
        plan(tmp_path, accelerator="mps")


def test_each_folder_has_a_project_of_its_own_under_a_name_that_compose_takes(tmp_path: Path) -> None:
    names = set()
    for name in ("run", "other/run", "My Run (2)", "übung", "x" * 80, "---"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        project = containers.project_name(folder)
        assert project.startswith("hetdeploy-")
        assert set(project) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert len(project) <= 63 - len("-rendezvous-1")
        assert containers.project_name(folder / ".." / folder.name) == project
        names.add(project)
    assert len(names) == 6


def test_the_shell_has_no_say_over_what_the_env_file_sets() -> None:
    shell = {
        "PATH": "/bin",
        "HETDEPLOY_PORT": "1",
        "COMPOSE_FILE": "x.yaml",
        "COMPOSE_PROJECT_NAME": "x",
        "DOCKER_API_VERSION": "1.52",
        "DOCKER_HOST": "unix:///run/docker.sock",
        "DOCKER_BUILDKIT": "0",
    }
    assert containers.compose_environment(shell) == {
        "PATH": "/bin",
        "DOCKER_HOST": "unix:///run/docker.sock",
        "DOCKER_BUILDKIT": "1",
        "DOCKER_CLI_HINTS": "false",
    }


def test_the_context_has_what_the_dockerfile_copies_and_no_secrets_or_leftovers(checkout: Path, tmp_path: Path) -> None:
    for leftover in (".env", ".hetdeploy/secret", "__pycache__/x.pyc", "cli/.env.local"):
        path = checkout / "hetdeploy" / leftover
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    containers.assemble_context(tmp_path / "context")
    found = {path.relative_to(tmp_path / "context").as_posix() for path in (tmp_path / "context").rglob("*")}
    assert {"images/Dockerfile", "compose/compose.yaml", "hetdeploy/__init__.py", "constraints.txt"} <= found
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts/train_gpt.py"} <= found
    assert not [path for path in found if "env" in Path(path).suffix or "pycache" in path or ".hetdeploy" in path]


def test_a_context_is_replaced_as_a_whole(tmp_path: Path) -> None:
    stale = tmp_path / "context" / "hetdeploy" / "of_an_older_release.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    containers.assemble_context(tmp_path / "context")
    assert not stale.exists()


def test_image_names_change_with_every_byte_and_argument_and_with_nothing_else(checkout: Path) -> None:
    first = containers.plan_images("cpu", TORCH, INDEX)
    assert first.rank.startswith(f"hetdeploy-rank:{hetdeploy.__version__}-torch2.13.0-cpu-")
    (checkout / "notes.txt").write_text("not part of it")
    assert containers.plan_images("cpu", TORCH, INDEX) == first
    others = {
        containers.plan_images("cuda", TORCH, INDEX).rank,
        containers.plan_images("cpu", "2.13.1", INDEX).rank,
        containers.plan_images("cpu", TORCH, "").rank,
    }
    with (checkout / "hetdeploy" / "errors.py").open("a") as file:
        file.write("\n")
    others.add(containers.plan_images("cpu", TORCH, INDEX).rank)
    (checkout / "hetdeploy" / "new.py").write_text("")
    others.add(containers.plan_images("cpu", TORCH, INDEX).rank)
    assert len(others | {first.rank}) == 6


def test_a_local_version_of_torch_makes_a_tag_that_docker_takes() -> None:
    tag = containers.plan_images("cuda", "2.13.0+cu126", "").rank.partition(":")[2]
    assert "+" not in tag
    assert "2.13.0-cu126" in tag


def test_a_broken_installation_is_named(checkout: Path) -> None:
    (checkout / "constraints.txt").unlink()
    with pytest.raises(HetdeployError, match=r"constraints\.txt is missing: install hetdeploy again"):
        containers.context_files()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this checkout to change, which is taken for the one that hetdeploy runs from."""
    copy = tmp_path / "checkout"
    containers.assemble_context(copy)
    monkeypatch.setattr(hetdeploy, "__file__", str(copy / "hetdeploy" / "__init__.py"))
    return copy
