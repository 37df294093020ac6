"""The job's files: what is taken along, and what a machine accepts."""

import hashlib
from pathlib import Path

import pytest

from hetdeploy.errors import UsageError
from hetdeploy.nodes import bundle
from hetdeploy.nodes.bundle import Bundle, collect, unpack


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")


def test_takes_what_lies_beside_the_script_and_nothing_that_can_be_made_again(tmp_path: Path) -> None:
    job = tmp_path / "job with spaces"
    make(
        job,
        "train.py",
        "pkg/model.py",
        "pkg/__pycache__/model.pyc",
        ".git/config",
        ".env",
        "runs/1/log",
        "my/pyvenv.cfg",
    )
    make(job, "my/pyvenv.cfg", "my/lib/torch.py")
    found = collect(job / "train.py", tmp_path / "blobs")
    assert [file.path for file in found.files] == ["pkg/model.py", "train.py"]


def test_another_machine_gets_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "job", "train.py", "pkg/data.txt")
    (tmp_path / "job" / "train.py").chmod(0o755)
    found = collect(tmp_path / "job" / "train.py", tmp_path / "blobs")
    received = Bundle.from_json(found.to_json())

    def fetch(digest: str, size: int, destination: Path) -> None:
        content = (tmp_path / "blobs" / digest).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
        destination.write_bytes(content)

    unpack(received, tmp_path / "there", fetch)
    assert (tmp_path / "there" / "pkg" / "data.txt").read_text() == "content of pkg/data.txt\n"
    assert (tmp_path / "there" / "train.py").stat().st_mode & 0o111
    assert received.digest == found.digest


def test_the_digest_tells_contents_and_modes_apart(tmp_path: Path) -> None:
    make(tmp_path, "train.py")
    first = collect(tmp_path / "train.py", tmp_path / ".blobs").digest
    (tmp_path / "train.py").chmod(0o755)
    second = collect(tmp_path / "train.py", tmp_path / ".blobs").digest
    (tmp_path / "train.py").write_text("other\n")
    assert len({first, second, collect(tmp_path / "train.py", tmp_path / ".blobs").digest}) == 3


@pytest.mark.parametrize("path", ["/etc/passwd", "../up.py", "a/../../b", "", "a\\..\\b"])
def test_refuses_paths_that_leave_the_folder(path: str) -> None:
    with pytest.raises(UsageError, match="leaves the job's folder"):
        Bundle.from_json([{"path": path, "sha256": "0" * 64, "size": 1}])


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no script .*train.py"):
        collect(tmp_path / "train.py", tmp_path / "blobs")


def test_data_beside_the_script_is_refused_before_it_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BUNDLE_BYTES", 2**20)
    make(tmp_path, "train.py")
    (tmp_path / "data.bin").write_bytes(bytes(2**20))
    with pytest.raises(UsageError, match=r"more than 1 MiB .*HETDEPLOY_DATA_DIR"):
        collect(tmp_path / "train.py", tmp_path / ".blobs")
