"""The Docker engine: which one is meant, and how to reach it.

The command line follows DOCKER_HOST, then DOCKER_CONTEXT, then the context chosen with `docker context use`. The SDK up
to 7.1 knows DOCKER_HOST alone and from 7.2 on contexts too (docker/docker-py#3146), so the choice is made here and
handed to it: both always speak to the same engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetdeploy.errors import PreflightError

if TYPE_CHECKING:
    from docker import DockerClient

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
OLDEST_API = (1, 41)
"""Of Docker 20.10, the oldest engine that hetdeploy is tested with."""

ENGINE_SECONDS = 15.0
"""How long the engine may take to answer one question."""

_START = "start it with `sudo systemctl start docker` (or open Docker Desktop), or install it: https://docs.docker.com/engine/install/"
_JOIN_GROUP = "`sudo usermod -aG docker $USER`, then log in again (or `newgrp docker` in this shell)"


@dataclass(frozen=True)
class Endpoint:
    """Address of an engine, such as ``unix:///var/run/docker.sock``, and what it was read from."""

    address: str
    origin: str

    @property
    def is_local(self) -> bool:
        """Whether the engine sees this machine's folders and addresses."""
        return self.address.startswith("unix://")


def resolve_endpoint(environ: Mapping[str, str]) -> Endpoint:
    """The engine that the `docker` command would speak to.

    Raises PreflightError for a context that does not exist.
    """
    if host := environ.get("DOCKER_HOST"):
        return Endpoint(host, "DOCKER_HOST")
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or Path.home()) / ".docker")
    if name := environ.get("DOCKER_CONTEXT"):
        origin = f"DOCKER_CONTEXT={name}"
    else:
        name = _read_json(folder / "config.json").get("currentContext", "")
        origin = f"the current context, {name}"
    if name in ("", "default"):
        return Endpoint(DEFAULT_SOCKET, "the default")
    # Contexts lie in folders named by the digest of their name (docker/cli, cli/context/store).
    meta = _read_json(folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json")
    try:
        return Endpoint(str(meta["Endpoints"]["docker"]["Host"]), origin)
    except KeyError:
        raise PreflightError(
            f"there is no Docker context {name} ({origin})", "choose one with `docker context use`"
        ) from None


def connect(environ: Mapping[str, str] = os.environ) -> DockerClient:
    """An open client of the engine that ``resolve_endpoint`` finds; close it.

    Raises PreflightError, with the way out, when there is none, when this user may not use it, when it is too old, and
    when it is another machine's.
    """
    endpoint = resolve_endpoint(environ)
    if not endpoint.is_local:
        raise PreflightError(
            f"the Docker engine at {endpoint.address} ({endpoint.origin}) is not this machine's",
            "call hetdeploy on that machine, or choose this one's: `docker context use default`, `unset DOCKER_HOST`",
        )
    _knock(endpoint)
    import docker
    import docker.errors
    import requests

    try:
        client = docker.DockerClient(base_url=endpoint.address, version="auto", timeout=int(ENGINE_SECONDS))
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise PreflightError(
            f"the Docker engine at {endpoint.address} does not answer as one ({error})", _START
        ) from error
    version = client.api.api_version
    if _numbers(version) < OLDEST_API:
        client.close()
        oldest = ".".join(map(str, OLDEST_API))
        raise PreflightError(
            f"the Docker engine at {endpoint.address} is too old (API {version}; needed is {oldest}, Docker 20.10)",
            "update Docker",
        )
    return client


def engine_info(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `docker info` tells, with ApiVersion and Endpoint. Raises PreflightError as ``connect`` does."""
    endpoint = resolve_endpoint(environ)
    client = connect(environ)
    try:
        info: dict[str, Any] = client.info()
        return {**info, "ApiVersion": client.api.api_version, "Endpoint": f"{endpoint.address} ({endpoint.origin})"}
    finally:
        client.close()


def _knock(endpoint: Endpoint) -> None:
    """Connect to the engine's socket: unlike the SDK, the operating system tells in one word what is wrong."""
    where = f"{endpoint.address} ({endpoint.origin})"
    try:
        with socket.socket(socket.AF_UNIX) as knock:
            knock.settimeout(ENGINE_SECONDS)
            knock.connect(endpoint.address.removeprefix("unix://"))
    except PermissionError:
        raise PreflightError(f"this user may not use the Docker engine at {where}", _JOIN_GROUP) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise PreflightError(f"no Docker engine answers at {where}", _START) from None
    except OSError as error:
        raise PreflightError(f"the Docker engine at {where} does not answer ({error})", _START) from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
