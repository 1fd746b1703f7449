"""The command: its arguments, its refusals, and the record that it writes."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afd_plugin.compat.known import RULES_0_32_0
from afd_plugin.errors import UpstreamDrift
from afd_plugin.metadata import register_metadata_rules, unregister_metadata_rules
from afd_testkit import bench
from afd_testkit.bench_step import BLOCK_SIZE, Hits, make_step
from afd_testkit.cli import main

pytestmark = pytest.mark.cpu


@dataclasses.dataclass
class Metadata:
    """What the rules of the pinned vLLM class need of a stand-in for it."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True
    positions: Any = None
    is_prefilling: Any = None
    seq_lens_cpu_upper_bound: Any = None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small upstream in place of vLLM, whose operations and fields are known."""
    names = {field.name for field in dataclasses.fields(Metadata)}
    register_metadata_rules(Metadata, {n: r for n, r in RULES_0_32_0.items() if n in names})

    def split(_slices: object, parent: Metadata) -> list[Metadata]:
        kept = dataclasses.replace(parent, positions=None, is_prefilling=None)
        return [dataclasses.replace(kept, seq_lens=parent.seq_lens + 1), kept]

    upstream = bench.Upstream(Metadata, lambda *_arguments: ([], []), split)
    monkeypatch.setattr(bench, "load_upstream", lambda: upstream)
    monkeypatch.setattr(bench, "vllm_version", lambda: "0.32.0")
    yield
    unregister_metadata_rules(Metadata)


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    assert "bench" in capsys.readouterr().out
    assert status_of("bench", "split", "--help") == 0
    said = capsys.readouterr().out
    for option in ("--requests", "--runs", "--json", "--inference-mode", "1,8,64,512,4096"):
        assert option in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["bench"], "SUBJECT"),
        (["bench", "merge"], "merge"),
        (["bench", "split", "--requests", "0"], "'0' is no number of requests"),
        (["bench", "split", "--requests", "1,,2"], "'' is no number of requests"),
        (["bench", "split", "--requests", "8,many"], "'many' is no number of requests"),
        (["bench", "split", "--requests", "65537"], "from 1 to 65536"),
        (["bench", "split", "--runs", "0"], "'0' is no number of runs"),
        (["bench", "split", "--runs", "1.5"], "'1.5' is no number of runs"),
        (["bench", "split", "--json", "no/such/folder/out.json"], "existing folder"),
        (["bench", "split", "--json", "."], "'.' cannot be written"),
        (["bench", "split", "--speed", "1"], "--speed"),
    ],
)
def test_arguments_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*arguments) == 2
    assert said in capsys.readouterr().err


def test_needs_neither_torch_nor_vllm_for_help() -> None:
    script = (
        "import sys, afd_testkit.cli as cli\n"
        "try: cli.main(['bench', 'split', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def no_vllm() -> str:
    raise UpstreamDrift("no vLLM is installed")


def not_importable(_name: str) -> object:
    raise ImportError("libtorch is of another build")


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"vllm_version": no_vllm}, "vLLM 0.32.0 is not installed"),
        ({"vllm_version": lambda: "0.23.0"}, "vLLM 0.23.0 is installed, not 0.32.0"),
        (
            {"vllm_version": lambda: "0.32.0", "import_module": not_importable},
            "does not import (libtorch is of another build)",
        ),
    ],
    ids=["missing", "another", "broken"],
)
def test_without_the_pinned_vllm(
    replaced: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, value in replaced.items():
        monkeypatch.setattr(bench, name, value)
    assert main(["bench", "split", "--json", str(tmp_path / "out.json")]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "tox -e vllm" in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("stand_in")
def test_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "out.json"
    arguments = ["--requests", "1,6,1", "--runs", "3", "--json", str(out)]
    assert main(["bench", "split", *arguments]) == 0
    assert (torch.get_num_threads(), gc.isenabled()) == (threads, True)
    record = json.loads(out.read_text())
    assert record["schema"] == "afd-bench-split-1"
    assert record["inference_mode"] is False
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cpus"] >= 1
    rows = record["rows"]
    assert [(row["requests"], row["subject"]) for row in rows] == [
        (1, "split"),
        (1, "hazard, no hits"),
        (1, "hazard, prefix hits"),
        (6, "split"),
        (6, "hazard, no hits"),
        (6, "hazard, prefix hits"),
        (6, "hazard, same-step hits"),
    ]
    for row in rows:
        assert row["runs"] == 3
        assert 0 <= row["wins"] <= 3
        assert row["ratio"] > 0
        assert row["fields_set"] == 12
        for side in (row["ours"], row["vllm"]):
            assert 0 < side["p10_us"] <= side["median_us"] <= side["p90_us"]
        # The stand-in adds once and forgets two of the twelve.
        assert (row["vllm"]["tensor_ops"], row["vllm"]["fields"]) == (1, 10)
        assert row["ours"]["fields"] == (12 if row["subject"] == "split" else None)
        assert (row["ours"]["tensor_ops"] > 0) is (row["subject"] == "split")
    shown = capsys.readouterr().out
    assert "12 | 10 of 12" in shown
    assert "same-step hits" in shown


@pytest.mark.usefixtures("stand_in")
def test_inference_mode_holds_while_measuring_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        bench, "ours", lambda _step: seen.append(torch.is_inference_mode_enabled()) or (1, 2)
    )
    monkeypatch.setattr(bench, "carried", lambda *_: 0)
    for arguments, mode in (([], False), (["--inference-mode"], True)):
        seen.clear()
        assert main(["bench", "split", "--requests", "2", "--runs", "1", *arguments]) == 0
        assert set(seen) == {mode}
        assert not torch.is_inference_mode_enabled()


def test_threads_return_after_an_error(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_step: object) -> None:
        raise KeyError("in the measured code")

    threads = torch.get_num_threads()
    monkeypatch.setattr(bench, "ours", broken)
    with pytest.raises(KeyError):
        main(["bench", "split", "--requests", "2", "--runs", "1"])
    assert (torch.get_num_threads(), gc.isenabled()) == (threads, True)


def test_pairs_alternate() -> None:
    calls: list[str] = []
    spent = bench.time_pairs(lambda: calls.append("a"), lambda: calls.append("b"), 4)
    assert spent.shape == (4, 2)
    assert (spent >= 0).all()
    assert calls == ["a", "b"] * (4 + 4)  # as many to warm up


def test_operations_are_counted() -> None:
    assert bench.tensor_ops(lambda: (torch.ones(2) + 1).mul(3)) == 3
    assert bench.tensor_ops(lambda: np.ones(2) + 1) == 0


@pytest.mark.parametrize("hits", Hits)
@pytest.mark.parametrize("requests", [2, 3, 40])
def test_steps_are_what_they_say(hits: Hits, requests: int) -> None:
    step = make_step(Metadata, requests, hits)
    table, slots = step.group.block_table, step.group.slot_mapping
    assert len(set(slots.tolist())) == slots.size == step.scheduled.sum()
    writer = {slot: token for token, slot in enumerate(slots.tolist())}
    reads = [
        int(table[r, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
        for r in range(requests)
        for p in range(step.computed[r])
    ]
    assert bool(reads) is (hits is not Hits.NONE)
    assert all((slot in writer) is (hits is Hits.SAME_STEP) for slot in reads)
    positions = step.metadata.positions.tolist()
    assert positions == [
        p
        for r in range(requests)
        for p in range(step.computed[r], step.computed[r] + step.scheduled[r])
    ]
    row = np.repeat(np.arange(requests), step.scheduled)
    for token, slot in enumerate(slots.tolist()):
        block = table[row[token], positions[token] // BLOCK_SIZE]
        assert slot == block * BLOCK_SIZE + positions[token] % BLOCK_SIZE
