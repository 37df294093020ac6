"""Imports run one way, and the command line stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hetdeploy

PACKAGE = Path(hetdeploy.__file__).parent
LAYERS = ["cli", "nodes", "preflight", "gloo", "link", "network", "settings", "envfile", "plot", "files", "errors"]
"""From the top down: a module imports from its own layer and from those below it."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names if node.module == "hetdeploy"),
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("hetdeploy.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports_of(path):
        theirs = layer_of(name)
        if own == "train" or theirs == "train":
            assert own == theirs, f"{path} imports {name}: the training library knows nothing of the rest"
        elif own in LAYERS and theirs in LAYERS:
            assert LAYERS.index(own) <= LAYERS.index(theirs), f"{path} imports {name}, which is above it"


def test_help_imports_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys; from hetdeploy.cli import _run; code = _run(['--help']);"
        "heavy = {'torch', 'docker', 'cryptography', 'psutil', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "join" in done.stdout
