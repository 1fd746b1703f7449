"""Mixture of experts within one rank: choosing experts, sorting rows by expert, grouped products.

The operators live in the modules whose names begin with ``moe_``; those that exchange rows
between ranks are in ``communication``.
"""

from __future__ import annotations

from afd_testkit.npu.ops import moe_finalize, moe_gating, moe_matmul, moe_rows

__all__ = ["moe_finalize", "moe_gating", "moe_matmul", "moe_rows"]
