"""Makes built-in models in a cache folder: complete or not at all, also with two makers.

A model is written to a temporary folder beside its place, read back against its manifest,
and renamed into place.  A cached model is hashed against its manifest before each use (a
few megabytes); one that was damaged is remade, and ``progress`` is told why.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afd_testkit.models.errors import CacheFolderError
from afd_testkit.models.recipes import Recipe, recipe
from afd_testkit.models.tokens import BOS_ID, EOS_ID, PAD_ID, tokenizer_files
from afd_testkit.models.weights import make_tensors

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
Progress = Callable[[str], None]


def ensure_model(name: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Folder of the built-in model ``name``, made now unless it is there and intact.

    Raises :class:`UnknownRecipe`, or :class:`CacheFolderError` when it cannot be written.
    """
    made = recipe(name)
    say = progress if progress is not None else _silent
    target = cache_dir / made.folder
    if target.exists():
        damage = find_damage(target)
        if damage is None:
            return target
        say(f"cached model {target} is damaged ({damage}); making it again")
    else:
        say(f"making model {name} in {target}")
    try:
        _replace(made, target)
    except OSError as error:
        raise CacheFolderError(
            f"cannot write model {name} to the cache folder {cache_dir}: {error}; "
            "choose a folder that can be written"
        ) from error
    return target


def find_damage(folder: Path) -> str | None:
    """What is wrong with a made model, or ``None``: every file has the manifest's hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is unreadable: {error}"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes instead of {entry['bytes']}"
        if _sha256(path) != entry["sha256"]:
            return f"{name} has another content than when it was made"
    return None


def _replace(made: Recipe, target: Path) -> None:
    """Write the model beside ``target`` and move it there; another maker may win the race."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{made.name}-") as scratch:
        fresh = Path(scratch) / "made"
        fresh.mkdir()
        _write(made, fresh)
        damage = find_damage(fresh)
        if damage is not None:
            raise OSError(f"what was written reads back wrong: {damage}")
        if target.exists() and find_damage(target) is not None:
            target.rename(Path(scratch) / "damaged")
        try:
            fresh.rename(target)
        except OSError:
            # A folder that appeared meanwhile is another maker's; intact, it is as good.
            if not target.exists() or find_damage(target) is not None:
                raise


def _write(made: Recipe, folder: Path) -> None:
    """All files of the model, then the manifest over them."""
    from safetensors.torch import save_file

    contents: dict[str, dict[str, Any]] = {
        "config.json": dict(made.config),
        "generation_config.json": {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        },
        **tokenizer_files(),
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=1, sort_keys=False, ensure_ascii=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    save_file(make_tensors(made), folder / WEIGHTS, metadata={"format": "pt"})
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"recipe": made.name, "version": made.version, "digest": made.digest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def remove_model(name: str, cache_dir: Path) -> None:
    """Forget the cached model ``name``; harmless when there is none."""
    target = cache_dir / recipe(name).folder
    if target.exists():
        shutil.rmtree(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _silent(_message: str) -> None:
    return None
