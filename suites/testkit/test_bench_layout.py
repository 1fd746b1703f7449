"""``afd-testkit bench layout``: its counts are the bytes that the real exchange sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from afd_plugin import ScheduledBatch, plan_split
from afd_plugin.exchange import ShardExchange
from afd_plugin.layout import Layout, batch_shard
from afd_testkit import bench_layout
from afd_testkit.cli import main
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

HIDDEN = 4  # bfloat16 values a token, in what is really sent


def sent_bytes(rank: Rank, sizes: list[int]) -> list[tuple[int, int]]:
    """For each step: bytes given to all-to-all, and bytes that an all-gather brings to here."""
    real, given_bytes = dist.all_to_all_single, 0

    def counting(output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal given_bytes
        given_bytes += given.nbytes
        return real(output, given, *args, **kwargs)

    said = []
    with rank.gloo() as group:
        for tokens in sizes:
            plan = plan_split(ScheduledBatch([tokens]), policy="token", alignment=rank.world_size)
            layout = Layout(rank.world_size, rank.rank, True)
            shard = torch.zeros(batch_shard(plan.batch, layout).rows, HIDDEN, dtype=torch.bfloat16)
            everyone = [torch.empty_like(shard) for _ in range(rank.world_size)]
            dist.all_gather(everyone, shard)
            others = [piece for place, piece in enumerate(everyone) if place != rank.rank]
            dist.all_to_all_single, given_bytes = counting, 0
            try:
                ShardExchange(plan, layout, group).to_stages(shard)
            finally:
                dist.all_to_all_single = real
            said.append((given_bytes, sum(piece.nbytes for piece in others)))
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_counts_are_the_bytes_given_to_all_to_all(ranks: int) -> None:
    sizes = [64, 1001, 4096]
    everyone = run_ranks(ranks, sent_bytes, sizes)
    report = bench_layout.run(sizes, [ranks], HIDDEN, 2)
    for index, row in enumerate(report.rows):
        sent = [said[index][0] for said in everyone]
        gathered = [said[index][1] for said in everyone]
        assert row.exchange_bytes == sum(sent) > 0
        assert row.gather_bytes == sum(gathered)
        assert row.busiest_gather_bytes == max(gathered)
        assert row.busiest_exchange_bytes >= max(sent)


@pytest.mark.parametrize(("tp", "busiest"), [(2, 1024), (4, 1024), (8, 512)])
def test_of_an_even_step_only_the_ends_stay_where_they_are(tp: int, busiest: int) -> None:
    # Shards of the step are twice as long as those of a stage: of all, only the first half of
    # rank 0's and the second half of the last rank's keep their place.  A rank between them
    # sends its whole shard; of two ranks both are ends.
    (row,) = bench_layout.run([4096], [tp], 1, 1).rows
    assert row.cut == 2048
    assert row.exchange_bytes == 4096 - 2 * 4096 // (2 * tp)
    assert row.gather_bytes == (tp - 1) * 4096
    assert row.ratio == tp
    assert row.busiest_exchange_bytes == busiest


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--tokens", "4K,65536", "--tp", "2,8", "--hidden", "512", "--dtype-bytes", "4"]
    assert main(["bench", "layout", *options, "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["schema"] == "afd-bench-layout-1"
    assert (record["hidden"], record["dtype_bytes"]) == (512, 4)
    places = [(row["tokens"], row["tp_size"]) for row in record["rows"]]
    assert places == [(4096, 2), (4096, 8), (65536, 2), (65536, 8)]
    first = record["rows"][0]
    assert (first["exchange_bytes"], first["gather_bytes"]) == (2048 * 2048, 4096 * 2048)
    shown = capsys.readouterr().out
    for part in ("4096", "65536", "exchange", "all-gather", "2.00", "8.00", "4.0", "512 values"):
        assert part in shown


def test_defaults_are_4k_to_64k_on_2_4_and_8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layout"]) == 0
    shown = capsys.readouterr().out
    for tokens in (4096, 8192, 16384, 32768, 65536):
        assert shown.count(str(tokens)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "1"], "'1' is no number of tokens"),
        (["--tokens", "4M"], "'4M' is no number of tokens"),
        (["--tp", "1"], "'1' is no TP size of several ranks"),
        (["--hidden", "0"], "'0' is no hidden size"),
        (["--dtype-bytes", "16"], "'16' is no number of bytes"),
        (["--json", "no/such/folder/out.json"], "existing folder"),
    ],
)
def test_arguments_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "layout", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_step_that_is_not_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layout", "--tokens", "8", "--tp", "8"]) == 2
    assert "no multiple of 8 lies inside the 8 real tokens" in capsys.readouterr().err
