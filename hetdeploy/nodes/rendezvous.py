"""The head's rendezvous process: link server, coordinator and the job's TCPStore.

python -m hetdeploy.nodes.rendezvous              serve the job until it is over; exits with the job's code
python -m hetdeploy.nodes.rendezvous --healthy    exit 0 when link and store answer on this machine
python -m hetdeploy.nodes.rendezvous --init ...   make the state first: credentials, codes and a job for a script
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from hetdeploy.errors import HetdeployError, PreflightError
from hetdeploy.files import write_atomic
from hetdeploy.link.credentials import Credentials
from hetdeploy.link.server import LinkServer
from hetdeploy.nodes import bundle
from hetdeploy.nodes.coordinator import Coordinator
from hetdeploy.nodes.job import Job, RunFolder, load_job
from hetdeploy.nodes.member import installed_torch

HEALTH_SECONDS = 2.0
STORE_SECONDS = 60.0
"""How long one operation on the store may take."""
GOODBYE_SECONDS = 5.0
"""After the outcome: how long the members may take to hang up before the server does."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hetdeploy.nodes.rendezvous")
    parser.add_argument("--listen", default="0.0.0.0:29400")
    parser.add_argument("--store", default="0.0.0.0:29500", help="address that the TCPStore listens on")
    parser.add_argument("--state", type=Path, default=Path("/state"), help="folder with job.json, link/ and files/")
    parser.add_argument("--runs", type=Path, default=Path("/runs"))
    parser.add_argument("--own-ports-only", action="store_true", help="joiners reach ports of this job's ranks alone")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--init", nargs=argparse.REMAINDER, metavar="SCRIPT", help="script and its arguments")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    listen, store = _address(options.listen), _address(options.store)
    if options.healthy:
        return 0 if answers(listen) and answers(store) else 1
    try:
        if options.init:
            initialise(options.state, options.init[0], options.init[1:], store[1])
        return serve(options.state, options.runs, listen, store, own_ports_only=options.own_ports_only)
    except HetdeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def serve(
    state: Path, runs: Path, listen: tuple[str, int], store_address: tuple[str, int], *, own_ports_only: bool = False
) -> int:
    """Serve the job until it is over. Returns the job's exit code.

    Raises PreflightError when a port is taken.
    """
    job = load_job(state / "job.json")
    run = RunFolder(runs, job.id)
    run.path.mkdir(parents=True, exist_ok=True)
    store = _start_store(store_address)
    loopback = ("127.0.0.1" if store_address[0] == "0.0.0.0" else store_address[0], store_address[1])
    coordinator = Coordinator(
        job, run, state / "files", store=loopback, port_allowed=_owned_by if own_ports_only else None
    )

    def stop(_signum: int, _frame: object) -> None:
        coordinator.stop("stopped at the head")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    server = LinkServer(state / "link", listen, coordinator)
    try:
        server.start()
        while not coordinator.over.wait(timeout=1.0):
            pass
        deadline = time.monotonic() + GOODBYE_SECONDS
        while server.members and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        # Compose stops this container when the rank's ends: in Python's last moments a signal would replace the code.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        server.close()
        coordinator.close()
        del store
    assert coordinator.outcome is not None
    return coordinator.outcome.exit_code


def initialise(state: Path, script: str, arguments: list[str], store_port: int) -> None:
    """Make credentials, codes and a job below ``state``, unless they are there: for a stack that no `up` started.

    Leaves ``state/member/code`` for the head's member and ``state/joiner/code`` for a joiner, both for the host
    ``rendezvous``.
    """
    if (state / "job.json").exists():
        (state / "job.json").unlink()
    script_path = Path(script)
    for folder in ("link", "files", "member", "joiner"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    job = Job(
        id=os.environ.get("HETDEPLOY_JOB", "cpu-pair"),
        script=script_path.name,
        arguments=tuple(arguments),
        nodes=os.environ.get("HETDEPLOY_NODES", "2"),
        nproc_per_node=1,
        backend="gloo",
        link="tunnel",
        head_address="rendezvous",
        link_port=29400,
        store_port=store_port,
        join_timeout=300.0,
        exit_timeout=60.0,
        torch=installed_torch(),
        bundle=bundle.collect(script_path, state / "files"),
    )
    credentials = Credentials.create(state / "link", ttl_seconds=86_400)
    for role, folder in (("head", "member"), ("joiner", "joiner")):
        code = credentials.invitation(role, "rendezvous", 29400).encode()
        write_atomic(state / folder / "code", code.encode())
    write_atomic(state / "job.json", json.dumps(job.to_json()).encode())


def _start_store(address: tuple[str, int]) -> Any:
    """The TCPStore, listening on ``address`` alone; torch by itself would take every address of the machine."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        listener = socket.create_server(address, backlog=128)
    except OSError as error:
        raise PreflightError(
            f"the store cannot listen on {address[0]}:{address[1]} ({error.strerror})", "set HETDEPLOY_STORE_PORT"
        ) from None
    return TCPStore(
        "127.0.0.1" if address[0] == "0.0.0.0" else address[0],
        address[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=listener.detach(),
    )


def _owned_by(pid: int, port: int) -> bool:
    """Whether a process below ``pid`` listens on ``port``."""
    try:
        family = psutil.Process(pid)
        processes = [family, *family.children(recursive=True)]
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for process in processes
            for connection in process.net_connections(kind="tcp")
        )
    except psutil.Error:
        return False


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def answers(address: tuple[str, int]) -> bool:
    host = "127.0.0.1" if address[0] == "0.0.0.0" else address[0]
    try:
        with socket.create_connection((host, address[1]), timeout=HEALTH_SECONDS):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
