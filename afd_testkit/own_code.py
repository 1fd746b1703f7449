"""Which code judged a run: the imported packages, against the checkout the run was started in.

An installed copy stays what it was when the checkout moves on, so a commit is worth recording
only once the files that ran are known to be the files of that checkout.  Nothing is imported
here: the packages are found, not loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from afd_testkit.provenance import Source

PACKAGES = ("afd_plugin", "afd_testkit")
#: Endings of the files that decide what runs, what is judged and what is shown.
SUFFIXES = frozenset({".py", ".json", ".jsonl", ".j2", ".css"})


class Relation(StrEnum):
    """How the imported packages relate to the checkout."""

    SAME = "same"
    DIFFERS = "differs"
    ANOTHER_PROJECT = "another project"  # the checkout holds neither package
    NONE = "none"  # there is no checkout


@dataclass(frozen=True)
class Code:
    """The imported packages: their version, and one digest over all their files.

    ``sha256`` is that of the lines ``<sha256 of a file>  <package>/<path>``, in the order of
    the paths, each with a newline: what ``sha256sum`` prints.  ``version`` is ``None`` where
    they are imported without having been installed.
    """

    sha256: str
    version: str | None
    checkout: Relation


def identify(source: Source, root: Path | None) -> tuple[Source, Code]:
    """The imported code against the checkout at ``root`` (``None``: there is none).

    Where they differ, the source comes back without commit and state, and says why.
    """
    ran = _digests({name: package_folder(name) for name in PACKAGES})
    relation, first = _relate(ran, root)
    listing = "".join(f"{digest}  {path}\n" for path, digest in sorted(ran.items()))
    code = Code(hashlib.sha256(listing.encode()).hexdigest(), _version(), relation)
    if relation is not Relation.DIFFERS:
        return source, code
    note = (
        f"the installed {' and '.join(PACKAGES)} differ from this checkout (first: {first}); "
        "reinstall, for example with tox -e gate"
    )
    return replace(source, commit=None, dirty=None, untracked=None, note=note), code


def package_folder(name: str) -> Path | None:
    """The folder that ``import name`` takes its files from; ``None`` where there is none."""
    spec = find_spec(name)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def _relate(ran: dict[str, str], root: Path | None) -> tuple[Relation, str]:
    """How ``ran`` (path to digest) relates to ``root``, and the first path that differs."""
    if root is None:
        return Relation.NONE, ""
    folders = {name: root / name for name in PACKAGES}
    if not any(folder.is_dir() for folder in folders.values()):
        return Relation.ANOTHER_PROJECT, ""
    here = _digests(folders)
    differing = [path for path in sorted({*ran, *here}) if ran.get(path) != here.get(path)]
    return (Relation.DIFFERS, differing[0]) if differing else (Relation.SAME, "")


def _digests(folders: Mapping[str, Path | None]) -> dict[str, str]:
    """``<package>/<path>`` to the SHA-256 of the file's content."""
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": _sha256(path)
        for name, folder in folders.items()
        if folder is not None
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version() -> str | None:
    try:
        return metadata.version("afd-testkit")
    except metadata.PackageNotFoundError:
        return None
