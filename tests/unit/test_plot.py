"""`hetdeploy plot`: what it draws, and what it says when it cannot."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hetdeploy import plot
from hetdeploy.cli import _run
from hetdeploy.errors import UsageError

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_metrics(folder: Path, rank: int = 0, steps: int = 5, *, of: int = 1) -> Path:
    """As rank ``rank`` of ``of`` ranks alike would."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"metrics-rank{rank}.jsonl"
    file.write_text("".join(line(step, rank, of) for step in range(steps)))
    return file


def line(step: int, rank: int = 0, of: int = 1, loss: float = 2.0) -> str:
    times = {"compute_s": 0.2, "copy_s": 0.0, "exchange_exposed_s": 0.1, "exchange_hidden_s": 0.1, "idle_s": 0.1}
    counts = {"samples": 4, "global_samples": 4 * of, "bytes_sent": 10}
    return (
        json.dumps({"time": 1.0, "rank": rank, "step": step, "loss": loss, "algorithm": "x", **times, **counts}) + "\n"
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = _run(["plot", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def height(picture: Path) -> int:
    content = picture.read_bytes()
    assert content.startswith(SIGNATURE)
    return int(struct.unpack(">I", content[20:24])[0])


def test_the_latest_run_is_drawn_with_a_panel_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, latest = (tmp_path / ".hetdeploy" / "runs" / name for name in ("20260101-1", "20260102-1"))
    write_metrics(older / "head" / "metrics")
    for rank in range(3):
        write_metrics(latest / f"node{rank}" / "metrics", rank, of=3)
    assert call(capsys) == (0, f"{latest}/run.png\n")
    assert call(capsys, older.name, "-o", "older.png") == (0, "older.png\n")
    assert height(latest / "run.png") > height(tmp_path / "older.png")
    assert [(rank.rank, rank.node) for rank in plot.read(latest)] == [(0, "node0"), (1, "node1"), (2, "node2")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 10, 10_000])
def test_runs_of_any_size_have_a_picture_of_one_size(tmp_path: Path, ranks: int, steps: int) -> None:
    for rank in range(ranks):
        write_metrics(tmp_path, rank, steps, of=ranks)
    plot.draw(tmp_path, tmp_path / "run.png")
    assert height(tmp_path / "run.png") == {1: 748, 2: 748, 4: 1122}[ranks]


def test_ranks_of_other_machines_and_shares_computed_twice_can_be_drawn(tmp_path: Path) -> None:
    write_metrics(tmp_path / "elsewhere", 0, of=2)
    plot.draw(tmp_path / "elsewhere", tmp_path / "elsewhere.png")
    for rank in range(2):
        write_metrics(tmp_path / "twice", rank, of=1)
    plot.draw(tmp_path / "twice", tmp_path / "twice.png")


def test_a_step_that_was_repeated_counts_once_and_an_unfinished_line_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "metrics-rank0.jsonl").write_text(line(0) + line(1) + line(1, loss=1.5) + line(2)[:-9])
    (rank,) = plot.read(tmp_path)
    assert rank.column("step") == [0, 1]
    assert rank.column("loss") == [2.0, 1.5]


def test_without_a_run_the_next_command_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = call(capsys)
    assert code == 2
    assert text.startswith(
        f"error: there is no run in {tmp_path}/.hetdeploy/runs: start one with `hetdeploy up SCRIPT`"
    )
    code, text = call(capsys, "nowhere")
    assert code == 2
    assert "there is no run nowhere in" in text


def test_a_run_without_metrics_says_where_they_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    code, text = call(capsys, "empty")
    assert code == 2
    assert text == (
        "error: there are no metrics-rank*.jsonl in empty: a script writes them with hetdeploy.train.Metrics\n"
    )
    write_metrics(tmp_path / "early", steps=0)
    code, text = call(capsys, "early")
    assert code == 2
    assert "there is no step in the metrics in early yet" in text


@pytest.mark.parametrize("damage", ["not json\n", "[1]\n", '{"step": 1}\n', line(1).replace("2.0", '"much"'), "\n"])
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "metrics-rank0.jsonl"
    file.write_text(line(0) + damage + line(2))
    with pytest.raises(UsageError, match=r"metrics-rank0\.jsonl:2 is damaged"):
        plot.read(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics-rank0.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match=r"metrics-rank0\.jsonl is damaged"):
        plot.read(tmp_path)


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path)
    assert call(capsys, str(tmp_path), "-o", "no/such/folder.png") == (
        2,
        "error: cannot write no/such/folder.png (No such file or directory): name another file with -o\n",
    )


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    write_metrics(tmp_path)
    assert call(capsys, str(tmp_path)) == (
        3,
        "error: drawing needs matplotlib: pip install 'hetdeploy[metrics]'\n",
    )


def test_a_head_needs_no_torch_to_draw(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    code = f"""
import sys; sys.modules["torch"] = None
from hetdeploy.cli import _run
sys.exit(_run(["plot", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert height(tmp_path / "run.png") > 0
