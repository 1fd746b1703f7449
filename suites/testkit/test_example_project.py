"""The example project runs as it stands, and as a copy elsewhere."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import afd_testkit.library

pytestmark = pytest.mark.cpu

PROJECT = Path(__file__).parents[1] / "example_project"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_copy_elsewhere_passes(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    ignored = shutil.ignore_patterns("__pycache__", "conftest.py")
    shutil.copytree(PROJECT, copy, ignore=ignored)
    ran = run(copy)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed" in ran.stdout


def test_in_its_place_it_is_found_by_itself_and_not_by_the_suites() -> None:
    own = run(PROJECT, "--collect-only")
    assert "5 tests collected" in own.stdout, own.stdout + own.stderr
    ours = run(PROJECT.parents[1], "--collect-only", "suites/example_project", "suites/npu")
    assert "test_scaled_add" not in ours.stdout
    assert "test_routing_ids" in ours.stdout, ours.stdout + ours.stderr


def test_it_uses_public_names_only() -> None:
    used = [
        (node.module, name.name)
        for path in PROJECT.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("afd_")
        for name in node.names
    ]
    assert {module for module, _ in used} == {
        "afd_plugin.ops",
        "afd_plugin.routing",
        "afd_testkit.library",
    }
    assert not [name for _, name in used if name.startswith("_")]
    testkit = {name for module, name in used if module == "afd_testkit.library"}
    assert testkit <= set(afd_testkit.library.__all__)
