"""The ``afd-testkit`` command.

Exit status: 0 when a command ran to its end, 2 for arguments it cannot use or a stack that
lacks what it needs.  Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_REQUESTS = (1, 8, 64, 512, 4096)
DEFAULT_RUNS = 500
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
    Console(width=None if sys.stdout.isatty() else 120).print(bench.table(report))
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        except OSError as error:
            print(f"afd-testkit bench split: {arguments.json}: {error}", file=sys.stderr)
            return UNUSABLE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="afd-testkit", description="Tools beside the gates, which pytest runs."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.  Bad arguments raise ``SystemExit(2)``."""
    arguments = _parser().parse_args(argv)
    status: int = arguments.handler(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
