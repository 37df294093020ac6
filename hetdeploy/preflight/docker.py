"""Checks of the Docker engine and its command line."""

from __future__ import annotations

from typing import ClassVar

from hetdeploy.preflight.facts import DockerFacts, Facts
from hetdeploy.preflight.report import Result

OLDEST_COMPOSE = (2, 24)
"""The first that reads all that our files say (``!reset``, ``extra_hosts`` with ``=``)."""

_INSTALL_COMPOSE = "`sudo apt install docker-compose-v2` (Ubuntu) or docker-compose-plugin (Docker's own packages)"


class DockerCommand:
    """Is there a `docker` command?"""

    name: ClassVar[str] = "docker-command"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None:
            return None
        if facts.docker.command is None:
            return Result(self.name, "failure", "there is no docker command", "`sudo apt install docker.io`")
        return Result(self.name, "ok", facts.docker.command)


class ComposePlugin:
    """Is there a Compose that reads our files?"""

    name: ClassVar[str] = "docker-compose"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None or facts.docker.command is None:
            return None
        version = facts.docker.compose
        if version is None:
            return Result(self.name, "failure", "`docker compose` does not work here", _INSTALL_COMPOSE)
        if _numbers(version) < OLDEST_COMPOSE:
            oldest = ".".join(map(str, OLDEST_COMPOSE))
            return Result(self.name, "failure", f"Compose {version} is older than {oldest}", _INSTALL_COMPOSE)
        return Result(self.name, "ok", f"Compose {version}")


class EngineAnswers:
    """Is there an engine on this machine that this user may use and that is recent enough?"""

    name: ClassVar[str] = "docker-engine"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None:
            return None
        problem = facts.docker.problem
        if problem is not None:
            return Result(self.name, "failure", problem.problem, problem.fix)
        info = facts.docker.info
        text = f"Docker {info['ServerVersion']}, API {info['ApiVersion']}, at {info['Endpoint']}"
        return Result(self.name, "ok", text)


class RootlessEngine:
    """Can an engine without root do what is asked of it?"""

    name: ClassVar[str] = "docker-rootless"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None or not _is_rootless(facts.docker):
            return None
        if facts.link == "direct":
            return Result(
                self.name,
                "failure",
                "the engine is rootless, so a container's host network is not this machine's and nobody reaches it",
                "use HETDEPLOY_LINK=tunnel, or an engine that runs as root",
            )
        if facts.accelerator == "cuda" and facts.nvidia is not None and not facts.nvidia.no_cgroups:
            return Result(
                self.name,
                "failure",
                "the engine is rootless and may not give a GPU to a container through cgroups",
                "`sudo nvidia-ctk config --set nvidia-container-cli.no-cgroups --in-place`, then restart the engine",
            )
        return Result(self.name, "ok", "the engine is rootless")


class ExportedApiVersion:
    """Does the shell pin a version of the engine's API?"""

    name: ClassVar[str] = "docker-api"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None or facts.docker_api_version is None:
            return None
        return Result(
            self.name,
            "warning",
            f"the shell has DOCKER_API_VERSION={facts.docker_api_version}, which hetdeploy ignores"
            " and other programs may fail on",
            "`unset DOCKER_API_VERSION`",
        )


class DiskRoom:
    """Is there room to build an image? No failure: the image may be there already, and a build looks again."""

    name: ClassVar[str] = "disk"

    def run(self, facts: Facts) -> Result | None:
        if facts.docker is None or facts.docker.problem is not None:
            return None
        if facts.docker.shortage is not None:
            return Result(self.name, "warning", facts.docker.shortage, "`docker system prune` makes room")
        return Result(self.name, "ok", f"room for an image in {facts.docker.info.get('DockerRootDir')}")


def _is_rootless(docker: DockerFacts) -> bool:
    return any("name=rootless" in option for option in docker.info.get("SecurityOptions") or ())


def _numbers(version: str) -> tuple[int, ...]:
    """``2.26.1-4`` as (2, 26)."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
