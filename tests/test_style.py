"""The house rules that a machine can check: lint, format, types, exports, module openings, directions."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import reshard_cli

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "reshard_cli"
FOLDERS = ["spec", "layout", "plan", "weights", "transport", "refit", "report", "cli"]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "reshard_cli.")
    if module.name != "reshard_cli.__main__"
)
FILES = sorted(path for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["lint", "format", "types"],
)
def test_the_tree_passes(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_exported(name):
    module = importlib.import_module(name)
    public = {
        node.name
        for node in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    }
    exported = set(getattr(module, "__all__", []))
    if name.endswith("cli.main"):  # its commands belong to the app
        public = {"app", "main"}
    assert all(hasattr(module, one) for one in exported)
    assert public <= exported, f"not in __all__: {public - exported}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_opens_with_what_it_does_and_is_short(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert len(text.splitlines()) <= 500
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 100, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_imports_only_from_those_above_it(path):
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return
    allowed = FOLDERS[: FOLDERS.index(parts[0]) + 1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reshard_cli."):
            folder = str(node.module).split(".")[1]
            assert folder in [*allowed, "errors"], f"{path}: imports {node.module}"


def test_the_readme_and_ci_give_the_same_test_command():
    command = "pip install -e '.[test]' && pytest -n 2"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_package_has_a_version():
    assert reshard_cli.__version__.count(".") == 2
