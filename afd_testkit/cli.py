"""The ``afd-testkit`` command.

Exit status: 0 when a command ran to its end, 2 for arguments it cannot use or a stack that
lacks what it needs.  Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afd_testkit import emulate

DEFAULT_REQUESTS = (1, 8, 64, 512, 4096)
DEFAULT_RUNS = 500
DEFAULT_TOKENS = (4096, 8192, 16_384, 32_768, 65_536)
DEFAULT_TP = (2, 4, 8)
DEFAULT_HIDDEN = 7168  # DeepSeek-V3
MAX_TOKENS = 2**24
MAX_TP = 1024
MAX_REQUESTS = 65_536
UNUSABLE = 2


def _whole(text: str, low: int, high: int, what: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {what}; give a whole number from {low} to {high}"
        )
    return number


def _sizes(text: str) -> tuple[int, ...]:
    """``1,8,64`` as distinct batch sizes in the given order."""
    sizes = [_whole(part, 1, MAX_REQUESTS, "number of requests") for part in text.split(",")]
    return tuple(dict.fromkeys(sizes))


def _tokens(text: str) -> tuple[int, ...]:
    """``4K,65536`` as distinct token counts in the given order; K is 1024."""
    parts = [re.sub(r"^(\d+)[kK]$", lambda m: str(int(m[1]) * 1024), p) for p in text.split(",")]
    sizes = [_whole(part, 2, MAX_TOKENS, "number of tokens") for part in parts]
    return tuple(dict.fromkeys(sizes))


def _tp_sizes(text: str) -> tuple[int, ...]:
    sizes = [_whole(part, 2, MAX_TP, "TP size of several ranks") for part in text.split(",")]
    return tuple(dict.fromkeys(sizes))


def _hidden(text: str) -> int:
    return _whole(text, 1, 2**20, "hidden size")


def _dtype_bytes(text: str) -> int:
    return _whole(text, 1, 8, "number of bytes of a value")


def _runs(text: str) -> int:
    return _whole(text, 1, 1_000_000, "number of runs")


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; give the name of a file in an existing folder"
        )
    return path


def _bench_split(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from afd_testkit import bench

    try:
        upstream = bench.load_upstream()
    except bench.UpstreamMissing as error:
        print(f"afd-testkit bench split: {error}", file=sys.stderr)
        return UNUSABLE
    report = bench.run(
        upstream,
        arguments.requests,
        arguments.runs,
        inference_mode=arguments.inference_mode,
        console=Console(stderr=True),
    )
    return _show("split", bench.table(report), report.as_dict(), arguments.json)


def _bench_layout(arguments: argparse.Namespace) -> int:
    from afd_testkit import bench_layout

    try:
        report = bench_layout.run(
            arguments.tokens, arguments.tp, arguments.hidden, arguments.dtype_bytes
        )
    except ValueError as error:
        print(f"afd-testkit bench layout: {error}", file=sys.stderr)
        return UNUSABLE
    return _show("layout", bench_layout.table(report), report.as_dict(), arguments.json)


def _drift(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from afd_testkit import drift

    width = None if sys.stdout.isatty() else 160
    return drift.run(Console(width=width), Console(stderr=True))


def _show(subject: str, table: Any, figures: dict[str, Any], file: Path | None) -> int:
    """Print the figures, and write them where a file is given."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if file is None:
        return 0
    try:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        print(f"afd-testkit bench {subject}: {file}: {error}", file=sys.stderr)
        return UNUSABLE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="afd-testkit", description="Tools beside the gates, which pytest runs."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    emulate.add_parser(commands)
    bench = commands.add_parser("bench", help="measure", description="Measure; judge nothing.")
    subjects = bench.add_subparsers(title="subjects", metavar="SUBJECT", required=True)
    split = subjects.add_parser(
        "split",
        help="the splitter against vLLM's own ubatch slicing",
        description="Time planning and slicing of one step against vLLM's own "
        "maybe_create_ubatch_slices + split_attn_metadata: in one process, on one thread, "
        "interleaved, on the same metadata.",
    )
    split.add_argument(
        "--requests",
        type=_sizes,
        default=DEFAULT_REQUESTS,
        metavar="N,N,…",
        help=f"requests of a step (default: {','.join(map(str, DEFAULT_REQUESTS))})",
    )
    split.add_argument(
        "--runs",
        type=_runs,
        default=DEFAULT_RUNS,
        metavar="N",
        help="timed pairs for each row (default: %(default)s)",
    )
    split.add_argument(
        "--inference-mode",
        action="store_true",
        help="measure both sides under torch.inference_mode(), as inside a runner's step",
    )
    split.add_argument("--json", type=_new_file, metavar="FILE", help="also write the figures")
    split.set_defaults(handler=_bench_split)
    _add_layout(subjects)
    drift = commands.add_parser(
        "drift",
        help="the installed vLLM / vLLM-Ascend against the pinned contracts",
        description="Compare the installed vLLM, or vLLM-Ascend and its vLLM, with what the split "
        "was written for, and print every difference. Exit status: 0 none, 1 differences, "
        "2 nothing to compare.",
    )
    drift.set_defaults(handler=_drift)
    return parser


def _add_layout(subjects: Any) -> None:
    layout = subjects.add_parser(
        "layout",
        help="bytes that sharded tokens travel, beside a full all-gather",
        description="Count the bytes that move when a step sharded over tensor-parallel ranks "
        "becomes two stages, each sharded on its own: by the exchange, and by an all-gather of "
        "everything. Counted from the exchange's own plans; nothing is sent.",
    )
    layout.add_argument(
        "--tokens",
        type=_tokens,
        default=DEFAULT_TOKENS,
        metavar="N,N,…",
        help="tokens of a step, 4K being 4096 (default: 4K,8K,16K,32K,64K)",
    )
    layout.add_argument(
        "--tp",
        type=_tp_sizes,
        default=DEFAULT_TP,
        metavar="N,N,…",
        help=f"tensor-parallel ranks (default: {','.join(map(str, DEFAULT_TP))})",
    )
    layout.add_argument(
        "--hidden",
        type=_hidden,
        default=DEFAULT_HIDDEN,
        metavar="N",
        help="values a token (default: %(default)s)",
    )
    layout.add_argument(
        "--dtype-bytes",
        type=_dtype_bytes,
        default=2,
        metavar="N",
        help="bytes a value (default: %(default)s)",
    )
    layout.add_argument("--json", type=_new_file, metavar="FILE", help="also write the figures")
    layout.set_defaults(handler=_bench_layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.  Bad arguments raise ``SystemExit(2)``."""
    arguments = _parser().parse_args(argv)
    status: int = arguments.handler(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
