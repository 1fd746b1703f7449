"""Accuracy of a running OpenAI-compatible server, and of one against a stored baseline.

An arm is a server: one that splits, one that does not.  What happens inside cannot be seen from
here; that the arm splits is for whoever started it to show.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from afd_testkit.accuracy.processes import end_of, offline_environment
from afd_testkit.accuracy.questions import Question
from afd_testkit.accuracy.server_journal import Journal
from afd_testkit.accuracy.server_protocol import Served, ServerError, ask_server
from afd_testkit.accuracy.server_spec import Asked, ServerRun, ServerSpec, asked_of
from afd_testkit.accuracy.spec import BASELINE, UNSEEN, ArmResult

CHILD = "afd_testkit.accuracy.server_child"
_NEEDED = ("lm_eval", "aiohttp", "tenacity", "tqdm", "requests")


class BaselineRefused(ServerError):
    """A stored arm cannot be what another one is compared with."""


def run_server_arm(
    name: str, spec: ServerSpec, say: Callable[[str], None], served: Served | None = None
) -> ArmResult:
    """Ask the server of ``spec`` all that an earlier call with the same did not finish.

    Leaves ``name.json`` in the results folder, and ``name.journal.jsonl``, which the next call
    goes on with: remove it when the result has been judged.  ``served``: what
    ``ask_server`` said, where it was asked already.
    Raises :class:`ServerError`: what is wrong, how much is done, where it is kept.
    """
    if lacking := [one for one in _NEEDED if importlib.util.find_spec(one) is None]:
        raise ServerError(
            f"{', '.join(lacking)} not installed here; pip install 'lm-eval[api]==0.4.13'"
        )
    if served is None:
        served = ask_server(spec.url, spec.model)
    run = ServerRun(name, spec, served, asked_of(spec, served))
    folder = Path(spec.results).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(run):  # refused here, where nothing was started yet
        pass
    told, log, result = (folder / f"{name}{end}" for end in (".run", ".log", ".json"))
    run.write(told)
    result.unlink(missing_ok=True)
    say(
        f"{name}: {spec.questions} questions to {served.model} at {served.url}, {spec.concurrency} "
        f"at a time, each within {spec.timeout} s"
    )
    problem = _run(told, log, say)
    if problem is None and not result.exists():
        problem = (
            f"{served.url}: the run of {name} broke off; what is answered is kept in "
            f"{run.journal}, and the same command again goes on there. The end of {log}:\n"
            f"{end_of(log)}"
        )
    if problem is not None:
        raise ServerError(problem)
    found = ArmResult.read(result)
    say(f"{name}: {len(found.answers)} answered, {found.seconds:.0f} s")
    return found


def load_baseline(path: Path, expected: Asked, asked: Sequence[Question]) -> ArmResult:
    """The stored arm in ``path``, if it answered what ``expected`` asks.

    ``expected``: ``asked_of`` the arm that is to be compared with it; ``asked``: its questions.
    Raises :class:`BaselineRefused`, naming every difference.
    """
    try:
        found = ArmResult.read(path)
    except (OSError, ValueError) as error:
        raise BaselineRefused(
            f"the baseline {path} cannot be read ({error}); give the .json that the run of the "
            "unsplit server left"
        ) from error
    try:
        differences = Asked.read(found.facts.get("asked")).differences(expected)
    except ServerError as error:
        raise BaselineRefused(
            f"the baseline {path}: {error}; give one that a run against a server left"
        ) from error
    ids = {one.id for one in found.answers}
    if len(ids) != expected.count or len(found.answers) != expected.count:
        differences.append(f"answers: {len(ids)} there, {expected.count} here")
    told = (found.arm.name, found.arm.policy, found.arm.backwards)
    if told != (BASELINE, UNSEEN, False):
        differences.append(f"arm: {told[0]!r} there, {BASELINE!r} here")
    differences += _other_answers(found, asked)
    if strange := sorted((ids | set(found.logprobs)) - {one.id for one in asked}):
        differences.append(f"ids that no question has: {', '.join(strange[:3])}")
    if found.arm.fault is not None:
        differences.append(f"fault: {found.arm.fault!r} there, none here")
    if found.steps or found.split_steps or found.cut_requests:
        differences.append(f"steps: {found.steps} there, none of a server's can be seen")
    if found.balanced_routing:
        differences.append(f"forced balancing: {found.balanced_routing} times there")
    if differences:
        raise BaselineRefused(
            f"the baseline {path} is of another run ({'; '.join(differences)}); run the unsplit "
            "server again with what is asked here"
        )
    return found


def _other_answers(found: ArmResult, asked: Sequence[Question]) -> list[str]:
    """Answers that are not to the questions ``asked``, or whose verdict is not their text's."""
    questions = {one.id: one for one in asked}
    wrong = [
        one.id
        for one in found.answers
        if one.id in questions
        and (
            one.question != questions[one.id].question
            or one.strict != (_plain(one.got) == _plain(questions[one.id].result))
        )
    ]
    return [f"answers that say otherwise than their text: {', '.join(wrong[:3])}"] if wrong else []


def _plain(number: str) -> str:
    """A result without what the gsm8k task does not look at."""
    return number.replace(",", "").replace("$", "").removesuffix(".").strip().lower()


def _run(told: Path, log: Path, say: Callable[[str], None]) -> str | None:
    """Run the child to its end; the problem that it tells.

    It needs no watchdog: everything it waits for has a timeout.
    """
    problem = None
    with (
        log.open("w", encoding="utf-8") as kept,
        subprocess.Popen(
            [sys.executable, "-m", CHILD, str(told)],
            stdout=subprocess.PIPE,
            stderr=kept,
            text=True,
            env={**offline_environment(told.parent), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                event = json.loads(line)
                problem = event.get("problem", problem)
                if "say" in event:
                    say(event["say"])
        except BaseException:  # an interrupt: nothing may go on asking
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return problem
