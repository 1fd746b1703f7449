"""One decision for all ranks, or an error on every one of them in bounded time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, SplitPlan, Unsplit, plan_split, split_at
from afd_plugin.agreement import (
    AgreementGroup,
    Vote,
    agree_on_plan,
    agree_on_split,
    decision_digest,
    describe,
    exchange_texts,
    joint_plan,
    vote_of,
    withdraw,
)
from afd_plugin.errors import AgreementError, PlanDisagreement, SilentRanks
from afd_plugin.layout import Layout
from afd_testkit.ranks import Rank, RanksFailed, run_ranks
from afd_testkit.strategies import batches

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads of this process find each other whatever the host is called."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


TIMEOUT = 6.0  # seconds; long enough for a busy machine, since ranks start together


@contextmanager
def meet(rank: Rank, timeout: float = TIMEOUT, name: str = "step") -> Iterator[AgreementGroup]:
    store = dist.FileStore(str(rank.folder / "agreement"), rank.world_size)
    group = AgreementGroup(store, rank.rank, rank.world_size, timeout=timeout, name=name)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def meet_over_tcp(rank: Rank) -> Iterator[AgreementGroup]:
    """Over a TCP store on a free port that rank 0 serves, as in a real engine."""
    noted = rank.folder / "port"
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (rank.folder / "note").write_text(str(store.port))
        (rank.folder / "note").rename(noted)
    else:
        while not noted.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(noted.read_text()), is_master=False)
    group = AgreementGroup(store, rank.rank, rank.world_size, timeout=TIMEOUT)
    try:
        yield group
    finally:
        group.close()


def in_threads(size: int, body: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """``body(rank, *arguments)`` for every rank, in one process: gloo does not mind."""
    ranks = [Rank(number, size, folder, 60) for number in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(rank, *arguments), ranks))


def caught(kind: type[Exception], call: Any, *arguments: Any) -> tuple[Any, float]:
    """The error of a call, and the seconds that it took."""
    begin = time.monotonic()
    with pytest.raises(kind) as info:
        call(*arguments)
    assert type(info.value) is kind
    return info.value, time.monotonic() - begin


def token_plan(*scheduled: int, **options: Any) -> SplitPlan | Unsplit:
    return plan_split(ScheduledBatch(scheduled), policy="token", **options)


# --- pure ---------------------------------------------------------------------------------


@given(first=batches(max_requests=3, max_scheduled=4), second=batches(max_requests=3))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_digests_are_equal_exactly_for_equal_decisions(
    first: ScheduledBatch, second: ScheduledBatch
) -> None:
    def facts(batch: ScheduledBatch) -> tuple[Any, ...]:
        vectors = (batch.num_scheduled_tokens, batch.num_computed_tokens, batch.is_prefilling)
        return (*(vector.tolist() for vector in vectors), batch.num_input_tokens)

    def copy(batch: ScheduledBatch) -> ScheduledBatch:
        return ScheduledBatch(
            batch.num_scheduled_tokens.tolist(),
            batch.num_computed_tokens.tolist(),
            is_prefilling=batch.is_prefilling,
            num_input_tokens=batch.num_input_tokens,
        )

    one = decision_digest(Unsplit(first, "disabled", "in some words"))
    assert one == decision_digest(Unsplit(copy(first), "disabled", "in others"))
    assert one != decision_digest(Unsplit(first, "kv_hazard", "in some words"))
    same = facts(first) == facts(second)
    assert (one == decision_digest(Unsplit(second, "disabled", ""))) is same
    if first.num_tokens > 1:
        split = split_at(first, 1)
        assert decision_digest(split) == decision_digest(split_at(copy(first), 1))
        assert decision_digest(split) != one


def test_a_whole_step_is_another_one_where_a_request_is_no_longer_prefilling() -> None:
    def digest(flags: list[bool]) -> bytes:
        batch = ScheduledBatch([1, 5], [7, 0], is_prefilling=flags)
        return decision_digest(Unsplit(batch, "disabled", ""))

    assert digest([True, True]) != digest([False, True])


def test_a_digest_is_stable_across_processes() -> None:
    # Literals, so that another release or platform cannot come to another value unnoticed.
    plan = split_at(ScheduledBatch([3, 200, 17], [0, 64, 0]), 110)
    whole = Unsplit(ScheduledBatch([3]), "no_aligned_cut", "")
    assert len(decision_digest(plan)) == len(decision_digest(whole)) == 32
    assert run_ranks(1, digests) == [[decision_digest(plan), decision_digest(whole)]]


def digests(_rank: Rank) -> list[bytes]:
    plan = split_at(ScheduledBatch([3, 200, 17], [0, 64, 0]), 110)
    return [
        decision_digest(plan),
        decision_digest(Unsplit(ScheduledBatch([3]), "no_aligned_cut", "")),
    ]


def test_of_a_layout_all_counts_but_the_rank() -> None:
    plan = split_at(ScheduledBatch([8]), 4, 4)
    on = [decision_digest(plan, Layout(4, rank, True)) for rank in range(4)]
    assert len(set(on)) == 1
    others = [
        decision_digest(plan),
        decision_digest(plan, Layout(4, 0, False)),
        decision_digest(plan, Layout(2, 0, True)),
        decision_digest(Unsplit(plan.batch, "disabled", ""), Layout(4, 0, True)),
    ]
    assert len({*on, *others}) == 5


def test_a_decision_in_words() -> None:
    plan = plan_split(ScheduledBatch([1, 1068]), policy="token", alignment=2)
    said = describe(plan, Layout(2, 1, True))
    for part in (
        "token_balanced_tp cut 534 of 1069 tokens",
        "stages of 534 and 535 in 534 and 536 rows, alignment 2",
        "sharded over 2",
        "scheduled [1, 1068], computed [0, 0], extent 1069",
        f"digest {decision_digest(plan, Layout(2, 0, True)).hex()[:16]}",
    ):
        assert part in said
    assert "\n" not in said
    whole = token_plan(3, alignment=4)
    assert describe(whole).startswith("whole, no_aligned_cut: no multiple of 4")
    assert "whole on each of 2" in describe(whole, Layout(2, 0, False))
    assert "[1, 1, 1, " in describe(split_at(ScheduledBatch([1] * 30), 4))
    assert "1, …, 1, 1, 1, 1] (30 requests)" in describe(split_at(ScheduledBatch([1] * 30), 4))


def test_h1_one_decision_from_agreed_counts() -> None:
    mine, other = token_plan(40, min_tokens=32), token_plan(1, min_tokens=32)
    assert isinstance(mine, SplitPlan)
    votes = [vote_of(mine), vote_of(other)]
    assert votes == [Vote(True, 40, ""), Vote(False, 1, "one_token")]
    agreed = joint_plan(mine, votes)
    assert isinstance(agreed, Unsplit)
    assert agreed.reason == "other_rank_whole"
    assert agreed.detail == "rank 1 runs its 1 tokens whole: one_token"
    assert agreed.batch is mine.batch
    assert joint_plan(other, votes) is other


def test_h1_an_idle_rank() -> None:
    mine = token_plan(40, min_tokens=32)
    votes = [vote_of(mine), vote_of(None)]
    assert votes[1] == Vote(False, 0, "idle")
    assert isinstance(joint_plan(mine, votes), Unsplit)
    assert joint_plan(None, votes) is None


def test_all_split_or_none() -> None:
    plans = [token_plan(40), token_plan(7, 9)]
    votes = [vote_of(plan) for plan in plans]
    assert [joint_plan(plan, votes) for plan in plans] == plans


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_ranks_with_the_same_votes_decide_alike(sizes: list[int]) -> None:
    plans = [token_plan(size, min_tokens=3) if size else None for size in sizes]
    votes = [vote_of(plan) for plan in plans]
    split = [isinstance(joint_plan(plan, votes), SplitPlan) for plan in plans]
    assert split == [min(sizes) >= 3] * len(sizes)


# --- over ranks ---------------------------------------------------------------------------


def agree_many_times(rank: Rank) -> tuple[int, float]:
    with meet(rank) as group:
        layout = Layout(rank.world_size, rank.rank, True)
        begin = time.perf_counter()
        for tokens in range(8, 58):
            agree_on_plan(group, token_plan(tokens, alignment=rank.world_size), layout)
        group.close()
        return 50, (time.perf_counter() - begin) / 50


@pytest.mark.parametrize("ranks", [2, 8])
def test_equal_plans_pass(ranks: int) -> None:
    assert [count for count, _ in run_ranks(ranks, agree_many_times)] == [50] * ranks


def test_equal_plans_pass_on_one_rank_and_on_four(tmp_path: Path) -> None:
    (alone := tmp_path / "one").mkdir()
    assert [count for count, _ in in_threads(4, agree_many_times, tmp_path)] == [50] * 4
    assert agree_many_times(Rank(0, 1, alone, 60))[0] == 50


def decide(rank: Rank, over_tcp: bool) -> list[Any]:
    """Steps on which the ranks differ in one thing each; and one, at the end, that they share."""
    with (meet_over_tcp if over_tcp else meet)(rank) as group:
        odd = rank.rank == 1
        said = []
        for plan, layout in [
            (split_at(ScheduledBatch([3, 200]), 110 if odd else 101), None),
            (split_at(ScheduledBatch([3, 201 if odd else 200]), 101), None),
            (split_at(ScheduledBatch([8]), 4) if odd else token_plan(8, alignment=8), None),
            (token_plan(3, alignment=4) if odd else token_plan(3, min_tokens=5), None),
            (split_at(ScheduledBatch([8]), 4, 2), Layout(rank.world_size, rank.rank, odd)),
        ]:
            error, seconds = caught(PlanDisagreement, agree_on_plan, group, plan, layout)
            said.append((str(error), error.decisions, describe(plan, layout), seconds))
        agree_on_plan(group, token_plan(8))
        return said


@pytest.mark.parametrize(("ranks", "over_tcp"), [(2, True), (3, False)])
def test_a_disagreement_raises_on_every_rank_with_both_plans(
    ranks: int, over_tcp: bool, tmp_path: Path
) -> None:
    everyone = in_threads(ranks, decide, tmp_path, over_tcp)
    for step in range(5):
        own = [said[step][2] for said in everyone]
        assert own[0] != own[1]
        for message, decisions, _, seconds in (said[step] for said in everyone):
            assert seconds < TIMEOUT
            assert decisions == tuple(own)
            for decision in own:
                assert decision in message
            assert f"rank 1: {own[1]}" in message
            assert f"rank {'0, 2' if ranks == 3 else '0'}: {own[0]}" in message
    first = everyone[0][0][0]
    assert "cut 110 of 203" in first
    assert "cut 101 of 203" in first


def vote(rank: Rank) -> list[Any]:
    with meet(rank, name="dp") as group:
        work = [
            [token_plan(40, min_tokens=32), token_plan(1, min_tokens=32)],  # H1
            [token_plan(40, min_tokens=32), None],  # H1, idle
            [token_plan(40, min_tokens=32), token_plan(5, 60, min_tokens=32)],
            [None, None],
        ]
        said: list[Any] = []
        for plans in work:
            mine = plans[rank.rank]
            agreed = agree_on_split(group, mine)
            kind = agreed.reason if isinstance(agreed, Unsplit) else type(agreed).__name__
            said.append((kind, agreed is mine))
        return said


def test_h1_over_two_ranks(tmp_path: Path) -> None:
    assert in_threads(2, vote, tmp_path) == [
        [("other_rank_whole", False)] * 2 + [("SplitPlan", True), ("NoneType", True)],
        [("one_token", True), ("NoneType", True), ("SplitPlan", True), ("NoneType", True)],
    ]


def differ_on_splitting(rank: Rank) -> tuple[str, float]:
    """What a rank that ignores the joint decision looks like: H1's stuck collective."""
    with meet(rank) as group:
        batch = ScheduledBatch([40])
        plan = split_at(batch, 20) if rank.rank == 0 else Unsplit(batch, "below_min_tokens", "said")
        error, seconds = caught(PlanDisagreement, agree_on_plan, group, plan)
        return str(error), seconds


def test_h1_split_against_whole_raises_on_both(tmp_path: Path) -> None:
    for message, seconds in in_threads(2, differ_on_splitting, tmp_path):
        assert "rank 0: given cut 20 of 40 tokens" in message
        assert "rank 1: whole, below_min_tokens: said" in message
        assert seconds < TIMEOUT


def call_differently(rank: Rank) -> str:
    with meet(rank) as group:
        if rank.rank == 0:
            error, _ = caught(PlanDisagreement, agree_on_plan, group, token_plan(8))
        else:
            error, _ = caught(PlanDisagreement, agree_on_split, group, token_plan(8))
        return str(error)


def test_ranks_in_different_calls_raise(tmp_path: Path) -> None:
    for message in in_threads(2, call_differently, tmp_path):
        assert "rank 0: token_balanced_tp cut 4 of 8" in message
        assert "rank 1: votes on the split: token_balanced_tp cut 4 of 8 tokens" in message


def decide_by_other_terms(rank: Rank) -> list[tuple[str, tuple[str, ...], float]]:
    """Rank 1 has another threshold: with a plan that is whole for it, one like rank 0's, none."""
    with meet(rank) as group:
        least = 64 if rank.rank else 32
        said = []
        for scheduled in (40, 80, None):
            mine = None if scheduled is None else token_plan(scheduled, min_tokens=least)
            terms = f"at least {least} tokens"
            error, seconds = caught(PlanDisagreement, agree_on_split, group, mine, terms)
            said.append((str(error), error.decisions, seconds))
        assert agree_on_split(group, None, "the same") is None  # the group is as good as before
        return said


def test_h1_ranks_that_decide_by_other_terms_raise_on_both_with_both_plans(tmp_path: Path) -> None:
    """Also where their plans for the step would do: the next step's may not."""
    first, second = in_threads(2, decide_by_other_terms, tmp_path)
    parts = [
        ("token_balanced_tp cut 20 of 40 tokens", "whole, below_min_tokens"),
        ("token_balanced_tp cut 40 of 80 tokens", "token_balanced_tp cut 40 of 80 tokens"),
        ("idle", "idle"),
    ]
    for one, other, (mine, others) in zip(first, second, parts, strict=True):
        assert one[:2] == other[:2]
        message, decisions, _ = one
        assert decisions[0].startswith(f"votes on the split: {mine}")
        assert decisions[1].startswith(f"votes on the split: {others}")
        assert decisions[0].endswith("decided by at least 32 tokens")
        assert decisions[1].endswith("decided by at least 64 tokens")
        for rank, decision in enumerate(decisions):
            assert f"rank {rank}: {decision}" in message
        assert max(one[2], other[2]) < TIMEOUT


def tell(rank: Rank) -> list[tuple[str, ...]]:
    with meet(rank) as group:
        return [exchange_texts(group, text * rank.rank) for text in ("ü", "")]


def test_texts_of_any_length_are_told_to_all(tmp_path: Path) -> None:
    told = [("", "ü", "üü"), ("", "", "")]
    assert in_threads(3, tell, tmp_path) == [told] * 3


def one_cannot_plan(rank: Rank) -> list[str]:
    with meet(rank) as group:
        said = []
        for call in (agree_on_plan, agree_on_split):
            if rank.rank == 1:
                withdraw(group, ValueError("block table is too short"))
            else:
                error, seconds = caught(PlanDisagreement, call, group, token_plan(8))
                assert seconds < TIMEOUT
                said.append(str(error))
        agree_on_plan(group, token_plan(8))  # the group is as good as before
        return said


def test_a_rank_that_cannot_plan_says_so_to_the_others(tmp_path: Path) -> None:
    first, second, third = in_threads(3, one_cannot_plan, tmp_path)
    assert second == []
    assert first == third
    assert len(first) == 2
    assert all("rank 1: withdrew: ValueError: block table is too short" in m for m in first)


def fall_silent(rank: Rank, how: str) -> None:
    (rank.folder / "silent").write_text(str(os.getpid()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(45)


def wait_for(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def witness(rank: Rank, group: AgreementGroup, others: list[int]) -> Any:
    """What a rank is told of the silent one; the first of ``others`` ends that at last."""
    wait_for(rank.folder / "silent")
    error, seconds = caught(SilentRanks, agree_on_plan, group, token_plan(8))
    again, no_time = caught(AgreementError, agree_on_plan, group, token_plan(8))
    assert no_time < 0.5
    assert "make a new one" in str(again)
    (rank.folder / f"told-{rank.rank}").touch()
    if rank.rank == others[0]:
        wait_for(*(rank.folder / f"told-{other}" for other in others))
        with suppress(ProcessLookupError):
            os.kill(int((rank.folder / "silent").read_text()), signal.SIGKILL)
    return error.silent, str(error), seconds


def one_is_silent(rank: Rank, how: str) -> Any:
    with (meet_over_tcp if how == "stopped" else meet)(rank) as group:
        agree_on_plan(group, token_plan(8))
        if rank.rank == 2:
            fall_silent(rank, how)
        return witness(rank, group, [0, 1])


@pytest.mark.parametrize("how", ["asleep", "stopped", "killed"])
def test_a_silent_rank_is_named_on_all_others(how: str) -> None:
    with pytest.raises(RanksFailed) as info:
        run_ranks(3, one_is_silent, how, grace=30)
    assert [failure.rank for failure in info.value.failures] == [2]
    assert sorted(info.value.results) == [0, 1]
    for rank, (silent, message, seconds) in info.value.results.items():
        assert silent == (2,)
        assert f"rank {rank} of 3 got no answer from all ranks in 6 s; silent: 2" in message
        assert seconds < 2 * TIMEOUT + 2


def store_is_silent(rank: Rank) -> Any:
    """Rank 0 serves the store and stops: only the ranks themselves can tell who is there."""
    with meet_over_tcp(rank) as group:
        agree_on_plan(group, token_plan(8))
        if rank.rank == 0:
            fall_silent(rank, "stopped")
        return witness(rank, group, [1, 2])


def test_the_rank_that_serves_the_store_is_named_too() -> None:
    with pytest.raises(RanksFailed) as info:
        run_ranks(3, store_is_silent, grace=30)
    assert [failure.rank for failure in info.value.failures] == [0]
    assert sorted(info.value.results) == [1, 2]
    for silent, _, seconds in info.value.results.values():
        assert silent == (0,)
        assert seconds < 2 * TIMEOUT + 2


def late(rank: Rank) -> Any:
    with meet(rank, timeout=1.5) as group:
        agree_on_plan(group, token_plan(8))
        if rank.rank == 1:
            time.sleep(4)
        error, seconds = caught(SilentRanks, agree_on_plan, group, token_plan(8))
        return error.silent, str(error), seconds


def test_a_late_rank_raises_too(tmp_path: Path) -> None:
    first, second = in_threads(2, late, tmp_path)
    assert first[0] == (1,)
    assert second[0] == (0,)  # which has given up by then
    assert "why this one came so late" in second[1]
    assert second[2] < 3


def never_met(rank: Rank) -> Any:
    if rank.rank == 1:
        return None
    error, seconds = caught(SilentRanks, meet(rank, 1.5).__enter__)
    return error.silent, seconds


def test_ranks_that_never_meet(tmp_path: Path) -> None:
    first, second = in_threads(2, never_met, tmp_path)
    assert second is None
    assert first[0] == (1,)
    assert first[1] < 8


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_do_not_exist(rank: int, size: int) -> None:
    with pytest.raises(AgreementError, match=f"rank {rank} of {size} does not exist"):
        AgreementGroup(None, rank, size)
