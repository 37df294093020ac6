"""compose/compose.yaml and its overrides, as Compose itself reads them, and a project's life from `up` to `down`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetdeploy import envfile
from hetdeploy.errors import HetdeployError, PreflightError
from hetdeploy.network.probe import free_port
from hetdeploy.nodes import compose, containers
from hetdeploy.nodes.containers import ComposeProject, Containers, Images
from hetdeploy.nodes.rendezvous import initialise

pytestmark = pytest.mark.docker

HEALTHY_SECONDS = 60.0
CONTAINER_USER = 1000

Resolve = Callable[..., dict[str, Any]]


@pytest.fixture
def resolve(compose_values: dict[str, str], tmp_path: Path) -> Resolve:
    """The services of a project as `docker compose config` prints them."""

    def resolved(
        accelerator: str = "cpu", link: str = "tunnel", data: str = "", tensorboard: str | None = None, **values: str
    ) -> dict[str, Any]:
        images = Images("hetdeploy-rendezvous:t", "hetdeploy-rank:t", tensorboard)
        project = containers.plan_project(
            tmp_path, tmp_path / "head.env", images, accelerator=accelerator, link=link, has_data=bool(data)
        )
        everything = {**compose_values, **compose.image_environment(images, tmp_path), "HETDEPLOY_DATA": data, **values}
        envfile.write(project.env_file, everything, "a test")
        answer = subprocess.run(
            project.argv("config", "--format", "json"),
            check=True,
            capture_output=True,
            text=True,
            env=containers.compose_environment(os.environ),
        )
        return json.loads(answer.stdout)["services"]

    return resolved


def test_the_link_port_of_the_chosen_address_is_all_that_is_published(resolve: Resolve) -> None:
    services = resolve(HETDEPLOY_ADDRESS="192.168.1.10", HETDEPLOY_PORT="29411")
    assert [(p["host_ip"], p["published"], p["target"]) for p in services["rendezvous"]["ports"]] == [
        ("192.168.1.10", "29411", 29400)
    ]
    assert "ports" not in services["rank"]


def test_containers_have_no_more_rights_than_their_user(resolve: Resolve) -> None:
    for service in resolve(accelerator="cuda", link="direct", data="/srv/data", tensorboard="tensorboard:t").values():
        assert service["user"] == "1000:1000"
        assert service["read_only"] is True
        assert service["init"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert "cap_add" not in service
        assert not [volume for volume in service["volumes"] if "docker.sock" in volume["source"]]
        # A missing folder must be an error, not one that the engine makes as root.
        assert not [volume for volume in service["volumes"] if volume["bind"].get("create_host_path")]


def test_only_the_runs_can_be_written_and_only_the_rendezvous_sees_the_links_secrets(resolve: Resolve) -> None:
    services = resolve(HETDEPLOY_STATE="/job/.hetdeploy", HETDEPLOY_RUNS="/job/.hetdeploy/runs", data="/srv/data")
    for name, service in services.items():
        writable = [volume["target"] for volume in service["volumes"] if not volume.get("read_only")]
        assert writable == ["/runs"]
        sources = {volume["source"] for volume in service["volumes"]}
        assert ("/job/.hetdeploy/link" in sources) is (name == "rendezvous")
        assert ("/job/.hetdeploy/member" in sources) is (name == "rank")
        assert ("/srv/data" in sources) is (name == "rank")
    assert services["rank"]["environment"]["HETDEPLOY_DATA_DIR"] == "/data"


def test_a_cuda_rank_reserves_all_nvidia_cards(resolve: Resolve) -> None:
    services = resolve(accelerator="cuda")
    assert services["rank"]["deploy"]["resources"]["reservations"]["devices"] == [
        {"capabilities": ["gpu"], "driver": "nvidia", "count": -1}
    ]
    assert "deploy" not in services["rendezvous"]
    assert "deploy" not in resolve()["rank"]


def test_direct_mode_listens_on_the_chosen_address_alone(resolve: Resolve) -> None:
    services = resolve(link="direct", HETDEPLOY_ADDRESS="10.0.0.1", HETDEPLOY_STORE_PORT="29555")
    for service in services.values():
        assert service["network_mode"] == "host"
        assert "networks" not in service
        assert "ports" not in service
    listening = ["--listen=10.0.0.1:29400", "--store=10.0.0.1:29555"]
    assert services["rendezvous"]["command"][-2:] == listening
    assert services["rendezvous"]["healthcheck"]["test"][-2:] == listening
    assert services["rank"]["command"][-2:] == ["--store=10.0.0.1", "--address=10.0.0.1"]


@pytest.mark.parametrize("link", ["tunnel", "direct"])
def test_tensorboard_is_this_machines_alone_and_only_reads(resolve: Resolve, link: str) -> None:
    service = resolve(link=link, tensorboard="tensorboard:t", HETDEPLOY_TENSORBOARD_PORT="6116")["tensorboard"]
    assert [(p["host_ip"], p["published"], p["target"]) for p in service["ports"]] == [("127.0.0.1", "6116", 6006)]
    assert [(volume["target"], volume.get("read_only")) for volume in service["volumes"]] == [("/runs", True)]
    assert set(service["networks"]) == {"browser"}
    assert "tensorboard" not in resolve(link=link)


def test_shared_memory_is_the_settings(resolve: Resolve) -> None:
    assert resolve(HETDEPLOY_SHM_SIZE="3g")["rank"]["shm_size"] == str(3 * 2**30)


@pytest.fixture
def project(images: Images, compose_values: dict[str, str], tmp_path: Path) -> Iterator[ComposeProject]:
    """A job that waits for a joiner, in a folder with spaces in its name."""
    folder = tmp_path / "my first job"
    state, runs = folder / "state", folder / "runs"
    for each in (state, runs):
        each.mkdir(parents=True)
    script = folder / "script" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    initialise(state, str(script), [], 29500)
    values = {
        **compose_values,
        "HETDEPLOY_UID": str(os.getuid() or CONTAINER_USER),
        "HETDEPLOY_GID": str(os.getgid() or CONTAINER_USER),
        "HETDEPLOY_PORT": str(free_port()),
        "HETDEPLOY_STATE": str(state),
        "HETDEPLOY_RUNS": str(runs),
        **compose.image_environment(images, folder / "context"),
    }
    envfile.write(folder / "head.env", values, "a test")
    if os.getuid() == 0:
        for path in (state, runs, *state.rglob("*")):
            os.chown(path, CONTAINER_USER, CONTAINER_USER)
    planned = containers.plan_project(
        folder, folder / "head.env", images, accelerator="cpu", link="tunnel", has_data=False
    )
    yield planned
    with Containers(planned) as docker:
        docker.down()


def test_from_up_to_down(project: ComposeProject) -> None:
    with Containers(project) as docker:
        assert docker.states() == {}
        assert docker.last_lines("rendezvous") == []
        assert not docker.signal("rendezvous")
        assert not docker.down()

        docker.up("rendezvous")
        docker.wait_until_healthy("rendezvous", HEALTHY_SECONDS, lambda _: None)
        docker.up("rank")
        states = docker.states()
        assert set(states) == {"rendezvous", "rank"}
        assert states["rendezvous"].health == "healthy"
        assert states["rank"].exit_code is None

        docker.up("rendezvous")
        assert docker.states()["rendezvous"] == states["rendezvous"]

        assert docker.down()
        assert docker.states() == {}
        assert not docker.down()


def test_a_service_that_ends_is_reported_with_its_code_and_last_words(project: ComposeProject) -> None:
    state = Path(envfile.read(project.env_file)["HETDEPLOY_STATE"].value)
    (state / "job.json").write_text("{")
    with Containers(project) as docker:
        docker.up("rendezvous")
        with pytest.raises(
            PreflightError, match=r"the container rendezvous ended with exit code 2: .*job\.json is damaged"
        ):
            docker.wait_until_healthy("rendezvous", HEALTHY_SECONDS, lambda _: None)
        assert docker.states()["rendezvous"].exit_code == 2


def test_what_compose_refuses_is_said_in_its_words(project: ComposeProject) -> None:
    values = {key: entry.value for key, entry in envfile.read(project.env_file).items()}
    envfile.write(project.env_file, {**values, "HETDEPLOY_RUNS": "/nowhere/to be found"}, "a test")
    with Containers(project) as docker, pytest.raises(HetdeployError, match=r"could not start rendezvous: .*nowhere"):
        docker.up("rendezvous")


def test_a_project_can_be_removed_when_its_files_are_gone(project: ComposeProject) -> None:
    with Containers(project) as docker:
        docker.up("rendezvous")
        project.env_file.unlink()
        assert docker.down()
        assert docker.states() == {}
