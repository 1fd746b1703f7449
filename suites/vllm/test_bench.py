"""The benchmark on vLLM's own code: small, and a fair comparison of the same cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from afd_plugin import ScheduledBatch, slice_metadata, split_at
from afd_testkit import bench
from afd_testkit.bench_step import Hits, make_step
from afd_testkit.cli import main

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_loaded")]

COMPARED = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu_upper_bound",
    "block_table_tensor",
    "slot_mapping",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
)


@pytest.mark.parametrize("mode", [[], ["--inference-mode"]], ids=["plain", "inference"])
def test_a_small_run(mode: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--requests", "1,8", "--runs", "5", "--json", str(out), *mode]
    assert main(["bench", "split", *arguments]) == 0
    record = json.loads(out.read_text())
    assert record["inference_mode"] is bool(mode)
    assert record["versions"]["vllm"] == "0.32.0"
    hazards = ["hazard, no hits", "hazard, prefix hits", "hazard, same-step hits"]
    expected = [(1, s) for s in ("split", *hazards[:2])] + [(8, s) for s in ("split", *hazards)]
    assert [(row["requests"], row["subject"]) for row in record["rows"]] == expected
    for row in record["rows"]:
        assert row["vllm"]["tensor_ops"] > 0
        assert (row["vllm"]["fields"], row["fields_set"]) == (10, 12)
        if row["subject"] == "split":
            assert 0 < row["ours"]["tensor_ops"] < row["vllm"]["tensor_ops"]
            assert row["ours"]["fields"] == 12
    shown = capsys.readouterr().out
    for _, subject in expected:
        assert subject in shown


@pytest.mark.parametrize("hits", Hits)
@pytest.mark.parametrize("requests", [1, 2, 9])
def test_both_sides_cut_alike(requests: int, hits: Hits) -> None:
    """Cuts at, next to and between all boundaries."""
    upstream = bench.load_upstream()
    step = make_step(upstream.metadata_class, requests, hits)
    batch = ScheduledBatch(step.scheduled, step.computed, is_prefilling=step.is_prefilling)
    starts = batch.query_start_loc.tolist()
    cuts = {start + shift for start in starts for shift in (-1, 0, 1)} | {batch.num_tokens // 2}
    inside = [cut for cut in sorted(cuts) if 0 < cut < batch.num_tokens]
    assert inside
    for cut in inside:
        mine = slice_metadata(step.metadata, split_at(batch, cut))
        other = bench.theirs(upstream, step, cut)
        for ours, vllms in zip(mine, other, strict=True):
            assert type(ours) is type(vllms)
            for name in COMPARED:
                got, wanted = getattr(ours, name), getattr(vllms, name)
                if isinstance(wanted, torch.Tensor):
                    assert got.dtype == wanted.dtype, (name, cut)
                    assert torch.equal(got, wanted), (name, cut)
                else:
                    assert got == wanted, (name, cut)


def test_the_measured_step_is_cut_inside_a_request() -> None:
    upstream = bench.load_upstream()
    for requests in (1, 8, 64, 512):
        plan = bench.plan_of(make_step(upstream.metadata_class, requests, Hits.EARLIER))
        assert plan.cuts_request
