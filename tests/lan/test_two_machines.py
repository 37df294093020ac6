"""One job over two hosts that share nothing but a gigabit cable: head in containers, joiner native."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import SCRIPTS, Command, join_code, run
from two_hosts import TwoHosts, two_hosts

from hetdeploy import envfile

pytestmark = [pytest.mark.lan, pytest.mark.docker, pytest.mark.usefixtures("images")]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as pair:
        yield pair


@pytest.mark.parametrize("link", ["tunnel", "direct"])
def test_every_collective_between_containers_and_another_host(link: str, hosts: TwoHosts, tmp_path: Path) -> None:
    script = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "4")
    flags = ("--nic", hosts.head_nic, "--link", link)
    with Command("up", *flags, *script, cwd=tmp_path / "head") as up:
        code = join_code(up)
        with Command("join", code, cwd=tmp_path / "joiner", host=hosts) as join:
            assert join.wait(180) == 0, join.text
            assert up.wait() == 0, up.text
    assert re.search(r"head rank 0 \| rank 0: all \d+ checks passed", up.text)
    assert re.search(r"mac rank 1 \| rank 1: all \d+ checks passed", up.text)
    head = envfile.read(tmp_path / "head" / ".hetdeploy" / "head.env")
    joiner = envfile.read(tmp_path / "joiner" / ".hetdeploy" / "joiner.env")
    inner = ("eth0", "lo") if link == "tunnel" else (hosts.head_nic, hosts.other_nic)
    assert (head["GLOO_SOCKET_IFNAME"].value, joiner["GLOO_SOCKET_IFNAME"].value) == inner
    assert (head["HETDEPLOY_NIC"].value, joiner["HETDEPLOY_NIC"].value) == (hosts.head_nic, hosts.other_nic)
    assert ("direct mode: every machine" in up.text) == (link == "direct")


def test_trains_while_status_and_logs_look_on(hosts: TwoHosts, tmp_path: Path) -> None:
    head = tmp_path / "head"
    script = (str(SCRIPTS / "train_gpt.py"), "--steps", "30", "--log-every", "5")
    assert run("up", "--detach", "--nic", hosts.head_nic, *script, cwd=head)[0] == 0
    code = run("code", cwd=head)[1].split()[-1]
    with Command("join", code, cwd=tmp_path / "joiner", host=hosts) as join:
        join.wait_for(r"step 10 loss")
        exit_code, text = run("status", "--json", cwd=head)
        status = json.loads(text)
        assert (exit_code, status["state"], status["schema_version"]) == (0, "running", 1)
        by_name = {node["name"]: node for node in status["nodes"]}
        assert set(by_name) == {"head", "mac"}
        assert by_name["mac"]["progress"]["1"]["step"] >= 5
        assert by_name["mac"]["progress"]["1"]["samples_per_second"] > 0
        assert join.wait(180) == 0, join.text
    assert "mac rank 1 | step 30" in run("logs", cwd=head)[1]
    assert "2 ranks on 2 nodes finished" in run("status", cwd=head)[1]
    assert run("down", cwd=head)[0] == 0
    left = subprocess.run(["docker", "ps", "-aq", "--filter", f"name=hetdeploy-{head.name}"], capture_output=True)
    assert left.stdout == b""


def test_the_head_is_rank_0_though_the_joiners_address_sorts_first(tmp_path: Path) -> None:
    with two_hosts(head=200, other=3) as hosts:
        script = (str(SCRIPTS / "train_gpt.py"), "--steps", "2")
        with Command("up", "--nic", hosts.head_nic, "--link", "direct", *script, cwd=tmp_path / "head") as up:
            with Command("join", join_code(up), cwd=tmp_path / "joiner", host=hosts) as join:
                assert join.wait(120) == 0, join.text
            assert up.wait() == 0, up.text
    assert "head rank 0 | step 2" in up.text
    assert "mac rank 1 | step 2" in up.text


def test_the_link_port_alone_answers(hosts: TwoHosts, tmp_path: Path) -> None:
    script = str(SCRIPTS / "train_gpt.py")
    scan = (
        "import socket, sys\n"
        "found = []\n"
        "for port in range(1, 65536):\n"
        "    with socket.socket() as s:\n"
        "        s.settimeout(0.5)\n"
        "        if s.connect_ex((sys.argv[1], port)) == 0: found.append(port)\n"
        "print(found)\n"
    )
    with Command("up", "--nic", hosts.head_nic, script, cwd=tmp_path / "head") as up:
        join_code(up)
        up.wait_for("head joined")
        python = ("python3", "-c", scan, hosts.head_address)
        done = hosts.run(*python, capture_output=True, text=True, timeout=240)
        assert _ours(json.loads(done.stdout)) == {29400}
        with socket.socket() as loopback:
            assert loopback.connect_ex(("127.0.0.1", 29400)) != 0


def _ours(ports: list[int]) -> set[int]:
    """Those of the open ports that Docker or hetdeploy listens on: other programs are not the subject."""
    found = set()
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port not in ports or connection.pid is None:
            continue
        command = " ".join(psutil.Process(connection.pid).cmdline())
        if "docker" in command or "hetdeploy" in command:
            found.add(connection.laddr.port)
    return found
