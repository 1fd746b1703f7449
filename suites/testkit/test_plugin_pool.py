"""The engine pool: sharing, eviction, death, and closing whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from afd_testkit.engines.base import (
    EngineConfig,
    EngineDied,
    PrefillEngine,
    Prompt,
    RunResult,
    SplitSetting,
)
from afd_testkit.pool import EnginePool, UnknownEngine
from afd_testkit.settings import Settings

pytestmark = pytest.mark.cpu

A, B, C = (EngineConfig(name) for name in "abc")
RESULT = RunResult(requests=(), steps=(), seconds=0.0)


class Engine:
    """Writes down what happens to it; model ``dies`` dies at its first run."""

    name = "mine"

    def __init__(self, config: EngineConfig, log: list[str]) -> None:
        self.config = config
        self.log = log

    def versions(self) -> dict[str, str]:
        return {"mine": "1"}

    def vocab_size(self) -> int:
        return 7

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008  # as in the Protocol
        fault: str | None = None,
    ) -> RunResult:
        self.log.append(f"run {len(prompts)} {split.policy} {fault}")
        if self.config.model == "dies":
            raise EngineDied("gone")
        return RESULT

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")
        if self.config.model == "dies":
            raise EngineDied("gone")

    def close(self) -> None:
        self.log.append(f"close {self.config.model}")
        if self.config.model == "stuck":
            raise OSError("stuck")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def pool(log: list[str]) -> EnginePool:
    def start(config: EngineConfig, settings: Settings) -> PrefillEngine | None:
        log.append(f"start {settings.engine} {config.model}")
        return Engine(config, log) if settings.engine in ("mine", "other") else None

    @contextmanager
    def adopting() -> Iterator[None]:
        yield

    settings = Settings((), None, (), None, Path("results"), Path("cache"))
    return EnginePool(settings, start, lambda: ["mine", "other"], adopting)


def test_equal_configurations_share_an_engine(pool: EnginePool, log: list[str]) -> None:
    assert pool.get(A, "mine") is pool.get(EngineConfig("a"), "mine")
    assert pool.get(A, "other") is not pool.get(A, "mine")
    assert log == ["start mine a", "start other a"]


def test_the_longest_unused_engine_makes_room(pool: EnginePool, log: list[str]) -> None:
    first = pool.get(A, "mine")
    pool.get(B, "mine")
    assert pool.get(A, "mine") is first
    pool.get(C, "mine")
    assert log == ["start mine a", "start mine b", "close b", "start mine c"]
    assert pool.get(A, "mine") is first


@pytest.mark.parametrize("call", ["run", "reset"])
def test_a_dead_engine_is_replaced(pool: EnginePool, log: list[str], call: str) -> None:
    config = EngineConfig("dies")
    engine = pool.get(config, "mine")
    with pytest.raises(EngineDied, match="gone"):
        engine.run([]) if call == "run" else engine.reset_prefix_cache()
    assert pool.get(config, "mine") is not engine
    assert log[-2:] == ["close dies", "start mine dies"]


def test_a_closed_engine_is_replaced(pool: EnginePool) -> None:
    engine = pool.get(A, "mine")
    engine.close()
    assert pool.get(A, "mine") is not engine


def test_calls_are_passed_on(pool: EnginePool, log: list[str]) -> None:
    engine: PrefillEngine = pool.get(A, "mine")
    prompt = Prompt("p", (1, 2))
    assert engine.run([prompt], split=SplitSetting("token"), fault="f") is RESULT
    engine.reset_prefix_cache()
    assert log == ["start mine a", "run 1 token f", "reset"]
    assert (engine.versions(), engine.vocab_size()) == ({"mine": "1"}, 7)
    assert engine.tokenize("ab") == (97, 98)


def test_unknown_and_unnamed_engines(pool: EnginePool) -> None:
    with pytest.raises(UnknownEngine, match="named 'theirs'; known names are mine, other"):
        pool.get(A, "theirs")
    with pytest.raises(UnknownEngine, match=r"no engine is named; .*--afd-engine: mine, other"):
        pool.get(A)


def test_all_are_closed_though_one_fails(pool: EnginePool, log: list[str]) -> None:
    pool.get(EngineConfig("stuck"), "mine")
    pool.get(A, "mine")
    with pytest.raises(OSError, match="stuck"):
        pool.close()
    assert log[-2:] == ["close stuck", "close a"]
    pool.close()
    assert log[-1] == "close a"
