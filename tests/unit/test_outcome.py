"""Which failure is shown first, and what it is said to mean."""

import json
import signal

from hetdeploy.nodes.outcome import Failure, Outcome, decide, describe_exit, explain, shell_code

PEER_CLOSED = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.0.0.2]:4242"
)


def failure(node: str, rank: int | None, code: int, time: float, *lines: str, text: str | None = None) -> Failure:
    return Failure(node, rank, code, text or describe_exit(node, rank or 0, code), time, lines)


def test_a_lost_connection_is_never_the_cause() -> None:
    survivor = failure("head", 0, 1, 10.0, "Traceback", PEER_CLOSED)
    culprit = failure("mac", 1, 3, 11.0, "Traceback", "ValueError: no such file: data.bin")
    outcome = decide([survivor, culprit], "fine")
    assert outcome.failures == (culprit, survivor)
    assert outcome.exit_code == 3
    assert outcome.summary == "failed first: rank 1 on mac exited with code 3"
    assert outcome.report() == [
        "failed first: rank 1 on mac exited with code 3",
        "    Traceback",
        "    ValueError: no such file: data.bin",
        "  then rank 0 on head exited with code 1",
    ]


def test_among_causes_the_earliest_is_first() -> None:
    early, late = failure("a", 0, 1, 1.0, "KeyError: 'x'"), failure("b", 1, 2, 2.0, "KeyError: 'y'")
    assert decide([late, early], "").failures == (early, late)


def test_a_rank_that_was_told_to_end_is_a_consequence() -> None:
    told = failure("head", 0, -signal.SIGTERM, 1.0)
    gone = failure("mac", None, 4, 2.0, text="mac is gone: no heartbeat for 10 s")
    assert decide([told, gone], "").failures[0] == gone


def test_no_failure_is_success() -> None:
    assert decide([], "2 ranks on 2 nodes finished") == Outcome(0, "2 ranks on 2 nodes finished")


def test_outcomes_survive_json() -> None:
    outcome = decide([failure("mac", 1, -signal.SIGABRT, 1.0, "last line")], "")
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_signals_are_named_and_mapped_as_a_shell_does() -> None:
    assert describe_exit("mac", 1, -signal.SIGKILL) == "rank 1 on mac was ended by SIGKILL"
    assert shell_code(-signal.SIGKILL) == 137
    assert shell_code(3) == 3


def test_known_messages_are_explained() -> None:
    mismatch = failure("head", 0, -signal.SIGABRT, 0.0, "Received data size doesn't match expected size. Is there ...")
    assert explain(mismatch) == "two ranks called a collective with tensors of different size or dtype"
    assert "gloo" in str(explain(failure("head", 0, -signal.SIGABRT, 0.0, "nothing known")))
    assert explain(failure("head", 0, 1, 0.0, "ValueError")) is None
