"""NIC choice on real interfaces: a host with several, in a network namespace of its own, and a LAN in another."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.lan

COMMAND_SECONDS = 30
PROBE_SECONDS = 60
STATE_SECONDS = 10
POLL_SECONDS = 0.02

_numbers = itertools.count()

# Runs inside the host's namespace and prints one JSON object.
PROBE = """
import json, socket, sys
from hetdeploy.errors import HetdeployError
from hetdeploy.network import connect, host, interfaces, probe, select
def run():
{body}
try:
    print(json.dumps({{"answer": run()}}))
except HetdeployError as error:
    print(json.dumps({{"error": type(error).__name__, "text": str(error)}}))
"""


class Host:
    """A network namespace with two cables to a LAN, which is another namespace."""

    def __init__(self) -> None:
        unique = f"hd-nic-{os.getpid()}-{next(_numbers)}"
        self.namespace, self.lan = f"{unique}-host", f"{unique}-lan"

    def build(self) -> None:
        for namespace in (self.namespace, self.lan):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        self.cable("eno1", "10.91.0.2/24", "10.91.0.1/24")
        self.cable("eno2", "10.92.0.2/24", "10.92.0.1/24")

    def destroy(self) -> None:
        """Devices go with their namespaces."""
        for namespace in (self.namespace, self.lan):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=COMMAND_SECONDS)

    def ip(self, *arguments: str) -> None:
        ip("-n", self.namespace, *arguments)

    def cable(self, name: str, here: str, there: str) -> None:
        far = f"{name}-lan"
        self.ip("link", "add", name, "type", "veth", "peer", "name", far, "netns", self.lan)
        self.ip("address", "add", here, "dev", name)
        self.ip("link", "set", name, "up")
        ip("-n", self.lan, "address", "add", there, "dev", far)
        ip("-n", self.lan, "link", "set", far, "up")
        self.await_state(name, "UP")

    def bridge(self, name: str, address: str) -> None:
        """A bridge as container engines make it, with a container's cable in it."""
        inside = f"{name}.in"
        self.ip("link", "add", name, "type", "bridge")
        self.ip("link", "add", f"veth-{name}", "type", "veth", "peer", "name", inside, "netns", self.lan)
        ip("-n", self.lan, "link", "set", inside, "up")
        self.ip("link", "set", f"veth-{name}", "master", name, "up")
        self.ip("address", "add", address, "dev", name)
        self.ip("link", "set", name, "up")
        self.await_state(name, "UP")

    def unplug(self, name: str) -> None:
        ip("-n", self.lan, "link", "set", f"{name}-lan", "down")
        self.await_state(name, "DOWN", "LOWERLAYERDOWN")

    def await_state(self, name: str, *states: str) -> None:
        """The kernel takes up to a second to notice a cable."""
        show = ["ip", "-n", self.namespace, "-json", "link", "show", name]
        deadline = time.monotonic() + STATE_SECONDS
        while True:
            seen = json.loads(subprocess.run(show, check=True, capture_output=True, timeout=COMMAND_SECONDS).stdout)
            if seen[0]["operstate"] in states:
                return
            assert time.monotonic() < deadline, f"{name} is {seen[0]['operstate']}, not {' or '.join(states)}"
            time.sleep(POLL_SECONDS)

    def run(self, body: str, *before: str) -> dict[str, object]:
        """What a Python function with this body answers on the host, or the error that it raises."""
        code = PROBE.format(body="\n".join(f"    {line}" for line in body.splitlines()))
        command = ["ip", "netns", "exec", self.namespace, *before, sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    def choose(self, named: str | None = None, peer: str | None = None) -> dict[str, object]:
        return self.run(f"return select.choose(interfaces.read(), {peer!r}, {named!r}).name")

    def chosen(self, named: str | None = None, peer: str | None = None) -> object:
        return self.choose(named, peer).get("answer")

    def refusal(self, named: str | None = None, peer: str | None = None) -> str:
        answer = self.choose(named, peer)
        assert "\n" not in str(answer["text"])
        return f"{answer['error']}: {answer['text']}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    try:
        host.build()
        yield host
    finally:
        host.destroy()


def test_two_nics_are_told_apart_by_the_route(host: Host) -> None:
    ambiguous = host.refusal()
    assert ambiguous.startswith("UsageError: eno1 (10.91.0.2, ") or ambiguous.startswith(
        "UsageError: eno2 (10.92.0.2, "
    )
    assert "equally good and no route decides: choose one, such as --nic eno" in ambiguous
    assert host.chosen(named="eno2") == "eno2"
    assert host.chosen(peer="10.91.0.1") == "eno1"
    assert host.chosen(peer="10.92.0.1") == "eno2"

    host.ip("route", "add", "default", "via", "10.92.0.1", "metric", "100")
    assert host.chosen() == "eno2"
    host.ip("route", "add", "default", "via", "10.91.0.1", "metric", "50")
    assert host.chosen() == "eno1"
    assert host.chosen(peer="203.0.113.9") == "eno1"
    assert host.chosen(peer="10.92.0.1") == "eno2"


def test_a_nic_that_is_down_or_unplugged_is_not_chosen(host: Host) -> None:
    host.ip("link", "set", "eno1", "down")
    assert host.chosen() == "eno2"
    assert host.refusal("eno1").startswith("UsageError: NIC eno1 (--nic) is down or has no cable: bring it up, or use")

    host.ip("link", "set", "eno1", "up")
    host.await_state("eno1", "UP")
    host.unplug("eno2")
    assert host.chosen() == "eno1"
    assert host.refusal("eno2").startswith("UsageError: NIC eno2 (--nic) is down or has no cable")

    host.unplug("eno1")
    assert host.refusal().startswith("PreflightError: no NIC of this machine is up and has an IPv4 address (there is ")


def test_a_nic_with_ipv6_alone_is_not_chosen(host: Host) -> None:
    host.ip("address", "flush", "dev", "eno2")
    host.ip("address", "add", "fd00:91::2/64", "dev", "eno2")
    assert host.chosen() == "eno1"
    assert host.refusal("eno2").startswith(
        "UsageError: NIC eno2 (--nic) has no IPv4 address, which gloo needs: give it one, or use --nic with one of eno1"
    )


def test_bridges_of_container_engines_are_left_alone(host: Host) -> None:
    host.bridge("docker0", "172.17.0.1/16")
    host.bridge("br-0a1b2c", "172.18.0.1/16")
    host.ip("link", "set", "eno2", "down")
    assert host.chosen() == "eno1"
    # Even where they have the default route.
    host.ip("route", "add", "default", "via", "172.17.0.9")
    assert host.chosen() == "eno1"
    assert host.chosen(named="docker0") == "docker0"
    assert host.refusal(peer="172.18.0.7").startswith(
        "UsageError: the way to 172.18.0.7 leaves by br-0a1b2c (172.18.0.1, virtual"
    )
    host.ip("link", "set", "eno1", "down")
    assert "PreflightError: no NIC of this machine is up" in host.refusal()
    assert "docker0 (172.17.0.1, virtual" in host.refusal()


def test_a_tunnel_is_used_only_when_named(host: Host) -> None:
    # A plain name: it is known as a tunnel by what it is.
    host.ip("tuntap", "add", "mode", "tun", "name", "office")
    host.ip("address", "add", "10.8.0.2/24", "dev", "office")
    host.ip("link", "set", "office", "up", "mtu", "1280")
    kinds = host.run("return {one.name: one.kind for one in interfaces.read()}")["answer"]
    assert kinds == {"lo": "loopback", "eno1": "virtual", "eno2": "virtual", "office": "tunnel"}
    # Nobody holds the other end of this one: it has no carrier, and is as good as unplugged.
    assert host.refusal("office").startswith("UsageError: NIC office (--nic) is down")
    assert host.chosen(peer="10.91.0.1") == "eno1"


def test_what_is_on_top_of_a_nic_is_as_good_as_the_nic(host: Host) -> None:
    host.ip("link", "add", "lan0", "link", "eno1", "type", "macvlan", "mode", "bridge")
    host.ip("address", "flush", "dev", "eno1")
    host.ip("address", "add", "10.91.0.3/24", "dev", "lan0")
    host.ip("link", "set", "lan0", "up")
    assert host.chosen(peer="10.91.0.1") == "lan0"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("enp9s0f1", "NIC enp9s0f1 (--nic) is not on this machine: "),
        ("^lo", "NIC ^lo (--nic) is NCCL's way to leave one out; gloo takes one name: "),
        ("eno*", "NIC eno* (--nic) is a pattern; gloo takes one name: "),
        ("eno1,eno2", "NIC eno1,eno2 (--nic) is a list, but one NIC is used: "),
        ("10.92.0.2", "NIC 10.92.0.2 (--nic) is an address, where a name is wanted: use --nic eno2"),
        ("10.93.0.2", "NIC 10.93.0.2 (--nic) is an address, and of no NIC of this machine: "),
    ],
)
def test_a_name_that_is_no_nic_is_answered_with_those_there_are(host: Host, named: str, said: str) -> None:
    refused = host.refusal(named)
    assert refused.startswith(f"UsageError: {said}")
    assert "eno2" in refused


def test_a_peer_without_a_route_is_said_at_once(host: Host) -> None:
    assert host.refusal(peer="203.0.113.9").startswith(
        "PeerUnreachable: this machine has no route to 203.0.113.9 (Network is unreachable): connect it to the network"
    )


def test_a_small_mtu_is_a_caution(host: Host) -> None:
    host.ip("link", "set", "eno1", "mtu", "1280")
    cautions = host.run(
        "found = interfaces.read()\n"
        "nics = [one for one in found if one.name.startswith('eno')]\n"
        "return {nic.name: [caution.problem for caution in host.nic_cautions(nic, found)] for nic in nics}"
    )
    assert cautions["answer"] == {
        "eno1": ["eno1 takes packets of 1280 bytes where Ethernet takes 1500, as tunnels do"],
        "eno2": [],
    }


CONNECT = """
try:
    socket.create_connection(({address!r}, 29400), timeout=0.5).close()
except OSError as error:
    raise connect.explain_connect_error(error, {address!r}, 29400)
return "connected"
"""


def test_failed_connects_are_explained(host: Host) -> None:
    host.ip("route", "add", "unreachable", "10.94.0.1")
    host.ip("route", "add", "prohibit", "10.94.0.2")

    def explained(address: str) -> str:
        answer = host.run(CONNECT.format(address=address))
        assert answer["error"] == "PeerUnreachable"
        return str(answer["text"])

    way = "29400 from 10.91.0.2 (eno1): "
    assert explained("10.91.0.1").startswith(
        f"cannot reach 10.91.0.1:{way}connection refused (ECONNREFUSED): the machine"
    )
    # An address that nobody has: the kernel is still asking for its owner when the half second is over.
    silent = explained("10.91.0.77")
    assert silent.startswith(
        f"cannot reach 10.91.0.77:{way}no answer (ETIMEDOUT): check that the machine is on and awake"
    )
    assert silent.endswith("sudo ufw allow proto tcp from 10.91.0.2 to any port 29400")
    assert explained("10.94.0.1").startswith(
        "cannot reach 10.94.0.1:29400: no route to host (EHOSTUNREACH): check that"
    )
    assert explained("10.94.0.2").startswith("cannot reach 10.94.0.2:29400: permission denied (EACCES): a firewall")
    assert explained("203.0.113.9").startswith("cannot reach 203.0.113.9:29400: network is unreachable (ENETUNREACH): ")


def test_debians_line_for_the_host_name_is_a_caution(host: Host, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 trainbox\n")
    script = 'mount --bind "$1" /etc/hosts && hostname trainbox && shift && exec "$@"'
    own_name = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", str(hosts)]
    ask = "return str(host.hostname_caution())"
    assert str(host.run(ask, *own_name)["answer"]).startswith("this machine's name trainbox resolves to 127.0.1.1: ")
    hosts.write_text("127.0.0.1 localhost\n10.91.0.2 trainbox\n")
    assert host.run(ask, *own_name)["answer"] == "None"


def test_ports_are_looked_up_where_the_process_is(host: Host) -> None:
    answer = host.run(
        "server = socket.create_server(('10.91.0.2', 29400))\n"
        "with server:\n"
        "    return [probe.owner_of_port(address, 29400) for address in ('10.91.0.2', '10.92.0.2')]"
    )["answer"]
    assert isinstance(answer, list)
    assert "python" in answer[0]
    assert answer[1] is None
