"""What the README tells a stranger to type works, in a clone that has nothing but the files in version control."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from two_hosts import clean_environment

from hetdeploy.cli import cli

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_the_quickstart_trains_on_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    # What is about to be committed counts, not what was.
    for name in subprocess.run(["git", "ls-files", "-m"], cwd=ROOT, capture_output=True, text=True).stdout.split():
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, clone / name)
    done = subprocess.run(
        ["./scripts/quickstart", "--steps", "10"],
        cwd=clone,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the head runs in containers" in done.stderr
    assert "2 ranks on 2 nodes finished" in done.stderr
    losses = re.findall(r"rank (\d): loss (\d\.\d+) -> (\d\.\d+)", done.stdout)
    assert [rank for rank, _, _ in losses] == ["0", "1"]
    assert all(float(last) < float(first) for _, first, last in losses)


def test_every_verb_of_the_readme_exists() -> None:
    named = {word for word in re.findall(r"hetdeploy ([a-z]+)", README) if word not in ("is",)}
    known = set(cli.list_commands(None))  # type: ignore[arg-type]
    assert named <= known, named - known
    assert known - {"demo"} <= named, "a verb that the README does not mention"


def test_every_script_and_page_of_the_readme_exists() -> None:
    for name in re.findall(r"\./(scripts/\w+)", README) + re.findall(r"\]\(([\w./-]+)[)#]", README):
        assert (ROOT / name).exists(), name
