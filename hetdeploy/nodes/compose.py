"""The head in containers: carries out the plan of containers.py in the order that `up` asks for."""

from __future__ import annotations

from pathlib import Path

from hetdeploy import envfile
from hetdeploy.nodes.containers import Containers, Images, plan_project
from hetdeploy.nodes.job import Job, StateFolder
from hetdeploy.nodes.runtime import RANK, RENDEZVOUS, TENSORBOARD
from hetdeploy.nodes.stages import Stage

HEALTHY_SECONDS = 60.0
EXIT_SECONDS = 10.0


class ComposeRuntime:
    """Runs the head's two programs with Docker Compose. What it needs to know stands in ``head.env``."""

    name = "compose"

    def __init__(self, state: StateFolder, job: Job) -> None:
        self._state = state
        self._job = job
        self._opened: Containers | None = None

    def prepare(self, stage: Stage) -> None:
        containers = self._containers
        name = containers.project.images.rank
        if containers.has_images():
            stage.done(f"found {name}")
            return
        context = self._state.path / "context"
        accelerator = self._values["HETDEPLOY_ACCELERATOR"].value
        containers.build(context, accelerator, self._state.path / "build.log", stage.waiting)
        stage.done(f"built {name}")

    def start_rendezvous(self, stage: Stage) -> None:
        # What an earlier job left behind, stopped containers included, would keep its names and its port.
        self._containers.down()
        self._containers.up(RENDEZVOUS)
        self._containers.wait_until_healthy(RENDEZVOUS, HEALTHY_SECONDS, stage.waiting)

    def start_rank(self) -> None:
        self._containers.up(RANK)

    def start_tensorboard(self, stage: Stage) -> None:
        self._containers.up(TENSORBOARD)
        self._containers.wait_until_healthy(TENSORBOARD, HEALTHY_SECONDS, stage.waiting)

    def ended(self) -> dict[str, int]:
        states = self._containers.states()
        codes = {service: states[service].exit_code for service in (RENDEZVOUS, RANK) if service in states}
        return {service: code for service, code in codes.items() if code is not None}

    def is_running(self) -> bool:
        state = self._containers.states().get(RENDEZVOUS)
        return state is not None and state.exit_code is None

    def last_lines(self, service: str) -> list[str]:
        return self._containers.last_lines(service)

    def interrupt(self) -> None:
        self._containers.signal(RENDEZVOUS)

    def remove(self) -> bool:
        return self._containers.down()

    @property
    def _values(self) -> dict[str, envfile.Entry]:
        return envfile.read(self._state.head_env)

    @property
    def _containers(self) -> Containers:
        """Opened late: the plan needs the env file, which `up` writes on its way."""
        if self._opened is None:
            values = self._values
            images = _images(values)
            project = plan_project(
                self._state.project,
                self._state.head_env,
                images,
                accelerator=values["HETDEPLOY_ACCELERATOR"].value,
                link=self._job.link,
                has_data=bool(values["HETDEPLOY_DATA"].value),
            )
            self._opened = Containers(project)
        return self._opened


def _images(values: dict[str, envfile.Entry]) -> Images:
    tensorboard = values.get("HETDEPLOY_IMAGE_TENSORBOARD")
    return Images(
        values["HETDEPLOY_IMAGE_RENDEZVOUS"].value,
        values["HETDEPLOY_IMAGE_RANK"].value,
        tensorboard.value if tensorboard else None,
    )


def image_environment(images: Images, context: Path) -> dict[str, str]:
    """The keys of ``head.env`` that name what the containers are made from."""
    return {
        "HETDEPLOY_IMAGE_RENDEZVOUS": images.rendezvous,
        "HETDEPLOY_IMAGE_RANK": images.rank,
        **({"HETDEPLOY_IMAGE_TENSORBOARD": images.tensorboard} if images.tensorboard else {}),
        "HETDEPLOY_CONTEXT": str(context.resolve()),
    }
