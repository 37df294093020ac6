"""`hetdeploy join` on a Mac, as far as one can be made of a network namespace (tests/fake_mac)."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from fake_mac import NODE_NAME, ON_WIFI, FakeMac, fake_mac
from harness import SCRIPTS, Command, join_code, run, write_script

from hetdeploy import envfile
from hetdeploy.link.invitation import Invitation

pytestmark = pytest.mark.lan

COLLECTIVES = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "4")
FOREVER = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("met", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""
PRIVACY = "System Settings > Privacy & Security > Local Network"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a user who has joined before, but for the first test that asks for it."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.docker
@pytest.mark.usefixtures("images")
def test_every_collective_between_containers_and_a_mac(tmp_path: Path) -> None:
    with (
        fake_mac(tmp_path / "mac", tmp_path / "home", ON_WIFI) as mac,
        Command("up", "--nic", mac.hosts.head_nic, *COLLECTIVES, cwd=tmp_path / "head") as up,
        Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join,
    ):
        assert join.wait(180) == 0, join.text
        assert up.wait() == 0, up.text
    address = mac.hosts.other_address

    assert re.search(r"head rank 0 \| rank 0: all \d+ checks passed", up.text)
    assert re.search(rf"{NODE_NAME} rank 1 \| rank 1: all \d+ checks passed", up.text)
    assert re.search(rf"{NODE_NAME} joined from {address}:\d+: darwin arm64, mps", up.text)
    assert re.search(r"^self-test +the bridge carries torch \S+, \d+ checks", join.text)
    assert "warning: en0 is Wi-Fi" in join.text
    assert re.search(rf"network +en0 \({address}, wifi, .*\) towards {mac.hosts.head_address}", join.text)

    written = envfile.read(tmp_path / "joiner" / ".hetdeploy" / "joiner.env")
    expected = {
        "HETDEPLOY_NIC": "en0",
        "HETDEPLOY_ADDRESS": address,
        "HETDEPLOY_HEAD": mac.hosts.head_address,
        "HETDEPLOY_LINK": "tunnel",
        "HETDEPLOY_ACCELERATOR": "mps",
        "GLOO_SOCKET_IFNAME": "lo0",
    }
    assert {key: written[key].value for key in expected} == expected

    assert story(mac) == ["awake", "rank", "rank ended", "asleep"]
    by_name = {event["what"]: event for event in mac.events()}
    assert by_name["awake"]["arguments"] == ["-i", "-m", "-s", "-w", str(join.pid)]
    # As it was before Python started: torch reads the fallback variable once, so a script that sets it is too late.
    assert by_name["rank"]["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    assert (by_name["rank"]["GLOO_SOCKET_IFNAME"], by_name["rank"]["HETDEPLOY_DIALECT"]) == ("lo0", "uv")


@pytest.mark.parametrize(("other", "link"), [("linux", "tunnel"), ("darwin", "direct")])
def test_a_mac_and_another_machine_join_one_job(other: str, link: str, home: Path, tmp_path: Path) -> None:
    """The joiners meet over the link: neither has an open port."""
    script = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "0.1")
    flags = ("--native", "--nodes", "3", "--link", link)
    with (
        fake_mac(tmp_path / "mac", home) as mac,
        Command("up", *flags, "--nic", mac.hosts.head_nic, *script, cwd=tmp_path / "head") as up,
        Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join,
    ):
        second = {"host": mac.another_mac("other"), "env": mac.env}
        if other == "linux":
            second = {"host": mac.another_linux("other")}
        with Command("join", join_code(up), cwd=tmp_path / "other", **second) as other_join:
            assert join.wait(240) == 0, join.text
            assert other_join.wait() == 0, other_join.text
            assert up.wait() == 0, up.text
    assert re.search(rf"{NODE_NAME} joined from \S+ darwin ", up.text)
    assert re.search(rf"other joined from \S+ {other} ", up.text)
    for rank in range(3):
        assert re.search(rf"rank {rank} \| rank {rank}: all \d+ checks passed", up.text)
    written = envfile.read(tmp_path / "joiner" / ".hetdeploy" / "joiner.env")
    # A Mac needs its bridge on a plain wire as well, and the bridge finds gloo on loopback.
    assert (written["HETDEPLOY_LINK"].value, written["GLOO_SOCKET_IFNAME"].value) == (link, "lo0")


def test_ctrl_c_lets_the_mac_sleep_again(home: Path, tmp_path: Path) -> None:
    script = write_script(tmp_path / "head", FOREVER)
    with fake_mac(tmp_path / "mac", home) as mac:
        with Command("up", "--native", "--nic", mac.hosts.head_nic, script.name, cwd=script.parent) as up:
            with Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join:
                join.wait_for(r"rank 1 \| met", 120)
                assert story(mac) == ["awake", "rank"]
                join.send(signal.SIGINT)
                assert join.wait() == 130, join.text
            assert up.wait() == 130, up.text
        assert story(mac)[-1] == "asleep"
    assert "Wi-Fi" not in join.text
    assert re.search(r"network +en0 \(\S+, wired, ", join.text)


def test_the_self_test_is_run_once(tmp_path: Path) -> None:
    with fake_mac(tmp_path / "mac", tmp_path / "home") as mac:
        code = Invitation(mac.hosts.head_address, 29400, bytes(16), bytes(16), 0).encode()
        asked = ("join", "--join-timeout", "1", code)
        first, second = (run(*asked, cwd=tmp_path / "joiner", host=mac, env=mac.env) for _ in range(2))
    assert "self-test " in first[1]
    assert "self-test " not in second[1]
    assert (first[0], second[0]) == (4, 4)


def test_a_mac_that_keeps_its_programs_from_the_local_network(home: Path, tmp_path: Path) -> None:
    """macOS answers with EHOSTUNREACH at once, though the head is there and `ping` reaches it."""
    with fake_mac(tmp_path / "mac", home) as mac:
        privacy = ("OUTPUT", "-p", "tcp", "-d", mac.hosts.head_address)
        reject = ("-j", "REJECT", "--reject-with", "icmp-host-unreachable")
        mac.hosts.run("iptables", "-A", *privacy, *reject).check_returncode()
        code = Invitation(mac.hosts.head_address, 29400, bytes(16), bytes(16), 0).encode()
        with Command("join", "--join-timeout", "1", code, cwd=tmp_path / "joiner", host=mac, env=mac.env) as join:
            assert join.wait() == 4, join.text
    waiting, error = re.findall(r"^.*EHOSTUNREACH.*$", join.text, re.MULTILINE)
    assert waiting.startswith("head        waiting for the head: ")
    assert error.startswith("error: ")
    assert PRIVACY in waiting
    assert PRIVACY in error


def story(mac: FakeMac) -> list[str]:
    """What happened there in turn, but for questions about the network, which may come at any time."""
    return [event["what"] for event in mac.events() if event["what"] != "asked"]
