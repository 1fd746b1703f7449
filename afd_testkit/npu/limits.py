"""What the device's kernels do not take, enforced unless it is relaxed.

The Ascend documentation states for each operator the dtypes, alignments and layouts that its
kernel accepts.  A reference that took more would let code pass here that fails on a device, so
each reference states those limits with :func:`limit`.  Comparing in fp32 what a device computes
in bf16 needs one kind relaxed; what is relaxed is written into every record.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from afd_testkit.npu.errors import KernelLimit

KINDS = ("dtype", "alignment", "layout")
# Children inherit it: the emulation runs in worker processes too.
VARIABLE = "AFD_NPU_RELAX"


def relaxed_kinds(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The kinds of limits that ``environment`` relaxes; ``ValueError`` for a kind unknown."""
    text = environment.get(VARIABLE, "")
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    if unknown := kinds - set(KINDS):
        raise ValueError(
            f"{VARIABLE}={text!r} names {', '.join(sorted(unknown))}; kinds are {', '.join(KINDS)}."
        )
    return kinds


def limit(operator: str, kind: str, holds: bool, what: str) -> None:
    """:class:`KernelLimit` unless ``holds`` or ``kind`` is relaxed.

    ``what`` says the limit, the value that breaks it and what to do.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of limit; kinds are {', '.join(KINDS)}.")
    if not holds and kind not in relaxed_kinds():
        raise KernelLimit(
            f"{operator}: {what} (limit of kind {kind!r}; {VARIABLE}={kind} relaxes it)"
        )


@contextmanager
def relaxed(*kinds: str) -> Generator[None, None, None]:
    """Relax ``kinds`` inside, in this process and in children that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(sorted(relaxed_kinds() | set(kinds)))
    relaxed_kinds()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
