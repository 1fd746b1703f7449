"""Ranks come to one decision before any of them runs a stage, or every one of them raises.

Each step costs one all-gather of 64 bytes on CPU.  The groups here are apart from the engine's:
they have a timeout of their own, so that a rank that hangs elsewhere cannot hold the others.

- Ranks of one TP group have the same batch and must have the same plan: :func:`agree_on_plan`.
- Ranks of a synchronous DP group have batches of their own, but must decide on the same terms;
  either all of them split their step or none does: :func:`agree_on_split`.
"""

from __future__ import annotations

import hashlib
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from afd_plugin.errors import AgreementError, PlanDisagreement, SilentRanks
from afd_plugin.layout import Layout
from afd_plugin.plan import SplitPlan, Unsplit

# Kind, splits, digest of the terms, tokens, digest of the plan or reason.
_RECORD = struct.Struct("<BB6sq48s")
_PLAN, _VOTE, _WITHDRAWN = 1, 2, 3
_NO_TERMS = bytes(6)
# What must be the same in the records of all ranks.
_WHOLE, _TERMS = slice(None), slice(2, 8)
_SHOWN = 24  # requests of a batch that are shown in full


def decision_digest(plan: SplitPlan | Unsplit, layout: Layout | None = None) -> bytes:
    """SHA-256 over all that a decision follows from, the same on every rank of a TP group.

    Of ``layout`` everything counts but the rank.
    """
    if isinstance(plan, SplitPlan):
        state = hashlib.sha256(f"afd-split-1:{plan.digest}".encode())
    else:
        batch = plan.batch
        state = hashlib.sha256(f"afd-whole-1:{plan.reason}:{batch.num_input_tokens}:".encode())
        for array in (batch.num_scheduled_tokens, batch.num_computed_tokens):
            state.update(array.astype("<i8", copy=False).tobytes())
        state.update(np.packbits(batch.is_prefilling).tobytes())
    if layout is not None:
        state.update(f":{layout.tp_size}:{layout.sharded}".encode())
    return state.digest()


def _counts(values: NDArray[Any]) -> str:
    if values.size <= _SHOWN:
        return str(values.tolist())
    head, tail = values[: _SHOWN - 4].tolist(), values[-4:].tolist()
    return f"{str(head)[:-1]}, …, {str(tail)[1:]} ({values.size} requests)"


def describe(plan: SplitPlan | Unsplit, layout: Layout | None = None) -> str:
    """One line with the decision and the batch it was made for."""
    batch = plan.batch
    if isinstance(plan, SplitPlan):
        first, second = plan.stages
        what = (
            f"{plan.policy} cut {plan.cut} of {batch.num_tokens} tokens, stages of "
            f"{first.num_tokens} and {second.num_tokens} in {first.num_input_tokens} and "
            f"{second.num_input_tokens} rows, alignment {plan.alignment}"
        )
    else:
        what = f"whole, {plan.reason}: {plan.detail}"
    if layout is not None:
        what += f"; {'sharded over' if layout.sharded else 'whole on each of'} {layout.tp_size}"
    return (
        f"{what}; scheduled {_counts(batch.num_scheduled_tokens)}, computed "
        f"{_counts(batch.num_computed_tokens)}, extent {batch.num_input_tokens}; "
        f"digest {decision_digest(plan, layout).hex()[:16]}"
    )


class Vote(NamedTuple):
    """What one DP rank says of its own step.

    ``splits``: it could run as two stages.  ``tokens``: real tokens, 0 when idle.  ``reason``:
    why it runs whole; empty where it does not.
    """

    splits: bool
    tokens: int
    reason: str


def vote_of(plan: SplitPlan | Unsplit | None) -> Vote:
    """The vote of a rank with that plan; ``None`` for an idle rank, which runs a dummy step."""
    if plan is None:
        return Vote(False, 0, "idle")
    if isinstance(plan, Unsplit):
        return Vote(False, plan.batch.num_tokens, plan.reason)
    return Vote(True, plan.batch.num_tokens, "")


def joint_plan(
    plan: SplitPlan | Unsplit | None, votes: Sequence[Vote]
) -> SplitPlan | Unsplit | None:
    """This rank's plan under the votes of all: split only if every rank can split.

    Pure: ranks with the same votes get the same answer to whether the step is split.  A plan
    that has to give way becomes ``Unsplit`` with reason ``other_rank_whole``.
    """
    if not isinstance(plan, SplitPlan):
        return plan
    for rank, vote in enumerate(votes):
        if not vote.splits:
            detail = f"rank {rank} runs its {vote.tokens} tokens whole: {vote.reason}"
            return Unsplit(plan.batch, "other_rank_whole", detail)
    return plan


class AgreementGroup:
    """Ranks that decide together, on gloo, apart from all other process groups.

    ``store``: any torch store that the ranks share.  ``name``: tells groups on one store apart.
    ``timeout``: seconds in which every rank must answer each call.  Every rank must construct the
    group, and then make the same calls in the same order.

    ``close()`` leaves the group, so that the others' calls fail at once; afterwards, and once a
    call found ranks silent, the group is of no more use and every call raises.
    Raises :class:`SilentRanks` when the ranks do not meet.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, timeout: float = 30.0, name: str = "step"
    ) -> None:
        if not 0 <= rank < size:
            raise AgreementError(f"rank {rank} of {size} does not exist; ranks count from 0.")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._groups: dict[str, Any] = {}
        # Also when the interpreter ends: gloo's threads must be gone before Python is.
        self.close = weakref.finalize(self, self._groups.clear)
        own = dist.PrefixStore(f"afd/agreement/{name}", store)
        limit = timedelta(seconds=timeout)
        try:
            own.set(f"met/{rank}", b"1")
            # A gloo group is dead after its first timeout; another then finds out who is there.
            for use in ("calls", "roll"):
                self._groups[use] = dist.ProcessGroupGloo(
                    dist.PrefixStore(use, own), rank, size, limit
                )
        except RuntimeError as error:  # torch has no narrower class for it
            absent = [other for other in range(size) if not own.check([f"met/{other}"])]
            self.close()
            raise self._silence(absent, error) from error

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, by rank; all of one length.

        Raises :class:`SilentRanks` within twice the timeout.
        """
        if "calls" not in self._groups:
            raise AgreementError("this agreement group has failed or was closed; make a new one.")
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._groups["calls"].allgather([everyone], [mine]).wait()
        except RuntimeError as error:
            del self._groups["calls"]
            absent = self._call_roll()
            self.close()
            raise self._silence(absent, error) from error
        return [bytes(given.numpy()) for given in everyone]

    def _call_roll(self) -> list[int]:
        """Ranks that have nothing to say even now that this call has failed.

        Ranks time out one after another, each at most the timeout after the first; so whoever
        says nothing for that long was not in the call, or has left it.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + self.timeout
        roll = self._groups["roll"]
        word = torch.zeros(1, dtype=torch.uint8)
        works: dict[int, list[Any]] = {rank: [] for rank in others}  # alive until all is over
        absent = []
        for rank in others:
            with suppress(RuntimeError):  # it has closed the connection
                works[rank].append(roll.recv([torch.empty_like(word)], rank, 0))
                works[rank].append(roll.send([word], rank, 0))
        for rank in others:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                works[rank][0].wait(timedelta(seconds=left))
            except (RuntimeError, IndexError):
                absent.append(rank)
        return absent

    def _silence(self, silent: Sequence[int], error: RuntimeError) -> SilentRanks:
        who = f"silent: {', '.join(map(str, silent))}" if silent else "all answer now, too late"
        return SilentRanks(
            f"rank {self.rank} of {self.size} got no answer from all ranks in {self.timeout:g} s; "
            f"{who}. The step was not run; look at the stacks of the silent ranks, or, where all "
            f"others are silent, at why this one came so late. ({error})",
            tuple(silent),
        )


def exchange_texts(group: AgreementGroup, text: str) -> tuple[str, ...]:
    """Every rank's text, by rank, in two calls, since records have one length.

    Raises :class:`SilentRanks` when a rank does not answer.
    """
    raw = text.encode()
    lengths = [
        int.from_bytes(given, "little") for given in group.gather(len(raw).to_bytes(8, "little"))
    ]
    gathered = group.gather(raw.ljust(max(1, *lengths), b"\0"))  # a call carries something
    return tuple(given[:length].decode() for given, length in zip(gathered, lengths, strict=True))


def _disagreement(group: AgreementGroup, text: str) -> PlanDisagreement:
    texts = exchange_texts(group, text)
    said: dict[str, list[str]] = {}
    for rank, told in enumerate(texts):
        said.setdefault(told, []).append(str(rank))
    lines = [f"  rank {', '.join(ranks)}: {told}" for told, ranks in said.items()]
    return PlanDisagreement(
        "the ranks decided differently, so that none runs this step:\n" + "\n".join(lines),
        texts,
    )


def _gather_alike(
    group: AgreementGroup, record: bytes, text: Callable[[], str], same: slice
) -> list[bytes]:
    """All records; :class:`PlanDisagreement` on every rank unless they are alike.

    Alike: of one kind, none withdrawn, and to the bit in ``same``.
    """
    records = group.gather(record)
    kinds = {given[0] for given in records}
    if len(kinds) > 1 or _WITHDRAWN in kinds or len({given[same] for given in records}) > 1:
        raise _disagreement(group, text())
    return records


def agree_on_plan(
    group: AgreementGroup, plan: SplitPlan | Unsplit, layout: Layout | None = None
) -> None:
    """Return once every rank has this very decision, and this ``layout`` where one is given.

    Raises :class:`PlanDisagreement` on every rank, with the decisions of all, and
    :class:`SilentRanks` when a rank does not answer.
    """
    record = _RECORD.pack(_PLAN, 0, _NO_TERMS, 0, decision_digest(plan, layout))
    _gather_alike(group, record, lambda: describe(plan, layout), _WHOLE)


def agree_on_split(
    group: AgreementGroup, plan: SplitPlan | Unsplit | None, terms: str = ""
) -> SplitPlan | Unsplit | None:
    """This rank's plan if every rank splits its own step, else one that runs whole.

    ``None`` for a rank without work, which then gets ``None`` back: nobody splits.
    ``terms``: by what ranks decide, in words; ranks with other terms disagree, whatever their
    plans for this step.
    Raises as :func:`agree_on_plan`.
    """
    vote = vote_of(plan)
    on = hashlib.sha256(terms.encode()).digest()[: len(_NO_TERMS)]
    record = _RECORD.pack(_VOTE, vote.splits, on, vote.tokens, vote.reason.encode()[:48])

    def text() -> str:
        mine = "idle, without a plan" if plan is None else describe(plan)
        return f"votes on the split: {mine}{terms and f'; decided by {terms}'}"

    votes = [
        Vote(bool(splits), tokens, reason.rstrip(b"\0").decode(errors="replace"))
        for _, splits, _, tokens, reason in map(
            _RECORD.unpack, _gather_alike(group, record, text, _TERMS)
        )
    ]
    return joint_plan(plan, votes)


def withdraw(group: AgreementGroup, why: BaseException) -> None:
    """Answer the others' call where this rank could not decide; they raise, at once, with ``why``.

    Returns on this rank, whose own error is the one to raise.
    """
    record = _RECORD.pack(_WITHDRAWN, 0, _NO_TERMS, 0, b"")
    with suppress(AgreementError):
        _gather_alike(group, record, lambda: f"withdrew: {type(why).__name__}: {why}", _WHOLE)
