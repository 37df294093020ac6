"""The built wheel is all that a machine needs: in an empty environment, in an empty folder, it can `up`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import write_script
from two_hosts import clean_environment

from hetdeploy.nodes.containers import Images

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hetdeploy command of an environment that has the wheel and what it asks for, and no torch."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=120)
    wheel = next(folder.glob("*.whl"))
    target = ("--python", str(folder / "venv" / "bin" / "python"))
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([*pip, *target, "install", "-c", constraints, str(wheel)], check=True, timeout=600)
    return folder / "venv" / "bin" / "hetdeploy"


def call(command: Path, *arguments: str, cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        [str(command), *arguments], cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def test_ups_in_an_empty_folder(installed: Path, images: Images, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\ntime.sleep(600)\n")
    code, text = call(installed, "up", "--detach", "--nic", "lo", script.name, cwd=tmp_path)
    try:
        assert code == 0, text
        assert "hetdeploy join hd1-" in text
        # The wheel carries the very files that a checkout builds its images from.
        assert f"found {images.rank}" in text
    finally:
        assert call(installed, "down", cwd=tmp_path)[0] == 0


def test_says_what_a_joiner_lacks(installed: Path, tmp_path: Path) -> None:
    code, text = call(installed, "join", "-", cwd=tmp_path)
    assert code == 2, text
    code, text = call(installed, "doctor", "--as-joiner", cwd=tmp_path)
    assert code == 3
    assert "torch" in text
    assert "pip install" in text
