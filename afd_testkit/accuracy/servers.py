"""The arms of a run that are servers: asked one after the other, judged as those of an engine."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from afd_testkit.accuracy.judge import NOISE, Judge
from afd_testkit.accuracy.margins import margin_of
from afd_testkit.accuracy.options import ServerOptions
from afd_testkit.accuracy.plan import TEACHER_FORCED
from afd_testkit.accuracy.questions import Question, digest
from afd_testkit.accuracy.server import BaselineRefused, load_baseline, run_server_arm
from afd_testkit.accuracy.server_protocol import (
    Served,
    ServerError,
    ask_server,
    check_pair,
    models_of,
)
from afd_testkit.accuracy.server_spec import Asked, ServerSpec, asked_of
from afd_testkit.accuracy.spec import BASELINE, BEHIND_A_SERVER, UNSEEN, Arm, ArmResult, Spec
from afd_testkit.accuracy.task import MAX_SHOTS, write_task

ARM = "server"
KEPT = "baseline"  # folder for a baseline's answers, in that of the results


def server_arms(options: ServerOptions) -> list[Arm]:
    """The arms that are judged; how many questions they answer is not known here."""
    names = [BASELINE] if options.arm is None else [BASELINE, ARM]
    return [Arm(name, UNSEEN, 0, 0) for name in names]


def judge_servers(
    options: ServerOptions,
    asked: Sequence[Question],
    shots: Sequence[Question],
    folders: tuple[Path, Path],
    say: Callable[[str], None],
) -> Judge:
    """Ask the servers; ``folders``: cache, where a broken run is kept, and results.

    Raises ``ServerError`` for servers that cannot be compared, before any question, and for one
    that stops answering; what is answered is kept, and the same call goes on there.
    """
    cache, results = folders
    served = {url: _served(url, options) for url in (options.arm, options.baseline) if url}
    if options.arm and options.baseline:
        check_pair(served[options.arm], served[options.baseline])
    folder = cache / "accuracy" / _key(options, asked, shots)
    task = write_task(folder / "task", asked, shots)

    def spec(url: str, *, noise: bool = False) -> ServerSpec:
        return ServerSpec(
            url=url,
            model=served[url].model,
            task=str(task),
            results=str(folder),
            shots=MAX_SHOTS,
            questions=0 if noise else len(asked),
            teacher_forced=min(len(asked), TEACHER_FORCED),
            backwards=noise,
        )

    found: dict[str, ArmResult] = {}
    if options.stored is not None and options.arm is not None:
        one = spec(options.arm)
        found[BASELINE] = load_baseline(options.stored, asked_of(one, served[options.arm]), asked)
        found[NOISE] = _stored_noise(options.stored, found[BASELINE])
    if options.baseline is not None:
        for name in (BASELINE, NOISE):
            one = spec(options.baseline, noise=name == NOISE)
            found[name] = run_server_arm(name, one, say, served[options.baseline])
    if options.arm is not None:
        found[ARM] = run_server_arm(ARM, spec(options.arm), say, served[options.arm])
    if options.baseline is not None:
        _keep(folder, results / KEPT)
    shutil.rmtree(folder)  # only a run that broke off is gone on with
    [model] = {one.model for one in served.values()}
    return Judge(
        spec=Spec(
            model=model,
            dtype=options.dtype,
            task=str(task),
            results=str(folder),
            shots=MAX_SHOTS,
            arms=tuple(result.arm for result in found.values()),
        ),
        model=Path(model).name,
        margin=margin_of(model),
        questions=digest(asked),
        results=found,
        engine=BEHIND_A_SERVER,
    )


def _served(url: str, options: ServerOptions) -> Served:
    if options.model is not None:
        return ask_server(url, options.model)
    listed = models_of(url)
    if len(listed) != 1:
        raise ServerError(
            f"{url} lists {len(listed)} models ({', '.join(listed) or 'none'}); say which with "
            "--afd-server-model"
        )
    return ask_server(url, listed[0])


def _key(options: ServerOptions, asked: Sequence[Question], shots: Sequence[Question]) -> str:
    """Names the folder in which the same command goes on after a break."""
    parts = (*options.words(), digest(asked), digest(shots))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _stored_noise(baseline: Path, told: ArmResult) -> ArmResult:
    """The noise measured with the baseline ``told``, which was asked the same."""
    path = baseline.parent / f"{NOISE}.json"
    try:
        found = ArmResult.read(path)
        asked = Asked.read(found.facts.get("asked"))
        differences = replace(asked, questions="", count=0).differences(
            replace(Asked.read(told.facts.get("asked")), questions="", count=0)
        )
    except (OSError, ValueError, ServerError) as error:
        raise BaselineRefused(
            f"{path.name}, the noise of the baseline {baseline}, cannot be read ({error}); keep "
            "both files of a run together"
        ) from error
    lengths = [{k: len(v) for k, v in one.logprobs.items()} for one in (found, told)]
    if not found.arm.backwards or differences or lengths[0] != lengths[1]:
        raise BaselineRefused(
            f"{path} is not the noise of the baseline {baseline} "
            f"({'; '.join(differences) or 'of other questions'}); keep both files of a run together"
        )
    return found


def _keep(folder: Path, kept: Path) -> None:
    """The baseline's answers, for runs with ``--afd-baseline``."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in (BASELINE, NOISE):
        shutil.copyfile(folder / f"{name}.json", kept / f"{name}.json")
