"""The images, built for real from the context that an installed hetdeploy puts together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hetdeploy import envfile
from hetdeploy.errors import HetdeployError, PreflightError
from hetdeploy.nodes import compose, containers
from hetdeploy.nodes.containers import Containers, Images
from hetdeploy.preflight import disk, engine

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.docker

SOMEBODY = "4242:4242"
"""A user that the image has never heard of: containers run as whoever called `up`."""


@pytest.fixture
def client() -> Iterator[DockerClient]:
    client = engine.connect()
    yield client
    client.close()


def run(client: DockerClient, image: str, *command: str, user: str = SOMEBODY) -> str:
    """Run as compose.yaml does: another user, a root that cannot be written, no capabilities, no network."""
    output: bytes = client.containers.run(
        image,
        list(command),
        remove=True,
        user=user,
        read_only=True,
        tmpfs={"/tmp": "exec,mode=1777"},
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        network_mode="none",
    )
    return output.decode()


def test_rank_image_runs_gloo_as_an_unknown_user_on_a_read_only_root(client: DockerClient, images: Images) -> None:
    script = """
import getpass, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
number = torch.ones(1); dist.all_reduce(number); dist.destroy_process_group()
print(torch.__version__, number.item(), getpass.getuser())
"""
    assert run(client, images.rank, "python", "-c", script).split() == ["2.13.0+cpu", "1.0", "hetdeploy"]


def test_images_do_not_run_as_root_and_hold_no_build_leftovers(client: DockerClient, images: Images) -> None:
    for name in (images.rendezvous, images.rank):
        config = client.images.get(name).attrs["Config"]
        assert config["User"] == "hetdeploy"
        assert config["Labels"]["org.opencontainers.image.licenses"] == "MIT"
    left = run(
        client,
        images.rank,
        "sh",
        "-c",
        "ls -d /source /wheels /mnt/* ~root/.cache /var/lib/apt/lists/* 2>/dev/null || true",
        user="root",  # nobody else can look into root's home
    )
    assert left == ""


def test_tensorboards_image_has_neither_torch_nor_hetdeploy(
    client: DockerClient, images_with_tensorboard: Images
) -> None:
    name = images_with_tensorboard.tensorboard
    assert name is not None
    config = client.images.get(name).attrs["Config"]
    assert config["User"] == "hetdeploy"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    found = "import importlib.util as u; print(*(u.find_spec(name) is not None for name in ('torch', 'hetdeploy')))"
    assert run(client, name, "python", "-c", found).split() == ["False", "False"]


def test_rendezvous_image_has_a_health_check_and_shares_the_layers_of_the_rank(
    client: DockerClient, images: Images
) -> None:
    rendezvous, rank = (client.images.get(name).attrs for name in (images.rendezvous, images.rank))
    assert rendezvous["Config"]["Healthcheck"]["Test"][-1] == "--healthy"
    assert "Healthcheck" not in rank["Config"]
    assert rendezvous["RootFS"]["Layers"] == rank["RootFS"]["Layers"]


def test_an_installed_wheel_builds_from_the_same_files_as_a_checkout(tmp_path: Path) -> None:
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    containers.assemble_context(checkout)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(checkout)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(installed), str(wheel)], check=True)
    script = f"""
import sys; sys.path.insert(0, {str(installed)!r})
from pathlib import Path
from hetdeploy.nodes import containers
assert containers.asset_folder().is_relative_to({str(installed)!r}), containers.asset_folder()
containers.assemble_context(Path("context"))
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    assert contents(tmp_path / "context") == contents(checkout)


def test_a_failing_build_shows_its_last_lines(compose_values: dict[str, str], tmp_path: Path) -> None:
    broken = Images("hetdeploy-rendezvous:never", "hetdeploy-rank:never")
    values = {**compose_values, "HETDEPLOY_TORCH_VERSION": "0.0.1", "HETDEPLOY_TORCH_INDEX": ""}
    envfile.write(
        tmp_path / "head.env", {**values, **compose.image_environment(broken, tmp_path / "context")}, "a test"
    )
    steps: list[str] = []
    with Containers(project(tmp_path, broken)) as docker:
        assert not docker.has_images()
        with pytest.raises(HetdeployError, match=r"No matching distribution found for torch==0\.0\.1"):
            docker.build(tmp_path / "context", "cpu", tmp_path / "build.log", steps.append)
        assert not docker.has_images()
    assert any("base 2/4" in step for step in steps)
    assert "No matching distribution" in (tmp_path / "build.log").read_text()


def test_a_full_disk_is_noticed_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(disk.IMAGE_BYTES, "cpu", 10**18)
    with (
        Containers(project(tmp_path, Images("hetdeploy-rendezvous:never", "hetdeploy-rank:never"))) as docker,
        pytest.raises(PreflightError, match="GB free, building the cpu image takes"),
    ):
        docker.build(tmp_path / "context", "cpu", tmp_path / "build.log", lambda _: None)
    assert not (tmp_path / "context").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def project(folder: Path, images: Images) -> containers.ComposeProject:
    return containers.plan_project(
        folder, folder / "head.env", images, accelerator="cpu", link="tunnel", has_data=False
    )
