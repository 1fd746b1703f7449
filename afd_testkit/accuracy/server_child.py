"""lm-eval on a running server: ``python -m afd_testkit.accuracy.server_child RUN.json``.

lm-eval's own ``local-completions`` builds the requests, sends them, waits and tries again; what
is added is that every finished answer is kept at once, and how it ended.  In a process of its
own, since lm-eval seeds, configures and imports for the whole process.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

from afd_testkit.accuracy.processes import end_with_parent
from afd_testkit.accuracy.server_journal import Journal
from afd_testkit.accuracy.server_protocol import (
    BadReply,
    NotOffered,
    ServerError,
    answer_logprobs,
    generation,
    read_reply,
)
from afd_testkit.accuracy.server_spec import ServerRun, ServerSpec
from afd_testkit.accuracy.spec import UNSEEN, Arm, ArmResult
from afd_testkit.accuracy.task import MAX_NEW_TOKENS, TASK, answers, facts_of, task_hash

SAY, PROBLEM = "say", "problem"
_SAY_SECONDS = 3.0
_NO_LIMIT = 1 << 30  # of a prompt's length: the server refuses what is too long

# Question of the request in hand; every request is a task of its own, with its own value.
_QUESTION: ContextVar[str] = ContextVar("_QUESTION")


class _Session:
    """The session that lm-eval posts through, with every reply read before lm-eval sees it."""

    def __init__(self, session: Any, model: str) -> None:
        self._session, self._model = session, model

    def post(self, url: str, **options: Any) -> Any:
        return self._session.post(url, raise_for_status=self._check, **options)

    async def _check(self, reply: Any) -> None:
        body = (await reply.read()).decode("utf-8", errors="replace")
        read_reply(reply.status, reply.content_type, body, self._model)


def make_model(run: ServerRun, journal: Journal) -> Any:
    """lm-eval's model for the server, which asks only what ``journal`` does not have."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    spec = run.spec

    class Model(LocalCompletionsAPI):  # type: ignore[misc]
        prompts: dict[str, tuple[str, str]]  # by question id: prompt and reference answer
        names: dict[str, str]  # question ids by prompt

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            """As upstream, of the questions that have no answer yet."""
            missing = [one for one in requests if str(one.doc["id"]) not in journal.answers]
            if missing:
                if self.tokenized_requests:
                    self._check_tokens(missing)
                super().generate_until(missing, disable_tqdm=True)
            return [journal.answers[str(one.doc["id"])][0] for one in requests]

        async def get_batched_requests(self, *args: Any, **options: Any) -> Any:
            # Upstream asks one at a time by other code; a limit of one here serves both.
            self.slots = asyncio.Semaphore(spec.concurrency)
            return await super().get_batched_requests(*args, **options)

        async def amodel_call(
            self, session: Any, sem: Any, messages: Any, *, cache_keys: Any = None, **options: Any
        ) -> Any:
            _QUESTION.set(self.names[cache_keys[0][0]])
            return await super().amodel_call(
                _Session(session, spec.model),
                self.slots,
                messages,
                cache_keys=cache_keys,
                **options,
            )

        def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
            """Keep the answer, then as upstream."""
            text, truncated = generation(outputs)
            journal.add_answer(_QUESTION.get(), text, truncated)
            return [text]

        def parse_logprobs(self, outputs: Any, **_: Any) -> list[tuple[float, bool]]:
            """Keep single tokens; their sum is what upstream wants."""
            name = _QUESTION.get()
            values = answer_logprobs(outputs, *self.prompts[name])
            journal.add_logprobs(name, values)
            return [(sum(values or ()), False)]

        def _check_tokens(self, requests: Sequence[Any]) -> None:
            for one in requests:
                prompt, name = one.args[0], one.doc["id"]
                tokens = self.tok_encode(prompt)
                if self.tokenizer.decode(tokens) != prompt:
                    raise ServerError(
                        f"the tokenizer in {spec.tokenizer} gives another text back than the "
                        f"prompt of question {name}; leave it out, and text is sent"
                    )
                room = self.max_length - MAX_NEW_TOKENS
                if len(tokens) > room:  # upstream would cut the beginning off
                    raise ServerError(
                        f"the prompt of question {name} has {len(tokens)} tokens, and the server "
                        f"takes {room} before an answer; serve it with a longer --max-model-len"
                    )

    length = run.served.max_model_len if spec.tokenizer else None
    model = Model(
        model=spec.model,
        base_url=f"{run.served.url}/v1/completions",
        tokenizer_backend="huggingface" if spec.tokenizer else None,
        tokenizer=spec.tokenizer,
        tokenized_requests=spec.tokenizer is not None,
        num_concurrent=max(2, spec.concurrency),
        max_retries=spec.tries,
        timeout=spec.timeout,
        max_gen_toks=MAX_NEW_TOKENS,
        max_length=(length or _NO_LIMIT) + 1,
        seed=spec.seeds["random_seed"],
    )
    model.prompts = _prompts(spec)
    model.names = {prompt: name for name, (prompt, _) in model.prompts.items()}
    return model


def _manager(spec: ServerSpec) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=spec.task, include_defaults=False)


def _prompts(spec: ServerSpec) -> dict[str, tuple[str, str]]:
    """By question id: the prompt that the task makes, and the reference answer after it."""
    task = _manager(spec).load([TASK])["tasks"][TASK]
    task.set_config("num_fewshot", spec.shots)
    task.set_fewshot_seed(spec.seeds["fewshot_random_seed"])
    task.build_all_requests(limit=spec.listed, rank=0, world_size=1)
    return {str(one.doc["id"]): (one.args[0], f" {one.doc['answer']}") for one in task.instances}


def _evaluate(model: Any, spec: ServerSpec) -> Any:
    """lm-eval's result object."""
    from lm_eval.evaluator import simple_evaluate

    return simple_evaluate(
        model=model,
        tasks=[TASK],
        num_fewshot=spec.shots,
        limit=spec.questions,
        task_manager=_manager(spec),
        log_samples=True,
        bootstrap_iters=0,
        **spec.seeds,
    )


def _teacher_forced(model: Any, spec: ServerSpec, journal: Journal) -> str:
    """Ask for what is missing of the log-probabilities; what there is to say of them."""
    names = list(model.prompts)[: spec.teacher_forced]
    if spec.backwards:
        names.reverse()
    missing = [name for name in names if name not in journal.logprobs]
    if missing and not journal.logprobs:  # the first one shows whether they are offered
        try:
            _force(model, missing[:1])
        except BadReply as error:
            if isinstance(error, NotOffered) or 400 <= error.status < 500:
                return f"not offered by the server: {error}"
            raise
        missing = missing[1:]
    if missing:
        _force(model, missing)
    unspelled = [name for name in names if journal.logprobs[name] is None]
    if unspelled:
        return f"of {len(names) - len(unspelled)}; the tokens do not spell {', '.join(unspelled)}"
    return f"of {len(names)}"


def _force(model: Any, names: Sequence[str]) -> None:
    pairs = [model.prompts[name] for name in names]
    texts = [prompt + answer for prompt, answer in pairs]
    keys = [(prompt, None) for prompt, _ in pairs]
    asyncio.run(model.get_batched_requests(texts, keys, generate=False))


def run_arm(run: ServerRun, journal: Journal) -> ArmResult:
    """Ask all that is missing, and judge all that is there."""
    started = time.perf_counter()
    spec = run.spec
    if task_hash() != run.asked.task_hash:
        raise ServerError("lm-eval's gsm8k task is another one than when the run began; run again")
    model = make_model(run, journal)
    facts: dict[str, Any] = {}
    samples: Sequence[Any] = ()
    if spec.questions:
        evaluated = _evaluate(model, spec)
        samples = evaluated["samples"][TASK]
        facts = facts_of(evaluated, spec.questions)
    said = _teacher_forced(model, spec, journal) if spec.teacher_forced else "not asked for"
    facts |= {
        "asked": asdict(run.asked),
        "server": asdict(run.served),
        "not_seen": "steps, splits, cut requests and balanced routing are inside of the server",
        "logprobs": said,
        "answers_of_an_earlier_run": journal.resumed,
        "timeout_seconds": spec.timeout,
        "tries": spec.tries,
        "concurrency": spec.concurrency,
    }
    return ArmResult(
        arm=Arm(run.name, UNSEEN, spec.questions, spec.teacher_forced, backwards=spec.backwards),
        answers=tuple(answers(samples, {n for n, (_, cut) in journal.answers.items() if cut})),
        logprobs={n: values for n, values in journal.logprobs.items() if values is not None},
        steps=0,
        split_steps=0,
        cut_requests=0,
        balanced_routing=0,
        seconds=time.perf_counter() - started,
        facts=facts,
    )


@contextmanager
def _progress(run: ServerRun, journal: Journal, say: Callable[[str], None]) -> Generator[None]:
    """Says every few seconds how far the arm is, inside."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_SAY_SECONDS):
            say(
                f"{run.name}: {len(journal.answers)} of {run.spec.questions} answered, "
                f"{len(journal.logprobs)} of {run.spec.teacher_forced} teacher-forced"
            )

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _why(error: Exception, run: ServerRun) -> str:
    spec = run.spec
    if isinstance(error, ServerError):
        return str(error)
    if isinstance(error, TimeoutError):
        return (
            f"no reply within {spec.timeout} s, asked {spec.tries} times; look at the server, and "
            "run the same command again"
        )
    return f"the connection failed ({error or type(error).__name__}), tried {spec.tries} times"


def main(path: str, say: Callable[[str, str], None]) -> int:
    """The arm in the file ``path``; exit status."""
    client_error: type[Exception] = importlib.import_module("aiohttp").ClientError
    run = ServerRun.read(Path(path))
    try:
        with Journal(run) as journal:
            try:
                with _progress(run, journal, lambda text: say(SAY, text)):
                    run_arm(run, journal).write(Path(run.spec.results))
            except (ServerError, TimeoutError, client_error) as error:
                kept = (
                    f"{len(journal.answers)} of {run.spec.questions} questions of {run.name} are "
                    f"answered and kept in {journal.path}; the same command again goes on there"
                )
                raise ServerError(f"{run.served.url}: {_why(error, run)}. {kept}") from error
    except ServerError as error:
        say(PROBLEM, str(error))
        return 1
    return 0


if __name__ == "__main__":
    end_with_parent()
    # Only events go to standard output; what libraries print there goes to the log.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:
        os.dup2(2, 1)

        def tell(kind: str, text: str) -> None:
            """One event, as a line of JSON."""
            events.write(json.dumps({kind: text}) + "\n")
            events.flush()

        status = main(sys.argv[1], tell)
    sys.exit(status)
