"""Running engines, shared by all tests of a session: one start for each configuration."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from afd_testkit.engines.base import (
    SERVING,
    EngineConfig,
    EngineDied,
    EngineError,
    PrefillEngine,
    Prompt,
    RoutingSetting,
    RunResult,
    SplitSetting,
    told,
)

if TYPE_CHECKING:
    from afd_testkit.settings import Settings

MAX_ALIVE = 2


class UnknownEngine(EngineError):
    """No plugin serves an engine of the wanted name."""


class PooledEngine:
    """A running engine on loan: the same calls, and the pool learns when it has died."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine
        self.name = engine.name
        self.config = engine.config
        self.alive = True

    def versions(self) -> dict[str, str]:
        """As the engine answers."""
        return self._engine.versions()

    def vocab_size(self) -> int:
        """As the engine answers."""
        return self._engine.vocab_size()

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the engine answers."""
        return self._engine.tokenize(text)

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008  # frozen, as in the Protocol
        fault: str | None = None,
        routing: RoutingSetting = SERVING,
    ) -> RunResult:
        """As the engine runs; :class:`EngineDied` also makes the pool forget this engine."""
        try:
            return self._engine.run(prompts, split=split, fault=fault, **told(routing))
        except EngineDied:
            self.alive = False
            raise

    def reset_prefix_cache(self) -> None:
        """As the engine does; :class:`EngineDied` also makes the pool forget this engine."""
        try:
            self._engine.reset_prefix_cache()
        except EngineDied:
            self.alive = False
            raise

    def close(self) -> None:
        """Stop the engine; the pool starts another one when asked again."""
        self.alive = False
        self._engine.close()


class EnginePool:
    """Engines by name and configuration; at most ``MAX_ALIVE`` at once, the longest unused
    one is closed first.

    ``start`` is the ``pytest_afd_engine`` hook, ``names`` tells the known names, ``adopting``
    makes the leak guard accept what starting and closing an engine changes in the process.
    """

    def __init__(
        self,
        settings: Settings,
        start: Callable[..., PrefillEngine | None],
        names: Callable[[], Sequence[str]],
        adopting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._settings = settings
        self._start = start
        self._names = names
        self._adopting = adopting
        self._engines: OrderedDict[tuple[str, EngineConfig], PooledEngine] = OrderedDict()

    def get(self, config: EngineConfig, engine: str | None = None) -> PooledEngine:
        """The running engine for ``config``, started if need be.

        ``engine`` names the adapter; without it ``--afd-engine`` decides.
        Use the result before asking for two others: a third engine closes the first.
        Raises :class:`UnknownEngine`, or what the adapter raises when it cannot start.
        """
        name = engine or self._settings.engine
        if name is None:
            raise UnknownEngine(
                "no engine is named; name one in the call or with --afd-engine: "
                f"{', '.join(self._names())}."
            )
        key = (name, config)
        held = self._engines.get(key)
        if held is not None and held.alive:
            self._engines.move_to_end(key)
            return held
        if held is not None:
            self._close(key)
        while len(self._engines) >= MAX_ALIVE:
            self._close(next(iter(self._engines)))
        with self._adopting():
            started = self._start(config=config, settings=replace(self._settings, engine=name))
        if started is None:
            raise UnknownEngine(
                f"no plugin starts an engine named {name!r}; "
                f"known names are {', '.join(self._names())}."
            )
        self._engines[key] = PooledEngine(started)
        return self._engines[key]

    def close(self) -> None:
        """Close every engine, also when closing one of them fails; the first error is raised."""
        errors: list[Exception] = []
        for key in list(self._engines):
            try:
                self._close(key)
            except Exception as error:  # every engine must get its turn; raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def _close(self, key: tuple[str, EngineConfig]) -> None:
        with self._adopting():
            self._engines.pop(key).close()
