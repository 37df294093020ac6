"""The head's containers: first as data (files, images, command lines), then the one place that speaks to Docker.

Compose is what creates and removes them, from the files in compose/; the Docker SDK is what looks at them. Containers
are found by the labels that Compose puts on them, never by name.

Not done here: what runs inside (rendezvous.py, member.py), and when each is started (compose.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hetdeploy
from hetdeploy.errors import HetdeployError, PreflightError, UsageError
from hetdeploy.preflight import engine
from hetdeploy.preflight.disk import require_room

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

COMPOSE_SECONDS = 120.0
"""How long Compose may take to start or remove containers."""
STOP_SECONDS = 30
"""What a container has between SIGTERM and SIGKILL; as ``stop_grace_period`` in compose.yaml."""

_POLL_SECONDS = 0.1
_LAST_LINES = 15
_IN_CONTEXT = (
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "hetdeploy",
    "compose",
    "images",
    "scripts/train_gpt.py",
)
_NOT_IN_CONTEXT = ("__pycache__", "_assets", ".env", ".env.local", ".hetdeploy")
# A line of BuildKit's plain output that begins a step: `#15 [rank base 2/6] RUN ...`.
_STEP = re.compile(r"^#\d+ \[([\w -]+ \d+/\d+)\]")
_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"


@dataclass(frozen=True)
class Images:
    """Names of the images of one build. The tag says what is inside, so a name that exists needs no build."""

    rendezvous: str
    rank: str
    tensorboard: str | None = None
    """None where it is not asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.rendezvous, self.rank, self.tensorboard) if name is not None)


@dataclass(frozen=True)
class ComposeProject:
    """Everything that a `docker compose` call needs, as data. ``argv`` and the methods after it execute nothing."""

    name: str
    files: tuple[Path, ...]
    env_file: Path
    images: Images
    profiles: tuple[str, ...] = ()

    def argv(self, *command: str) -> list[str]:
        files = [argument for path in self.files for argument in ("-f", str(path))]
        profiles = [argument for name in self.profiles for argument in ("--profile", name)]
        return ["docker", "compose", "-p", self.name, "--env-file", str(self.env_file), *files, *profiles, *command]

    def build(self) -> list[str]:
        return self.argv("--progress", "plain", "build")

    def up(self, service: str) -> list[str]:
        return self.argv("up", "--detach", "--no-build", "--no-deps", service)

    def stop(self) -> list[str]:
        return self.argv("stop", "--timeout", str(STOP_SECONDS))

    def ps(self) -> list[str]:
        return self.argv("ps", "--all", "--format", "json")

    def down(self) -> list[str]:
        """By label alone: what was started can be removed even if its files have changed or are gone."""
        return ["docker", "compose", "-p", self.name, "down", "--remove-orphans", "--timeout", str(STOP_SECONDS)]


@dataclass(frozen=True)
class ContainerState:
    """One container as Docker describes it."""

    status: str
    """``created``, ``running``, ``exited``..."""
    health: str | None
    """``starting``, ``healthy``, ``unhealthy``; None without a health check."""
    exit_code: int | None
    """None while it runs."""
    out_of_memory: bool = False


def plan_project(
    folder: Path, env_file: Path, images: Images, *, accelerator: str, link: str, has_data: bool
) -> ComposeProject:
    """The Compose project of the job in ``folder``. Raises UsageError for what its containers cannot compute on."""
    if accelerator not in ("cpu", "cuda"):
        raise UsageError(f"containers cannot use {accelerator}", "set HETDEPLOY_ACCELERATOR to cuda or cpu")
    overrides = [
        *(["cuda.yaml"] if accelerator == "cuda" else []),
        *(["data.yaml"] if has_data else []),
        *(["direct.yaml"] if link == "direct" else []),
        *(["tensorboard.yaml"] if images.tensorboard else []),
    ]
    compose = asset_folder() / "compose"
    return ComposeProject(
        name=project_name(folder),
        files=tuple(compose / name for name in ("compose.yaml", *overrides)),
        env_file=env_file,
        images=images,
        profiles=("tensorboard",) if images.tensorboard else (),
    )


def project_name(folder: Path) -> str:
    """A Compose project name for ``folder``: readable, and another one for another folder of the same name."""
    path = str(folder.resolve())
    readable = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:30]
    return "-".join(part for part in ("hetdeploy", readable, hashlib.sha256(path.encode()).hexdigest()[:6]) if part)


def plan_images(accelerator: str, torch_version: str, torch_index: str, *, tensorboard: bool = False) -> Images:
    """Names that change exactly when what the images are built from does: hetdeploy's own files and the arguments."""
    digest = hashlib.sha256(f"{accelerator}\0{torch_version}\0{torch_index}\0".encode())
    for name, path in context_files().items():
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    # "+" as in 2.13.0+cu126 is not allowed in a tag.
    tag = f"{hetdeploy.__version__}-torch{torch_version}-{accelerator}-{digest.hexdigest()[:12]}".replace("+", "-")
    return Images(
        rendezvous=f"hetdeploy-rendezvous:{tag}",
        rank=f"hetdeploy-rank:{tag}",
        tensorboard=f"hetdeploy-tensorboard:{tag}" if tensorboard else None,
    )


def context_files() -> dict[str, Path]:
    """What images are built from, sorted: the path inside the build context, and where the file lies.

    The same from a checkout and from an installed wheel, which has everything but the package itself in ``_assets``.
    """
    package, assets = Path(hetdeploy.__file__).parent, asset_folder()
    found: dict[str, Path] = {}
    for name in _IN_CONTEXT:
        top = package if name == "hetdeploy" else assets / name
        if not top.exists():
            raise HetdeployError(f"{top} is missing", "install hetdeploy again")
        for path in [top] if top.is_file() else top.rglob("*"):
            inner = path.relative_to(top)
            if path.is_file() and not set(inner.parts) & set(_NOT_IN_CONTEXT):
                found[(Path(name) / inner).as_posix()] = path
    return dict(sorted(found.items()))


def asset_folder() -> Path:
    """The folder with compose/ and images/: ``_assets`` of an installed package, else the checkout's root."""
    package = Path(hetdeploy.__file__).parent
    installed = package / "_assets"
    return installed if installed.is_dir() else package.parent


def asset(name: str) -> Path:
    """A file that comes with hetdeploy, such as ``scripts/train_gpt.py``."""
    return asset_folder() / name


def engine_or_none(environ: Mapping[str, str] = os.environ) -> str | None:
    """The engine in words, such as ``Docker 28.0.1``, or None when there is none that this user can use."""
    try:
        return f"Docker {engine.engine_info(environ)['ServerVersion']}"
    except PreflightError:
        return None


def assemble_context(destination: Path) -> None:
    """Make ``destination`` the build context, replacing what was there."""
    shutil.rmtree(destination, ignore_errors=True)
    for name, source in context_files().items():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def compose_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for `docker compose`: what the env file says must not lose to the user's shell."""
    scrubbed = {
        key: value
        for key, value in environ.items()
        if not key.startswith(("HETDEPLOY_", "COMPOSE_")) and key != "DOCKER_API_VERSION"
    }
    return {**scrubbed, "DOCKER_BUILDKIT": "1", "DOCKER_CLI_HINTS": "false"}


class Containers:
    """Carries a project out. Use as a context manager; raises PreflightError at once when no engine answers."""

    def __init__(self, project: ComposeProject, environ: Mapping[str, str] = os.environ) -> None:
        self.project = project
        self._environ = compose_environment(environ)
        self._client: DockerClient = engine.connect(self._environ)

    def __enter__(self) -> Containers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def has_images(self) -> bool:
        """Whether all images are there."""
        import docker.errors

        try:
            for name in self.project.images.names:
                self._client.images.get(name)
        except docker.errors.ImageNotFound:
            return False
        return True

    def build(self, context: Path, accelerator: str, log: Path, waiting: Callable[[str], None]) -> None:
        """Assemble ``context`` and build all images. All output goes to ``log``, a word on each step to ``waiting``.

        Raises PreflightError when the disk has no room, before or during the build, and HetdeployError with the last
        lines when it fails otherwise.
        """
        require_room(Path(self._client.info()["DockerRootDir"]), accelerator)
        assemble_context(context)
        last: deque[str] = deque(maxlen=_LAST_LINES)
        step = "starting"
        process = subprocess.Popen(
            self.project.build(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environ,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            with process.stdout, log.open("w", encoding="utf-8") as file:
                for line in process.stdout:
                    file.write(line)
                    if text := line.strip():
                        last.append(text)
                    if found := _STEP.search(line):
                        step = found[1]
                    waiting(f"the image ({step})")
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if code == 0:
            return
        if any("no space left on device" in line for line in last):
            raise PreflightError("the disk is full, the image could not be built", "`docker system prune` makes room")
        shown = "\n".join(f"    {line}" for line in last)
        raise HetdeployError(f"the image could not be built\n{shown}\n", f"the whole output is in {log}")

    def up(self, service: str) -> None:
        """Create and start one service. Raises HetdeployError with Compose's own words when it cannot."""
        self._compose(self.project.up(service), f"start {service}")

    def wait_until_healthy(self, service: str, seconds: float, waiting: Callable[[str], None]) -> None:
        """Return when ``service`` is healthy. Raises PreflightError with its last lines if it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.states().get(service)
            if state is not None and state.health == "healthy":
                return
            if state is None or state.exit_code is not None:
                code = "" if state is None else f" with exit code {state.exit_code}"
                raise PreflightError(f"the container {service} ended{code}", self._told(service))
            if time.monotonic() > deadline:
                raise PreflightError(
                    f"the container {service} is not healthy after {seconds:.0f} s", self._told(service)
                )
            waiting(f"the container {service} to be healthy")
            time.sleep(_POLL_SECONDS)

    def states(self) -> dict[str, ContainerState]:
        """Each service of the project that has a container, running or not."""
        return {str(each.labels[_SERVICE_LABEL]): _state(each) for each in self._all()}

    def last_lines(self, service: str, count: int = 20) -> list[str]:
        """The last lines that a service printed; none without a container."""
        for each in self._all():
            if each.labels[_SERVICE_LABEL] == service:
                return each.logs(tail=count).decode(errors="replace").splitlines()
        return []

    def signal(self, service: str, name: str = "SIGTERM") -> bool:
        """Send a signal to a running service and return at once. False when it does not run."""
        for each in self._all():
            if each.labels[_SERVICE_LABEL] == service and each.status == "running":
                each.kill(signal=name)
                return True
        return False

    def down(self) -> bool:
        """Stop and remove containers and network, and wait until they are gone. Returns whether there was anything."""
        found = bool(self._all()) or bool(self._client.networks.list(filters={"label": self._label}))
        if found:
            self._compose(self.project.down(), "remove the containers")
        return found

    @property
    def _label(self) -> str:
        return f"{_PROJECT_LABEL}={self.project.name}"

    def _all(self) -> list[Container]:
        return self._client.containers.list(all=True, ignore_removed=True, filters={"label": self._label})

    def _compose(self, argv: list[str], purpose: str) -> None:
        # In an empty folder, so that no compose.yaml or .env of the user's is taken for ours.
        with tempfile.TemporaryDirectory(prefix="hetdeploy-") as empty:
            try:
                result = subprocess.run(
                    argv,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    env=self._environ,
                    cwd=empty,
                    timeout=COMPOSE_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise HetdeployError(
                    f"Compose did not {purpose} within {COMPOSE_SECONDS:.0f} s", "look at `docker ps -a`"
                ) from None
        if result.returncode:
            words = [line.strip() for line in result.stderr.splitlines() if line.strip()]
            raise HetdeployError(
                f"Compose could not {purpose}", words[-1] if words else f"exit code {result.returncode}"
            )

    def _told(self, service: str) -> str:
        lines = self.last_lines(service, 3)
        return " / ".join(lines) if lines else f"look at `docker logs` of {self.project.name}-{service}-1"


def _state(container: Container) -> ContainerState:
    state = container.attrs["State"]
    return ContainerState(
        status=state["Status"],
        health=state.get("Health", {}).get("Status"),
        exit_code=state["ExitCode"] if state["Status"] in ("exited", "dead") else None,
        out_of_memory=bool(state.get("OOMKilled")),
    )
