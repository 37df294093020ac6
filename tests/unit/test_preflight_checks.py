"""What each check says of recorded machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetdeploy.errors import PreflightError
from hetdeploy.network.host import Caution
from hetdeploy.preflight.docker import (
    ComposePlugin,
    DiskRoom,
    DockerCommand,
    EngineAnswers,
    ExportedApiVersion,
    RootlessEngine,
)
from hetdeploy.preflight.facts import DockerFacts, Facts, NvidiaFacts
from hetdeploy.preflight.head import CHECKS
from hetdeploy.preflight.machine import Firewall, FreePort, Network, PythonVersion, TorchVersion, Wsl
from hetdeploy.preflight.report import ONLY_FOR_DOCTOR, Check, Result, run_all

INFO: dict[str, Any] = {
    "ServerVersion": "20.10.24+dfsg1",
    "ApiVersion": "1.41",
    "Endpoint": "unix:///var/run/docker.sock (the default)",
    "DockerRootDir": "/var/lib/docker",
    "SecurityOptions": ["name=seccomp,profile=default"],
    "Runtimes": {"io.containerd.runc.v2": {"path": "runc"}, "runc": {"path": "runc"}},
}
ROOTLESS = {**INFO, "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"]}

DOCKER = DockerFacts(command="/usr/bin/docker", compose="2.26.1-4", info=INFO)
READY = Facts(
    accelerator="cpu",
    link="tunnel",
    torch_version="2.13.0",
    torch_index="https://download.pytorch.org/whl/cpu",
    address="192.168.1.10",
    port=29400,
    docker=DOCKER,
    subnet="192.168.1.0/24",
    kernel="6.8.0-45-generic",
    python=(3, 12),
    torch="2.13.0",
)


def run(check: Check, facts: Facts) -> Result:
    result = check.run(facts)
    assert result is not None
    return result


def docker(**changes: Any) -> Facts:
    return replace(READY, docker=replace(DOCKER, **changes))


def test_a_machine_that_is_ready_passes_every_check_that_applies() -> None:
    report = run_all(CHECKS, READY)
    assert report.warnings == []
    assert report.summary == "8 checks passed"
    report.raise_failures()


def test_all_failures_are_reported_together_and_none_stops_the_others() -> None:
    facts = replace(
        docker(command=None, compose=None, problem=PreflightError("no Docker engine answers", "start it"), info={}),
        port_problems=(PreflightError("port 29400 is taken by nginx (process 7)", "end it"),),
        python=(3, 9),
    )
    report = run_all(CHECKS, facts)
    assert [failure.name for failure in report.failures] == ["docker-command", "docker-engine", "port", "python"]
    with pytest.raises(PreflightError) as caught:
        report.raise_failures()
    assert str(caught.value).startswith("this machine is not ready, 4 checks failed\n  docker-command")
    assert "port 29400 is taken by nginx (process 7): end it" in str(caught.value)
    assert report.summary == "2 of 6 checks passed"


def test_a_single_failure_is_the_error_itself() -> None:
    report = run_all(CHECKS, docker(compose=None))
    with pytest.raises(PreflightError) as caught:
        report.raise_failures()
    assert caught.value.problem == "`docker compose` does not work here"
    assert "docker-compose-v2" in str(caught.value.fix)


def test_a_check_can_be_ignored_by_name() -> None:
    run_all(CHECKS, docker(compose=None), ignore=["docker-compose"]).raise_failures()


def test_names_of_checks_are_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


def test_a_native_head_is_not_asked_for_docker() -> None:
    names = {result.name for result in run_all(CHECKS, replace(READY, docker=None)).results}
    assert names == {"port", "network", "hostname", "python", "torch"}


@pytest.mark.parametrize(
    ("version", "status"), [("2.26.1-4", "ok"), ("2.24.0", "ok"), ("2.23.3", "failure"), ("5.0.1", "ok")]
)
def test_compose_has_to_be_recent(version: str, status: str) -> None:
    assert run(ComposePlugin(), docker(compose=version)).status == status


def test_the_docker_command_is_asked_for_before_its_plugin() -> None:
    facts = docker(command=None, compose=None)
    assert run(DockerCommand(), facts).status == "failure"
    assert ComposePlugin().run(facts) is None


def test_an_engine_that_does_not_answer_is_reported_in_its_own_words() -> None:
    result = run(EngineAnswers(), docker(problem=PreflightError("this user may not", "usermod"), info={}))
    assert (result.status, result.text, result.fix) == ("failure", "this user may not", "usermod")


def test_a_rootless_engine_cannot_do_direct_mode() -> None:
    assert RootlessEngine().run(READY) is None
    assert run(RootlessEngine(), docker(info=ROOTLESS)).status == "ok"
    result = run(RootlessEngine(), replace(docker(info=ROOTLESS), link="direct"))
    assert result.status == "failure"
    assert "HETDEPLOY_LINK=tunnel" in str(result.fix)


def test_a_rootless_engine_needs_the_gpu_without_cgroups() -> None:
    facts = replace(docker(info=ROOTLESS), accelerator="cuda", nvidia=NvidiaFacts("", 0))
    result = run(RootlessEngine(), facts)
    assert result.status == "failure"
    assert "nvidia-container-cli.no-cgroups" in str(result.fix)
    allowed = replace(facts, nvidia=NvidiaFacts("", 0, no_cgroups=True))
    assert run(RootlessEngine(), allowed).status == "ok"


def test_an_exported_api_version_is_a_warning() -> None:
    assert ExportedApiVersion().run(READY) is None
    result = run(ExportedApiVersion(), replace(READY, docker_api_version="1.52"))
    assert (result.status, result.fix) == ("warning", "`unset DOCKER_API_VERSION`")


def test_a_full_disk_is_a_warning_as_the_image_may_be_there() -> None:
    assert run(DiskRoom(), docker(shortage="/var/lib/docker has 0.4 GB free")).status == "warning"


def test_a_taken_port_names_its_holder() -> None:
    taken = PreflightError("port 29400 of 192.168.1.10 is taken by python3 (process 71)", "set HETDEPLOY_PORT")
    result = run(FreePort(), replace(READY, port_problems=(taken,)))
    assert str(result) == "port 29400 of 192.168.1.10 is taken by python3 (process 71): set HETDEPLOY_PORT"


def test_every_caution_of_the_network_is_told() -> None:
    facts = replace(READY, cautions=(Caution("wlan0 is Wi-Fi", "use a cable"), Caution("box is 127.0.1.1", "mend it")))
    result = run(Network(), facts)
    assert result.status == "warning"
    for part in ("wlan0 is Wi-Fi", "use a cable", "box is 127.0.1.1", "mend it"):
        assert part in str(result)


@pytest.mark.parametrize(("mode", "status"), [("nat", "warning"), (None, "warning"), ("mirrored", "ok")])
def test_wsl_is_reached_with_mirrored_networking_only(mode: str | None, status: str) -> None:
    wsl = replace(READY, kernel="5.15.153.1-microsoft-standard-WSL2", wsl_mode=mode)
    assert run(Wsl(), wsl).status == status
    assert Wsl().run(READY) is None


def test_ufw_rules_are_as_narrow_as_they_can_be() -> None:
    assert Firewall().run(READY) is None
    container = replace(READY, is_ufw_on=True)
    assert run(Firewall(), container).status == "ok"
    native = replace(container, docker=None)
    rule = "`sudo ufw allow proto tcp from 192.168.1.0/24 to 192.168.1.10 port 29400`"
    assert run(Firewall(), native) == Result(
        "firewall", "warning", "ufw is on and may close port 29400 to joiners", rule
    )
    direct = run(Firewall(), replace(container, link="direct"))
    assert direct.fix == "`sudo ufw allow proto tcp from 192.168.1.0/24 to 192.168.1.10`"


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9), "failure"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "failure")]
)
def test_python_has_to_be_one_that_is_tested(version: tuple[int, int], status: str) -> None:
    assert run(PythonVersion(), replace(READY, python=version)).status == status


@pytest.mark.parametrize(
    ("torch", "status"),
    [("2.13.0", "ok"), ("2.13.1+cpu", "ok"), ("2.12.0", "failure"), ("2.130.0", "failure"), (None, "failure")],
)
def test_a_native_rank_needs_torch_of_the_right_line(torch: str | None, status: str) -> None:
    result = run(TorchVersion(), replace(READY, docker=None, torch=torch))
    assert result.status == status
    if status == "failure":
        assert result.fix == "`pip install torch==2.13.0`"
    assert TorchVersion().run(replace(READY, torch=torch)) is None


def test_a_name_that_leads_elsewhere_is_for_the_doctor_alone() -> None:
    facts = replace(READY, hostname=Caution("box is 127.0.1.1", "mend it"))
    assert run_all(CHECKS, facts).warnings == ["box is 127.0.1.1: mend it"]
    assert run_all(CHECKS, facts, ignore=ONLY_FOR_DOCTOR).warnings == []
