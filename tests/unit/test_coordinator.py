"""Who is let in, whose end is the job's, and what each node is told, in a fixed world and in a crew.

Members are real ones, over the link; they say what ranks would have them say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sample_job import sample_job

from hetdeploy import __version__
from hetdeploy.errors import HetdeployError, PeerUnreachable, UsageError
from hetdeploy.link.client import LinkClient
from hetdeploy.link.credentials import Credentials
from hetdeploy.link.server import LinkServer
from hetdeploy.nodes import coordinator
from hetdeploy.nodes.coordinator import PROTOCOL, Coordinator
from hetdeploy.nodes.job import RunFolder
from hetdeploy.nodes.journal import JournalReader

WAIT_SECONDS = 10.0
LONG, SHORT = 600.0, 0.1


class Run:
    """A job that is served, and whoever joins it."""

    def __init__(self, folder: Path, stack: ExitStack, **job: Any) -> None:
        self.run = RunFolder(folder, "j1")
        self.run.path.mkdir(parents=True)
        self._credentials = Credentials.create(folder / "link", ttl_seconds=0)
        self.coordinator = Coordinator(sample_job(**job), self.run, folder, store=("127.0.0.1", 1))
        self._server = LinkServer(folder / "link", ("127.0.0.1", 0), self.coordinator)
        self._server.start()
        self._stack = stack
        stack.callback(self.coordinator.close)
        stack.callback(self._server.close)

    def join(self, name: str, nproc: int = 1) -> LinkClient:
        role = "head" if name == "head" else "joiner"
        about = {"protocol": PROTOCOL, "name": name, "hetdeploy": __version__, "torch": "2.13.0", "nproc": nproc}
        invitation = self._credentials.invitation(role, "127.0.0.1", self._server.port)
        client = LinkClient.connect(invitation, role, about)
        self._stack.callback(client.close)
        return client

    def states(self) -> dict[str, str]:
        """Of the nodes, by name, as `hetdeploy status` has them."""
        return {node["name"]: node["state"] for node in json.loads(self.run.status.read_text())["nodes"]}

    def events(self) -> list[str]:
        return [event["event"] for event in JournalReader(self.run.journal).new_events()]


@contextmanager
def served(folder: Path, **job: Any) -> Iterator[Run]:
    with ExitStack() as stack:
        run = Run(folder, stack, **job)
        yield run
        run.coordinator.stop("the test is over")  # its thread ends with the job
        assert run.coordinator.over.wait(WAIT_SECONDS)


@pytest.fixture(autouse=True)
def stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that are told to stop are not waited for."""
    monkeypatch.setattr(coordinator, "STOP_SECONDS", SHORT)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have all the time of a test to report."""
    monkeypatch.setattr(coordinator, "REPORT_SECONDS", LONG)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have no time to report."""
    monkeypatch.setattr(coordinator, "REPORT_SECONDS", SHORT)


def exits(client: LinkClient, code: int) -> None:
    failures = [{"rank": 0, "code": code}] if code else []
    client.send({"type": "exit", "code": min(code, 1), "failures": failures, "error": None, "problems": []})


def told(client: LinkClient) -> tuple[str, int | None, str]:
    """The next message: its type, the exit code in it and the summary or reason."""
    message = client.receive(WAIT_SECONDS)
    assert message is not None, "nothing was said"
    return message["type"], message.get("exit_code"), message.get("summary") or message["reason"]


class TestFixedWorld:
    @pytest.mark.usefixtures("hasty")
    def test_a_joiner_that_fails_ends_thesample_job(self, tmp_path: Path) -> None:
        with served(tmp_path) as run:
            head, mac = run.join("head"), run.join("mac")
            exits(mac, 3)
            text = "rank 0 on mac exited with code 3"
            assert told(head) == ("stop", None, text)
            assert told(head) == told(mac) == ("outcome", 3, f"failed first: {text}")

    @pytest.mark.usefixtures("patient")
    def test_all_have_to_finish(self, tmp_path: Path) -> None:
        with served(tmp_path) as run:
            head, mac = run.join("head"), run.join("mac")
            exits(head, 0)
            assert head.receive(SHORT) is None
            exits(mac, 0)
            assert told(head) == told(mac) == ("outcome", 0, "2 ranks on 2 nodes finished")

    def test_it_has_so_many_places(self, tmp_path: Path) -> None:
        with served(tmp_path) as run:
            run.join("mac")
            with pytest.raises(HetdeployError, match=r"has its 2 nodes already \(mac\)$") as caught:
                run.join("studio")
            assert caught.value.exit_code == 1
            run.join("head")  # whose place is kept for it


class TestCrew:
    @pytest.mark.usefixtures("hasty")
    def test_a_joiner_that_fails_is_told_and_the_job_goes_on(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            head, mac = run.join("head"), run.join("mac")
            exits(mac, 3)
            assert told(mac) == ("outcome", 3, "rank 0 on mac exited with code 3; the job goes on without it")
            assert "parted" in run.events()
            again = run.join("mac")
            assert again.welcome["name"] == "mac-2"
            exits(again, 0)
            assert told(again) == ("outcome", 0, "mac-2 finished; the job goes on without it")
            exits(head, 0)
            assert told(head) == ("outcome", 0, "the head finished, 2 joined on the way")
            assert mac.receive(SHORT) is None

    @pytest.mark.usefixtures("patient")
    def test_who_leaves_is_told_at_once(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            run.join("head")
            mac = run.join("mac")
            mac.send({"type": "leave", "reason": "interrupted", "code": 130})
            assert told(mac) == ("outcome", 130, "mac left: interrupted; the job goes on without it")

    @pytest.mark.usefixtures("patient")
    def test_a_joiner_that_fails_of_the_heads_end_hears_of_that(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            head, mac = run.join("head"), run.join("mac")
            exits(mac, 1)
            assert mac.receive(SHORT) is None
            exits(head, 5)
            assert told(head) == told(mac) == ("outcome", 5, "failed first: rank 0 on head exited with code 5")

    @pytest.mark.usefixtures("hasty")
    @pytest.mark.parametrize(
        ("code", "text"), [(0, "the head finished, 1 joined on the way"), (5, "rank 0 on head exited with code 5")]
    )
    def test_the_heads_end_is_the_jobs(self, code: int, text: str, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            head, mac = run.join("head"), run.join("mac")
            exits(head, code)
            assert told(mac) == ("stop", None, text)
            assert told(head) == told(mac) == ("outcome", code, f"failed first: {text}" if code else text)

    @pytest.mark.usefixtures("patient")
    def test_an_interrupt_after_the_heads_end_changes_nothing(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            head, mac = run.join("head"), run.join("mac")
            exits(head, 0)
            while run.states().get("head") != "finished":
                assert mac.receive(SHORT) is None
            run.coordinator.stop("stopped at the head")
            assert told(mac)[0] == "stop"
            assert told(mac) == ("outcome", 0, "the head finished, 1 joined on the way")

    @pytest.mark.usefixtures("hasty")
    def test_a_head_that_is_lost_ends_thesample_job(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            head, mac = run.join("head"), run.join("mac")
            head.close()
            assert told(mac)[0] == "stop"
            kind, code, text = told(mac)
            assert (kind, code) == ("outcome", 4)
            assert text.startswith("failed first: head is gone")

    def test_a_joiner_may_be_there_before_the_head_and_leave(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run:
            mac = run.join("mac")
            mac.send({"type": "leave", "reason": "interrupted", "code": 130})
            assert told(mac)[1] == 130
            exits(run.join("head"), 0)
            assert run.coordinator.over.wait(WAIT_SECONDS)

    @pytest.mark.usefixtures("hasty")
    def test_a_place_is_worth_waiting_for(self, tmp_path: Path) -> None:
        """PeerUnreachable is what `join` tries again after."""
        with served(tmp_path, crew=True) as run:
            run.join("head")
            mac = run.join("mac")
            with pytest.raises(PeerUnreachable, match=r"\(head, mac\); `hetdeploy up --nodes 3` would take one more"):
                run.join("studio")
            mac.send({"type": "leave", "reason": "interrupted", "code": 130})
            assert told(mac)[1] == 130
            run.join("studio")

    def test_without_places_for_joiners_there_is_nothing_to_wait_for(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True, nodes="1") as run, pytest.raises(HetdeployError) as caught:
            run.join("mac")
        assert caught.value.exit_code == 1

    def test_two_ranks_on_a_joiner_are_refused(self, tmp_path: Path) -> None:
        with served(tmp_path, crew=True) as run, pytest.raises(UsageError, match="join with --nproc-per-node 1"):
            run.join("mac", nproc=2)

    @pytest.mark.parametrize(("nodes", "most"), [("2", 2), ("3", 3), ("2:4", 4)])
    def test_it_waits_for_nobody(self, nodes: str, most: int) -> None:
        job = sample_job(crew=True, nodes=nodes)
        assert (job.min_nodes, job.max_nodes) == (1, most)
