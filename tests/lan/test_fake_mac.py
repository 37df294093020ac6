"""`hetdeploy join` on a Mac, as far as one can be made of a network namespace (tests/fake_mac)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_mac import NODE_NAME, ON_A_CABLE, fake_mac
from harness import SCRIPTS, Command, join_code

from hetdeploy import envfile
from hetdeploy.link.invitation import Invitation

pytestmark = pytest.mark.lan

COLLECTIVES = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "4")
PRIVACY = "System Settings > Privacy & Security > Local Network"


@pytest.mark.docker
@pytest.mark.usefixtures("images")
def test_every_collective_between_containers_and_a_mac(tmp_path: Path) -> None:
    with (
        fake_mac(tmp_path / "mac") as mac,
        Command("up", "--nic", mac.hosts.head_nic, *COLLECTIVES, cwd=tmp_path / "head") as up,
        Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join,
    ):
        assert join.wait(180) == 0, join.text
        assert up.wait() == 0, up.text
        events = mac.events()
    address = mac.hosts.other_address

    assert re.search(r"head rank 0 \| rank 0: all \d+ checks passed", up.text)
    assert re.search(rf"{NODE_NAME} rank 1 \| rank 1: all \d+ checks passed", up.text)
    assert re.search(rf"{NODE_NAME} joined from {address}:\d+: darwin arm64, mps", up.text)
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

    assert not [event for event in events if event["what"] == "refused"]
    awake, rank, rank_ended, asleep = (event for event in events if event["what"] != "asked")
    assert awake == {"what": "awake", "arguments": ["-i", "-m", "-s", "-w", str(join.pid)]}
    # As it was before Python started: torch reads the fallback variable once, so a script that sets it is too late.
    assert rank["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    assert (rank["GLOO_SOCKET_IFNAME"], rank["HETDEPLOY_DIALECT"]) == ("lo0", "uv")
    assert [event["what"] for event in (rank, rank_ended, asleep)] == ["rank", "rank ended", "asleep"]


def test_direct_mode_keeps_the_bridge_and_passes_the_link_by(tmp_path: Path) -> None:
    script = (str(SCRIPTS / "check_collectives.py"), "--max-mb", "1")
    with (
        fake_mac(tmp_path / "mac", ON_A_CABLE) as mac,
        Command(
            *("up", "--native", "--link", "direct", "--nic", mac.hosts.head_nic), *script, cwd=tmp_path / "head"
        ) as up,
        Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join,
    ):
        assert join.wait(180) == 0, join.text
        assert up.wait() == 0, up.text
    assert re.search(rf"{NODE_NAME} rank 1 \| rank 1: all \d+ checks passed", up.text)
    written = envfile.read(tmp_path / "joiner" / ".hetdeploy" / "joiner.env")
    assert (written["HETDEPLOY_LINK"].value, written["GLOO_SOCKET_IFNAME"].value) == ("direct", "lo0")
    assert [event["GLOO_SOCKET_IFNAME"] for event in mac.events() if event["what"] == "rank"] == ["lo0"]


def test_the_self_test_takes_a_macs_side(tmp_path: Path) -> None:
    program = (
        "import sys; from hetdeploy.gloo import selftest; from hetdeploy.gloo.dialect import layout_here\n"
        "report = selftest.run(layout_here()); print(report); sys.exit(not report.ok)\n"
    )
    with fake_mac(tmp_path / "mac") as mac:
        command = mac.command(sys.executable, "-c", program)
        done = subprocess.run(command, env={**os.environ, **mac.env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layout=<Layout.DARWIN: 'darwin'>" in done.stdout


def test_ctrl_c_lets_the_mac_sleep_again(tmp_path: Path) -> None:
    script = (str(SCRIPTS / "train_gpt.py"), "--steps", "100000", "--log-every", "1")
    with fake_mac(tmp_path / "mac", ON_A_CABLE) as mac:
        with Command("up", "--native", "--nic", mac.hosts.head_nic, *script, cwd=tmp_path / "head") as up:
            with Command("join", join_code(up), cwd=tmp_path / "joiner", host=mac, env=mac.env) as join:
                join.wait_for(r"rank 1 \| step 2 loss")
                assert [event["what"] for event in mac.events()][-2:] == ["awake", "rank"]
                join.send(signal.SIGINT)
                assert join.wait() == 130, join.text
            assert up.wait() == 130, up.text
        assert mac.events()[-1] == {"what": "asleep"}
    assert "Wi-Fi" not in join.text
    assert re.search(r"network +en0 \(\S+, wired, ", join.text)


def test_a_mac_that_keeps_its_programs_from_the_local_network(tmp_path: Path) -> None:
    """macOS answers with EHOSTUNREACH at once, though the head is there and `ping` reaches it."""
    with fake_mac(tmp_path / "mac") as mac:
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
