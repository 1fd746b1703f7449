"""Files in the results folder: written whole or not at all, never over someone else's."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


class ResultsFolderError(Exception):
    """The results folder cannot take files; carries ``path``, ``reason`` and ``remedy``."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        self.path, self.reason, self.remedy = path, reason, remedy
        super().__init__(f"cannot write results into {str(path)!r}: {reason}. {remedy}")


_REMEDY = "Name a folder that this user may create and write to."


def check_writable(directory: Path) -> None:
    """Create ``directory`` if need be, and write and delete a small file in it.

    To be called before anything runs.  Raises :class:`ResultsFolderError`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        reason = "it exists and is not a folder"
        raise ResultsFolderError(directory, reason, _REMEDY) from None
    except NotADirectoryError:
        reason = "a part of the path is a file, not a folder"
        raise ResultsFolderError(directory, reason, _REMEDY) from None
    except OSError as error:
        raise ResultsFolderError(directory, explain(error), _REMEDY) from error
    try:
        descriptor, probe = tempfile.mkstemp(prefix=".afd-probe-", dir=directory)
        try:
            os.write(descriptor, b"probe")
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        raise ResultsFolderError(directory, explain(error), _REMEDY) from error


def explain(error: OSError) -> str:
    """The operating system's words, in lower case, to stand inside a sentence."""
    text = error.strerror or str(error) or type(error).__name__
    return text[0].lower() + text[1:]


def free_stem(directory: Path, stem: str, suffixes: tuple[str, ...]) -> str:
    """``stem``, or ``stem-2``, ``stem-3``, ... if a file of that name with a suffix exists."""
    candidate, number = stem, 1
    while any((directory / f"{candidate}{suffix}").exists() for suffix in suffixes):
        number += 1
        candidate = f"{stem}-{number}"
    return candidate


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` through a temporary file in the same folder.

    A reader sees the old state or the whole new file; after an exception of any kind
    nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_or_fall_back(directory: Path, name: str, content: bytes) -> tuple[Path, str]:
    """Write a file into ``directory`` or, where that fails, into the system's temporary folder.

    Returns the path and an empty string, or the sentence that says what went wrong.
    Raises :class:`ResultsFolderError` if neither folder takes it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / name, content)
    except OSError as error:
        spare = Path(tempfile.gettempdir())
        suffix = "".join(Path(name).suffixes[-1:])
        path = spare / f"{free_stem(spare, name.removesuffix(suffix), (suffix,))}{suffix}"
        try:
            write_atomic(path, content)
        except OSError as second:
            reason = f"{explain(error)}; and {str(spare)!r} does not take them: {explain(second)}"
            raise ResultsFolderError(directory, reason, _REMEDY) from second
        notice = f"{str(directory)!r} became unwritable ({explain(error)}); wrote {str(path)!r}"
        return path, notice
    return directory / name, ""
