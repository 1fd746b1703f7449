"""vLLM-Ascend's own unit tests, under their own mocks and under the emulated NPU.

    python suites/strangers/run_vllm_ascend_ut.py CHECKOUT [--own-mocks-only | --emulated-only]

CHECKOUT is a source tree of vLLM-Ascend at tag v0.23.0, which nothing here writes to; run it
with the interpreter of an environment that has vllm-ascend 0.23.0.post1 and vLLM 0.23.0.

Selection: all of ``tests/ut``, the same in both columns, in three pytest runs each.  Their CI
gives the folders named after a device (``a2``, ``a3_2``, ``310p``, …) to other machines than the
rest, and so does this; files that spoil the process for every other test run alone (``ALONE``).
Both columns get the same stand-ins for what this host lacks: model configurations from
``models/`` as a hub cache (their CI downloads them), and torchvision's names from ``standins/``.
``--large-models`` adds those of ``models_large/``, whose tests fail without their configuration
in both columns: Qwen3-8B (41 tests, about half a minute of CPU time) and DeepSeek-V2 (11 tests,
several minutes and 13 GB of memory for random weights).

Exit status: 0; 1 where a test that passes under its own mocks does not pass under the emulation
and ``ledger.toml`` has no entry that says why, where an entry is stale, or where fewer tests pass
than the ledger asks for; 2 for what cannot be run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outcomes import PASSED, LedgerError, count, lost, read_ledger, read_outcomes, read_seconds
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
LEDGER = HERE / "ledger.toml"
OWN, EMULATED = "own mocks", "emulated"
VERSION = "0.23.0"
TESTS = Path("tests/ut")
# As in their tests/ut/conftest.py and .github/workflows/scripts/test_config.yaml.
DEVICE_FOLDER = re.compile(r"a\d+(_\d+)?|310p")
#: Files that change the process for good when they are collected, and how.
ALONE = {
    "tests/ut/kv_offload/test_mooncake_layerwise_connector.py": "puts a mock in torch.npu's place",
}
LONGEST = 2 * 3600  # seconds for one pytest run
_REVISION = "0" * 40


class CannotRun(Exception):
    """The tests cannot be run here."""


@dataclass(frozen=True)
class Batch:
    """One pytest run: its ``name``, and what pytest is told to collect."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """What one way of running gave.

    ``seconds``: of each test; ``wall``, ``cpu``: of the whole, on the clock and of all processes.
    """

    outcomes: dict[str, dict[str, str]]
    seconds: dict[str, float]
    wall: float
    cpu: float

    @property
    def all(self) -> dict[str, str]:
        """By test, over all batches."""
        return {name: got for batch in self.outcomes.values() for name, got in batch.items()}


def batches(checkout: Path) -> list[Batch]:
    """The runs of ``tests/ut``; together they are all of it."""
    folders = sorted(
        str(path.relative_to(checkout))
        for path in (checkout / TESTS).rglob("*")
        if path.is_dir() and DEVICE_FOLDER.fullmatch(path.name)
    )
    ignored = tuple(f"--ignore={place}" for place in (*folders, *ALONE))
    return [
        Batch("host", (str(TESTS), *ignored)),
        Batch("alone", tuple(ALONE)),
        Batch("device", tuple(folders)),
    ]


def hub_cache(folder: Path, sources: Sequence[str]) -> Path:
    """The model configurations in the folders ``sources`` as Hugging Face's cache keeps them."""
    configs = [config for source in sources for config in sorted((HERE / source).glob("*/*.json"))]
    for config in configs:
        home = folder / f"models--{config.parent.name}--{config.stem}"
        snapshot = home / "snapshots" / _REVISION
        snapshot.mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(_REVISION)
        (snapshot / "config.json").write_text(config.read_text())
    return folder


def environment(scratch: Path, workers: int, models: Sequence[str]) -> dict[str, str]:
    """What both columns run in: no network, and no path that shows the checkout's own package."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torchvision") is None:
        paths.insert(0, str(HERE / "standins"))
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(hub_cache(scratch / "hub", models)),
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def check(checkout: Path, variables: Mapping[str, str]) -> None:
    """:class:`CannotRun` unless it is their checkout beside an installed package of its version."""
    if not (checkout / TESTS / "conftest.py").is_file():
        raise CannotRun(f"{checkout} has no {TESTS}/conftest.py; give a checkout of vLLM-Ascend.")
    try:
        version = importlib.metadata.version("vllm-ascend")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith(VERSION):
        raise CannotRun(f"vllm-ascend {VERSION} must be installed here; found {version}.")
    asked = "import importlib.util; print(importlib.util.find_spec('vllm_ascend').origin)"
    answer = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    if Path(answer.stdout.strip()).is_relative_to(checkout):
        raise CannotRun(
            f"{checkout}'s own vllm_ascend would be tested, which is not built; install the "
            "package into another place."
        )


def pytest_command(checkout: Path, batch: Batch, workers: int, junit: Path) -> list[str]:
    """Their tests in the order of their files; the checkout comes last on the import path.

    A file stays with one process: where there is but one, pytest runs it without workers, each of
    which would import all of vLLM for nothing.
    """
    if all(argument.endswith(".py") for argument in batch.arguments):
        workers = min(workers, len(batch.arguments))
    return [
        *(sys.executable, "-m", "pytest", *batch.arguments),
        *("-c", str(checkout / "pyproject.toml"), f"--rootdir={checkout}"),
        *("--import-mode=append", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:afd"),
        *(
            "-n",
            str(workers if workers > 1 else 0),
            "--dist",
            "loadfile",
            "-q",
            "--tb=short",
            f"--junitxml={junit}",
        ),
    ]


def run_column(
    name: str,
    checkout: Path,
    variables: Mapping[str, str],
    workers: int,
    folder: Path,
    console: Console,
) -> Column:
    """Run every batch one way; files of the run go into ``folder``."""
    outcomes: dict[str, dict[str, str]] = {}
    seconds: dict[str, float] = {}
    wall = cpu = 0.0
    for batch in batches(checkout):
        stem = f"{name.replace(' ', '-')}-{batch.name}"
        junit = folder / f"{stem}.xml"
        command = pytest_command(checkout, batch, workers, junit)
        if name == EMULATED:
            command = [sys.executable, "-m", "afd_testkit.cli", "emulate", "--", *command]
        console.print(f"{name}, {batch.name} tests; output: {folder / stem}.log")
        before = _cpu_seconds()
        started = time.monotonic()
        with (folder / f"{stem}.log").open("w") as log:
            ended = subprocess.run(
                command,
                cwd=checkout,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LONGEST,
            )
        wall += time.monotonic() - started
        cpu += _cpu_seconds() - before
        if not junit.is_file():
            raise CannotRun(
                f"pytest ended with status {ended.returncode} before it ran a test; see "
                f"{folder / stem}.log."
            )
        outcomes[batch.name] = read_outcomes(junit)
        seconds |= read_seconds(junit)
    return Column(outcomes, seconds, wall, cpu)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def passed_everywhere(columns: Sequence[Column]) -> list[str]:
    """Tests that pass in every one of ``columns``."""
    first, *others = (column.all for column in columns)
    return [
        name
        for name, outcome in first.items()
        if outcome == PASSED and all(other.get(name) == PASSED for other in others)
    ]


def table(columns: Mapping[str, Column]) -> Table:
    """Both columns, side by side."""
    shown = Table(title="vLLM-Ascend's tests/ut", title_justify="left")
    shown.add_column("")
    for name in columns:
        shown.add_column(name, justify="right")
    parts = {"all": [column.all for column in columns.values()]}
    for batch in next(iter(columns.values())).outcomes:
        parts[f"{batch} tests"] = [column.outcomes[batch] for column in columns.values()]
    for part, outcomes in parts.items():
        counted = [count(some) for some in outcomes]
        for outcome in counted[0]:
            shown.add_row(f"{part}: {outcome}", *(str(one[outcome]) for one in counted))
        shown.add_section()
    common = passed_everywhere(list(columns.values()))
    shown.add_row(
        f"seconds in {len(common)} tests that pass in all columns",
        *(f"{sum(column.seconds[name] for name in common):.0f}" for column in columns.values()),
    )
    shown.add_row("seconds, with start-up", *(f"{column.wall:.0f}" for column in columns.values()))
    shown.add_row(
        "CPU seconds, with start-up", *(f"{column.cpu:.0f}" for column in columns.values())
    )
    return shown


def judge(columns: Mapping[str, Column], console: Console) -> int:
    """Say what both columns together say; 1 where the ledger does not cover it."""
    ledger = read_ledger(LEDGER)
    gone = lost(columns[OWN].all, columns[EMULATED].all)
    console.print(f"{len(gone)} tests pass under their own mocks and not under the emulation:")
    for name, outcome in gone.items():
        reasons = [entry.reason for entry in ledger.entries if entry.matches(name)]
        why = reasons[0] if reasons else "UNEXPLAINED: give it an entry in ledger.toml, or mend it"
        console.print(f"  {name}: {outcome}\n      {why}", markup=False)
    unexplained, stale = ledger.unexplained(list(gone)), ledger.stale(list(gone))
    for entry in stale:
        console.print(f"  STALE entry {entry.tests!r}: no such test; remove it", markup=False)
    passed = count(columns[EMULATED].all)["passed"]
    if passed < ledger.at_least:
        console.print(f"  {passed} tests pass under the emulation, of {ledger.at_least} asked for")
    return int(bool(unexplained or stale or passed < ledger.at_least))


def main() -> int:
    """Run what is asked for; see the module's text for the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--own-mocks-only", dest="only", action="store_const", const=OWN)
    one.add_argument("--emulated-only", dest="only", action="store_const", const=EMULATED)
    parser.add_argument("-n", type=int, default=2, metavar="N", help="workers (default: 2)")
    parser.add_argument(
        "--large-models", action="store_true", help="also the tests that need large models"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep logs and junit files")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
    checkout = arguments.checkout.resolve()
    with tempfile.TemporaryDirectory(prefix="strangers-") as scratch:
        results = (arguments.results or Path(scratch) / "results").resolve()
        results.mkdir(parents=True, exist_ok=True)
        models = ["models", *(["models_large"] if arguments.large_models else [])]
        variables = environment(Path(scratch), arguments.n, models)
        try:
            check(checkout, variables)
            names = [arguments.only] if arguments.only else [OWN, EMULATED]
            columns = {
                name: run_column(name, checkout, variables, arguments.n, results, console)
                for name in names
            }
            console.print(table(columns))
            return 0 if arguments.only else judge(columns, console)
        except (CannotRun, LedgerError) as error:
            print(f"{Path(__file__).name}: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
