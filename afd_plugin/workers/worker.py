"""What every splitting worker does: check before anything exists, attach to its runner, report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vllm.config import VllmConfig

from afd_plugin.config import FIXED_AT_START, AFDConfig
from afd_plugin.errors import OptionValueError, UpstreamDrift
from afd_plugin.validation import Setup, validate, validate_backends


class TwoStageWorkerMixin:
    """Mixed into a subclass of the engine's own worker, before it.

    ``afd_runner_class``: the runner that can split, which ``init_device`` must have built.
    """

    afd_runner_class: ClassVar[type]
    model_runner: Any

    def afd_prepare(
        self, vllm_config: VllmConfig, read_setup: Callable[[VllmConfig], Setup]
    ) -> None:
        """Refuse what is not known to be right, before the worker itself is constructed.

        Raises subclasses of :class:`~afd_plugin.errors.ConfigError` and
        :class:`~afd_plugin.errors.UnsupportedSetup`.
        """
        self._afd_config = AFDConfig.from_additional_config(vllm_config.additional_config)
        self._afd_setup = read_setup(vllm_config)
        validate(self._afd_setup, self._afd_config)

    def afd_attach(self) -> None:
        """Start the runner that ``init_device`` built."""
        if self._afd_splits():
            self.model_runner.afd_start(self._afd_config, self._afd_setup.topology)
        elif self._afd_config.async_moe_ubatching or self._afd_config.connector != "none":
            raise UpstreamDrift(
                f"{type(self).__qualname__}.init_device built a "
                f"{type(self.model_runner).__qualname__}, not an "
                f"{self.afd_runner_class.__qualname__}, which alone can split a step or reach "
                "experts over a connector. Install a pinned vLLM, or turn both off: "
                'additional_config={"afd": {"async_moe_ubatching": false, "connector": "none"}}.'
            )

    def _afd_splits(self) -> bool:
        """Whether the runner can split; Model Runner V2 cannot, and runs with the split off."""
        return isinstance(self.model_runner, self.afd_runner_class)

    def afd_configure(self, options: dict[str, Any]) -> None:
        """Replace the options between steps, judged as at start-up; for tests and replays.

        Raises what start-up would raise; the earlier options then stay in force.
        """
        config = AFDConfig.from_options(options)
        for name in FIXED_AT_START:
            now, asked = getattr(self._afd_config, name), getattr(config, name)
            if now != asked:
                raise OptionValueError(
                    f"{name} is {now!r} since this worker started and cannot become {asked!r}; "
                    "start another worker for it."
                )
        validate(self._afd_setup, config)
        if self._afd_splits():
            validate_backends(self.model_runner.afd_backends(), config)
            self.model_runner.afd_config = config
        self._afd_config = config

    def afd_take_evidence(self) -> list[dict[str, Any]]:
        """Evidence of each step since the last call (``StepEvidence.as_dict``).

        A runner that cannot split records none.
        """
        return list(self.model_runner.afd_take_evidence()) if self._afd_splits() else []
