"""Ports, failed connects and host names: what is said about them, on real sockets where there are any."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from hetdeploy.errors import PeerUnreachable, PreflightError
from hetdeploy.network import interfaces
from hetdeploy.network.connect import explain_connect_error
from hetdeploy.network.host import hostname_caution
from hetdeploy.network.interfaces import Interface, interface_of, outgoing, source_address
from hetdeploy.network.probe import free_port, owner_of_port, require_free_port

LOOPBACK = "127.0.0.1"
EN0 = Interface("en0", (ipaddress.IPv4Interface("192.168.1.23/24"),), True, 0, 1500, "wifi")


class TestPort:
    def test_of_ours_is_named_with_its_process(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            expected = f"{psutil.Process().name()} (process {os.getpid()})"
            assert owner_of_port(LOOPBACK, port) == expected
            with pytest.raises(PreflightError) as caught:
                require_free_port(LOOPBACK, port, "HETDEPLOY_PORT")
        assert str(caught.value) == (
            f"port {port} of {LOOPBACK} is taken by {expected}: end it, or set HETDEPLOY_PORT to a free port"
        )

    def test_listened_on_at_every_address_is_taken_at_each(self) -> None:
        with socket.create_server(("0.0.0.0", 0)) as server:
            assert owner_of_port(LOOPBACK, server.getsockname()[1])
        with socket.create_server((LOOPBACK, 0)) as server:
            assert owner_of_port("0.0.0.0", server.getsockname()[1])

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
    def test_of_another_address_is_free(self) -> None:
        with socket.create_server(("127.0.0.2", 0)) as server:
            port = server.getsockname()[1]
            assert owner_of_port(LOOPBACK, port) is None
            require_free_port(LOOPBACK, port, "HETDEPLOY_PORT")

    def test_that_nobody_listens_on_is_free(self) -> None:
        port = free_port()
        assert owner_of_port(LOOPBACK, port) is None
        require_free_port(LOOPBACK, port, "HETDEPLOY_PORT")

    def test_with_connections_of_an_earlier_server_is_free(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            client = socket.create_connection((LOOPBACK, port), timeout=5)
            accepted, _ = server.accept()
        accepted.close()  # first, so that the server's side is the one in TIME_WAIT
        client.close()
        require_free_port(LOOPBACK, port, "HETDEPLOY_PORT")

    def test_of_a_process_that_cannot_be_seen_is_taken_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(PreflightError, match="is taken by a process of another user: set HETDEPLOY_PORT"):
                require_free_port(LOOPBACK, port, "HETDEPLOY_PORT")

    def test_is_found_among_ones_own_processes_where_macos_shows_no_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(kind: str) -> None:
            raise psutil.AccessDenied

        monkeypatch.setattr(psutil, "net_connections", denied)
        with socket.create_server((LOOPBACK, 0)) as server:
            assert f"process {os.getpid()}" in (owner_of_port(LOOPBACK, server.getsockname()[1]) or "")

    def test_of_an_address_that_is_not_ours(self) -> None:
        with pytest.raises(PreflightError, match=r"^203\.0\.113\.7 is not an address of this machine: choose a NIC"):
            require_free_port("203.0.113.7", free_port(), "HETDEPLOY_PORT")

    @pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="drops root's rights")
    def test_below_1024_is_for_root(self) -> None:
        # Ports are privileged by network namespace: in one of its own the limit is the kernel's default.
        code = (
            "import os, psutil\n"
            "from hetdeploy.network.probe import require_free_port\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "require_free_port('0.0.0.0', 80, 'HETDEPLOY_PORT')"
        )
        answer = subprocess.run(
            ["unshare", "--net", sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert "this user may not listen on port 80: set HETDEPLOY_PORT to a port above 1023" in answer.stderr


class TestAddress:
    def test_towards_loopback_is_loopbacks(self) -> None:
        assert source_address(LOOPBACK) == LOOPBACK
        assert interface_of(LOOPBACK).kind == "loopback"
        assert interface_of("127.0.0.53").kind == "loopback"
        assert outgoing(LOOPBACK) == interface_of(LOOPBACK).name

    def test_that_nobody_has_is_an_error(self) -> None:
        with pytest.raises(
            PreflightError, match=r"^no network interface of this machine has the address 203\.0\.113\.7"
        ):
            interface_of("203.0.113.7")

    def test_of_no_host_is_an_error(self) -> None:
        with pytest.raises(PeerUnreachable, match=r"no route to no-such-host\.invalid \("):
            source_address("no-such-host.invalid")

    def test_this_machine_has_interfaces_with_their_facts(self) -> None:
        loopback = next(one for one in interfaces.read() if one.kind == "loopback")
        assert loopback.up
        assert loopback.address == LOOPBACK
        assert loopback.mtu > 1500


@pytest.mark.parametrize(
    ("error", "system", "said"),
    [
        (
            OSError(65, "No route to host"),
            "Darwin",
            "no route to host (EHOSTUNREACH): check that the machine is on; if `ping` reaches it, macOS keeps this "
            "program from the local network: allow your terminal or editor under System Settings > Privacy & Security "
            "> Local Network, and start it again",
        ),
        (
            OSError(errno.EHOSTUNREACH, "No route to host"),
            "Linux",
            "no route to host (EHOSTUNREACH): check that the machine is on, and on the network that this NIC is on",
        ),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
            "Linux",
            "connection refused (ECONNREFUSED): the machine is there but nothing listens: run `hetdeploy up` on it",
        ),
        (
            TimeoutError("timed out"),
            "Linux",
            "no answer (ETIMEDOUT): check that the machine is on and awake; behind a firewall, run there: "
            "sudo ufw allow proto tcp from 192.168.1.23 to any port 29400",
        ),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), "Linux", "no answer (ETIMEDOUT): check that"),
        (OSError(errno.ENETUNREACH, "x"), "Linux", "network is unreachable (ENETUNREACH): this machine has no route"),
        (
            OSError(errno.EADDRNOTAVAIL, "x"),
            "Linux",
            f"{os.strerror(errno.EADDRNOTAVAIL).lower()} (EADDRNOTAVAIL): the",
        ),
        (PermissionError(errno.EACCES, "x"), "Linux", "permission denied (EACCES): a firewall on this machine"),
        (
            socket.gaierror(-2, "Name or service not known"),
            "Linux",
            "no such host (Name or service not known): use the",
        ),
        (OSError("odd"), "Linux", "odd: try again; `hetdeploy doctor`"),
    ],
)
def test_a_failed_connect_is_explained(error: OSError, system: str, said: str) -> None:
    explained = explain_connect_error(error, "192.168.1.10", 29400, EN0, system)
    assert isinstance(explained, PeerUnreachable)
    assert str(explained).startswith(f"cannot reach 192.168.1.10:29400 from 192.168.1.23 (en0): {said}")


def test_macoss_privacy_is_no_cause_beyond_the_local_network() -> None:
    explained = explain_connect_error(OSError(65, "No route to host"), "203.0.113.10", 29400, EN0, "Darwin")
    assert str(explained) == (
        "cannot reach 203.0.113.10:29400 from 192.168.1.23 (en0): no route to host (EHOSTUNREACH): "
        "check that the machine is on, and on the network that this NIC is on"
    )


def test_a_real_refusal_names_the_way_it_went() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError) as caught:
        socket.create_connection((LOOPBACK, port), timeout=5)
    explained = explain_connect_error(caught.value, LOOPBACK, port)
    name = interface_of(LOOPBACK).name
    assert str(explained).startswith(
        f"cannot reach {LOOPBACK}:{port} from {LOOPBACK} ({name}): connection refused (ECONNREFUSED): "
    )


class TestHostName:
    def test_that_leads_back_to_loopback_is_a_trap(self) -> None:
        caution = hostname_caution("box", lambda name: ["127.0.1.1"])
        assert caution is not None
        assert caution.problem == "this machine's name box resolves to 127.0.1.1"

    def test_that_leads_to_the_lan_or_nowhere_is_none(self) -> None:
        assert hostname_caution("box", lambda name: ["192.168.1.10"]) is None
        assert hostname_caution("no-such-host.invalid") is None

    def test_whose_look_up_hangs_is_given_up_on(self) -> None:
        release = threading.Event()

        def hang(name: str) -> list[str]:
            release.wait(60)
            return []

        caution = hostname_caution("box", hang, timeout=0.05)
        release.set()
        assert caution is not None
        assert "takes over" in caution.problem
