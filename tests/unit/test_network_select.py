"""Which NIC is chosen: by route, then cable, then speed; and what is said where none can be."""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hetdeploy.errors import HetdeployError, PreflightError, UsageError
from hetdeploy.network import darwin, linux
from hetdeploy.network.host import nic_cautions
from hetdeploy.network.interfaces import Interface, Kind, assemble
from hetdeploy.network.select import choose, is_candidate

MACOS = Path(__file__).parents[1] / "recorded" / "macos"


def nic(name: str, *addresses: str, kind: Kind = "wired", speed: int = 1000, up: bool = True) -> Interface:
    ipv4 = tuple(ipaddress.IPv4Interface(address) for address in addresses)
    return Interface(name, ipv4, up, speed, 1500, kind)


LO = nic("lo", "127.0.0.1/8", kind="loopback", speed=0)
ENO1 = nic("eno1", "192.168.1.10/24")
ENO2 = nic("eno2", "10.0.0.10/24", speed=10000)
WLAN = nic("wlan0", "192.168.1.11/24", kind="wifi", speed=0)
DOCKER = nic("docker0", "172.17.0.1/16", kind="virtual", speed=0)
TAILSCALE = nic("tailscale0", "100.64.0.5/32", kind="tunnel", speed=0)
DARK = nic("eno3", "10.1.0.10/24", up=False)
SIX = nic("eno4")
ALL = [LO, DOCKER, TAILSCALE, WLAN, DARK, SIX, ENO1, ENO2]


def pick(
    interfaces: list[Interface], route: str | None = None, named: str | None = None, peer: str | None = None
) -> str:
    return choose(interfaces, peer, named, route=lambda _: route).name


def refusal(
    interfaces: list[Interface], route: str | None = None, named: str | None = None, peer: str | None = None
) -> HetdeployError:
    with pytest.raises(HetdeployError) as caught:
        pick(interfaces, route, named, peer)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_route_decides_first() -> None:
    assert pick(ALL, route="eno1") == "eno1"
    assert pick(ALL, route="wlan0") == "wlan0"
    assert pick(ALL, route="wlan0", peer="192.168.1.99") == "wlan0"


def test_the_peer_is_what_the_route_is_asked_for() -> None:
    asked: list[str | None] = []
    for peer in (None, "192.168.1.99"):
        choose(ALL, peer, None, route=lambda to: asked.append(to) or "eno1")
    assert asked == [None, "192.168.1.99"]


def test_a_name_needs_no_route() -> None:
    def no_route(to: str | None) -> str:
        raise AssertionError

    assert choose(ALL, "203.0.113.1", "eno1", route=no_route) is ENO1


def test_without_a_route_cable_comes_before_wifi_and_speed_after() -> None:
    assert pick([WLAN, ENO1]) == "eno1"
    assert pick([WLAN, ENO1, ENO2]) == "eno2"
    assert pick([nic("eth0", "10.2.0.1/24", speed=100), WLAN]) == "eth0"


def test_a_default_route_through_a_vpn_does_not_count() -> None:
    assert pick([TAILSCALE, WLAN, ENO1], route="tailscale0") == "eno1"


def test_a_self_assigned_address_comes_last() -> None:
    assert pick([nic("eno5", "169.254.3.4/16", speed=10000), WLAN]) == "wlan0"
    assert pick([nic("eno5", "169.254.3.4/16")]) == "eno5"
    assert nic("eno5", "169.254.3.4/16", "10.0.0.2/24").address == "10.0.0.2"


@pytest.mark.parametrize(
    "name",
    [
        "docker0",
        "br-0a1b2c3d",
        "veth12ab",
        "virbr0",
        "utun3",
        "tailscale0",
        "awdl0",
        "llw0",
        "bridge0",
        "bridge100",
        "wg0",
        "tun0",
        "tap0",
    ],
)
def test_what_engines_and_vpns_put_there_is_used_only_when_named(name: str) -> None:
    other = nic(name, "10.9.0.1/24", kind="virtual")
    assert not is_candidate(other)
    assert pick([other, WLAN]) == "wlan0"
    assert pick([other, WLAN], named=name) == name


def test_a_bridge_or_bond_of_the_users_own_is_a_candidate() -> None:
    assert pick([LO, nic("br0", "192.168.1.10/24"), DOCKER]) == "br0"
    assert pick([LO, nic("bond0", "192.168.1.10/24"), DOCKER]) == "bond0"


def test_two_equally_good_nics_are_for_the_user_to_choose() -> None:
    error = refusal([LO, ENO1, nic("eno9", "10.0.0.9/24"), WLAN])
    assert isinstance(error, UsageError)
    assert str(error) == (
        "eno1 (192.168.1.10, wired, 1000 Mbit/s) and eno9 (10.0.0.9, wired, 1000 Mbit/s) are equally good and no route "
        "decides: choose one, such as --nic eno1"
    )


def test_a_peer_behind_a_vpn_needs_the_vpn_named() -> None:
    error = refusal([ENO1, TAILSCALE], route="tailscale0", peer="100.64.0.9")
    assert str(error) == (
        "the way to 100.64.0.9 leaves by tailscale0 (100.64.0.5, tunnel), which is not used unasked: "
        "name it if that is meant: --nic tailscale0"
    )
    assert pick([ENO1, TAILSCALE], named="tailscale0", peer="100.64.0.9") == "tailscale0"


def test_a_peer_on_this_very_machine_is_reached_by_loopback() -> None:
    assert pick(ALL, route="lo", peer="127.0.0.1") == "lo"
    assert pick([LO, ENO1], route="lo") == "eno1"


def test_no_usable_nic_is_said_with_what_there_is() -> None:
    error = refusal([LO, DARK, SIX, DOCKER])
    assert isinstance(error, PreflightError)
    assert str(error).startswith("no NIC of this machine is up and has an IPv4 address (there is ")
    for part in ("eno3 (10.1.0.10, wired, 1000 Mbit/s, down)", "eno4 (no IPv4 address, wired, 1000 Mbit/s)", "docker0"):
        assert part in str(error)
    assert "there is no interface at all" in str(refusal([]))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("eno8", "NIC eno8 (--nic) is not on this machine: did you mean eno"),
        (
            "infiniband",
            "NIC infiniband (--nic) is not on this machine: use --nic with one of eno2 (10.0.0.10, wired, 10",
        ),
        ("eno3", "NIC eno3 (--nic) is down or has no cable: bring it up, or use --nic with one of eno2 (10.0.0.10"),
        (
            "eno4",
            "NIC eno4 (--nic) has no IPv4 address, which gloo needs: give it one, or use --nic with one of eno2 (",
        ),
        (
            "^lo",
            "NIC ^lo (--nic) is NCCL's way to leave one out; gloo takes one name: use --nic with one of eno2 (10.0",
        ),
        (
            "eno*",
            "NIC eno* (--nic) is a pattern; gloo takes one name: use --nic with one of eno2 (10.0.0.10, wired, 10",
        ),
        (
            "=eno1",
            "NIC =eno1 (--nic) is a pattern; gloo takes one name: use --nic with one of eno2 (10.0.0.10, wired, 1",
        ),
        (
            "eno1,eno2",
            "NIC eno1,eno2 (--nic) is a list, but one NIC is used: use --nic with one of eno2 (10.0.0.10, wir",
        ),
        ("192.168.1.10", "NIC 192.168.1.10 (--nic) is an address, where a name is wanted: use --nic eno1"),
        (
            "192.168.1.77",
            "NIC 192.168.1.77 (--nic) is an address, and of no NIC of this machine: use --nic with one of",
        ),
        ("fe80::1", "NIC fe80::1 (--nic) is an address, and of no NIC of this machine: use --nic with one of eno2"),
    ],
)
def test_a_name_that_cannot_be_used_is_answered_with_what_there_is(named: str, said: str) -> None:
    error = refusal(ALL, named=named)
    assert isinstance(error, UsageError)
    assert str(error).startswith(said)


def test_the_message_says_where_the_name_comes_from() -> None:
    with pytest.raises(UsageError, match=r"^NIC en0 \(\.env:3\) is not on this machine"):
        choose([ENO1], None, "en0", named_by=".env:3")


def test_cautions_for_a_nic() -> None:
    assert nic_cautions(ENO1, ALL) == []
    assert [str(caution) for caution in nic_cautions(WLAN, ALL)] == [
        "wlan0 is Wi-Fi, slower than a cable and unsteady: --nic eno1 is wired"
    ]
    assert [caution.problem for caution in nic_cautions(nic("eth0", "10.0.0.1/8", speed=100), [])] == [
        "eth0 runs at 100 Mbit/s"
    ]
    wireguard = Interface("wg0", ENO1.ipv4, True, 0, 1420, "tunnel")
    assert [caution.problem for caution in nic_cautions(wireguard, ALL)] == [
        "wg0 is a tunnel",
        "wg0 takes packets of 1420 bytes where Ethernet takes 1500, as tunnels do",
    ]
    assert nic_cautions(LO, ALL)[0].problem == "lo is loopback: no other machine can join"


def recorded_mac(*without: str) -> list[Interface]:
    """The interfaces of the recorded Mac, less those in ``without``."""
    table = json.loads((MACOS / "interfaces.json").read_text())
    states = {name: SimpleNamespace(**fields) for name, fields in table.items() if name not in without}
    families = {"AF_INET": socket.AF_INET, "AF_INET6": socket.AF_INET6, "AF_LINK": psutil.AF_LINK}
    addresses = {
        name: [
            SimpleNamespace(family=families[entry["family"]], address=entry["address"], netmask=entry["netmask"])
            for entry in fields["addresses"]
        ]
        for name, fields in table.items()
    }
    return assemble(addresses, states, darwin.kinds(states, answer("networksetup-listallhardwareports.txt")))


def answer(recording: str) -> darwin.Runner:
    return lambda command: (MACOS / recording).read_text()


class TestMac:
    def test_interfaces_are_known_by_their_hardware_port(self) -> None:
        kinds = {interface.name: interface.kind for interface in recorded_mac()}
        assert {name for name, kind in kinds.items() if kind == "wired"} == {"en1", "en2", "en4", "en7", "bridge0"}
        assert {name for name, kind in kinds.items() if kind == "tunnel"} == {"gif0", "stf0", "utun0", "utun4"}
        assert (kinds["en0"], kinds["lo0"], kinds["awdl0"]) == ("wifi", "loopback", "virtual")
        assert darwin.kinds(["en9", "en10"], answer("networksetup-listallhardwareports.txt")) == {
            "en9": "virtual",
            "en10": "virtual",
        }

    def test_an_interface_has_its_facts(self) -> None:
        adapter = next(interface for interface in recorded_mac() if interface.name == "en7")
        assert adapter == Interface(
            "en7", (ipaddress.IPv4Interface("192.168.1.57/24"),), True, 1000, 1500, "wired", "02:00:5e:10:00:07"
        )
        assert adapter.describe() == "en7 (192.168.1.57, wired, 1000 Mbit/s)"

    @pytest.mark.parametrize(
        ("recording", "route"),
        [
            ("route-get-default-wifi.txt", "en0"),
            ("route-get-default-vpn.txt", "utun4"),
            ("route-get-default-none.txt", None),
        ],
    )
    def test_the_default_route(self, recording: str, route: str | None) -> None:
        assert darwin.default_route(answer(recording)) == route

    def test_the_commands_are_macoss_own(self) -> None:
        asked: list[object] = []
        darwin.kinds([], lambda command: asked.append(command) or "")
        darwin.default_route(lambda command: asked.append(command) or "")
        assert asked == [
            ("/usr/sbin/networksetup", "-listallhardwareports"),
            ("/sbin/route", "-n", "get", "default"),
        ]

    def test_the_choice_on_wifi_points_to_the_cable(self) -> None:
        interfaces = recorded_mac()
        chosen = choose(
            interfaces, None, None, route=lambda _: darwin.default_route(answer("route-get-default-wifi.txt"))
        )
        assert chosen.name == "en0"
        assert [caution.fix for caution in nic_cautions(chosen, interfaces)] == ["--nic en7 is wired"]

    def test_the_choice_under_a_vpn_is_the_cable(self) -> None:
        assert pick(recorded_mac(), darwin.default_route(answer("route-get-default-vpn.txt"))) == "en7"

    def test_the_choice_without_the_adapter_is_wifi(self) -> None:
        assert pick(recorded_mac("en7"), None) == "en0"

    def test_a_virtual_machines_bridge_is_no_choice(self) -> None:
        assert isinstance(refusal(recorded_mac("en7", "en0")), PreflightError)

    def test_a_missing_or_failing_command_says_nothing(self, tmp_path: Path) -> None:
        assert darwin.run_command([str(tmp_path / "networksetup")]) == ""
        assert darwin.run_command(["false"]) == ""
        assert darwin.run_command(["echo", "en0"]) == "en0\n"


class TestLinux:
    @pytest.fixture
    def sysfs(self, tmp_path: Path) -> Path:
        """A tree like /sys/class/net: a NIC, Wi-Fi old and new style, and what is stacked upon them."""

        def add(name: str, hardware: int, *parts: str) -> None:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "type").write_text(f"{hardware}\n")
            for part in parts:
                if part.startswith("lower_"):
                    (folder / part).symlink_to(Path("..") / part.removeprefix("lower_"))
                else:
                    (folder / part).mkdir()

        add("lo", 772)
        add("eno1", 1, "device")
        add("wlan0", 1, "device", "wireless")
        add("wlp2s0", 1, "device", "phy80211")
        add("bond0", 1, "lower_eno1")
        add("vlan7", 1, "lower_bond0")
        add("br0", 1, "lower_eno1", "lower_veth0")
        add("veth0", 1)
        add("docker0", 1, "lower_veth0")
        add("wg0", 65534)
        add("ppp0", 512)
        add("tap0", 1, "tun_flags")
        add("loop1", 1, "lower_loop2")
        add("loop2", 1, "lower_loop1")
        return tmp_path

    def test_interfaces_are_known_by_what_sysfs_shows(self, sysfs: Path) -> None:
        names = [folder.name for folder in sysfs.iterdir()] + ["gone"]
        assert linux.kinds(names, sysfs) == {
            "lo": "loopback",
            "eno1": "wired",
            "wlan0": "wifi",
            "wlp2s0": "wifi",
            "bond0": "wired",
            "vlan7": "wired",
            "br0": "wired",
            "veth0": "virtual",
            "docker0": "virtual",
            "wg0": "tunnel",
            "ppp0": "tunnel",
            "tap0": "tunnel",
            "loop1": "virtual",
            "loop2": "virtual",
            "gone": "virtual",
        }

    HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    WIFI = "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
    WIRE = "eno1\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    LOCAL = "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    HALF = "tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n"
    REFUSED = "*\t00000000\t00000000\t0200\t0\t0\t50\t00000000\t0\t0\t0\n"

    @pytest.mark.parametrize(
        ("rows", "route"),
        [
            ((WIFI, WIRE, LOCAL), "eno1"),
            ((LOCAL, WIFI), "wlan0"),
            ((HALF, LOCAL, WIFI), "wlan0"),
            ((REFUSED, WIFI), "wlan0"),
            ((LOCAL,), None),
            ((), None),
        ],
    )
    def test_the_default_route(self, tmp_path: Path, rows: tuple[str, ...], route: str | None) -> None:
        table = tmp_path / "route"
        table.write_text(self.HEAD + "".join(rows))
        assert linux.default_route(table) == route
