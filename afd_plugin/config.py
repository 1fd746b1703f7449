"""``additional_config["afd"]`` as one frozen, checked object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from afd_plugin.errors import OptionTypeError, OptionValueError, TooManyUbatches, UnknownOption

Policy = Literal["request", "token"]
POLICIES: tuple[Policy, ...] = ("request", "token")
Connector = Literal["none", "loopback"]
CONNECTORS: tuple[Connector, ...] = ("none", "loopback")
# What of the options is built into a worker when it starts.
FIXED_AT_START = ("compute_gate_on_attention", "connector", "force_balanced_routing")
# What of them decides whether a step is split and where.
DECIDES_STEPS = (
    "async_moe_ubatching",
    "async_moe_split",
    "async_moe_token_alignment",
    "async_moe_min_tokens",
)

# Where a connector has options of its own, the field gives these beside them.
EXTRA = "connector_extra_config"
EXTRA_OPTIONS = ("async_moe_ubatching", "async_moe_num_ubatches", "async_moe_split")

_NOUN = {bool: "true or false", int: "a whole number", str: "a string"}


def _is(value: object, kind: type) -> bool:
    """Whether ``value`` is of ``kind``; a bool is not a whole number here."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


@dataclass(frozen=True)
class AFDConfig:
    """Options of the two-stage split; the first three may also stand in
    ``connector_extra_config``.

    ``async_moe_ubatching``: split eligible prefill steps at all.
    ``async_moe_num_ubatches``: stages a step; only 2.
    ``async_moe_split``: where to cut, at a ``request`` boundary or at a ``token``.
    ``async_moe_token_alignment``: cuts of the ``token`` policy are multiples of this many
    tokens, and stage buffers are padded to it; the TP size where tokens are sharded over
    TP ranks, else 1.
    ``async_moe_min_tokens``: steps with fewer real tokens are not split.
    ``connector``: what carries activations to the experts' side; ``none`` leaves the model's
    layers whole, ``loopback`` has both sides in one process.
    ``compute_gate_on_attention``: route on the attention side, else on the experts' side.
    ``force_balanced_routing``: spread expert ids evenly while serving, too; for load tests only,
    since the answers are wrong, and recorded in every step's evidence.

    The last three are fixed when a worker starts.

    Raises :class:`OptionTypeError` or :class:`OptionValueError` at construction.
    """

    async_moe_ubatching: bool = False
    async_moe_num_ubatches: int = 2
    async_moe_split: Policy = "request"
    async_moe_token_alignment: int = 1
    async_moe_min_tokens: int = 2
    compute_gate_on_attention: bool = False
    connector: Connector = "none"
    force_balanced_routing: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            kind = type(option.default)
            value = getattr(self, option.name)
            if not _is(value, kind):
                raise OptionTypeError(
                    f'additional_config["afd"]["{option.name}"] is {value!r} '
                    f"({type(value).__name__}); it must be {_NOUN[kind]}, "
                    f"for example {option.default!r}."
                )
        stages = self.async_moe_num_ubatches
        self._check(
            "async_moe_num_ubatches",
            stages == 2,
            "2 (exactly two stages)",
            TooManyUbatches if stages > 2 else OptionValueError,
        )
        self._check("async_moe_split", self.async_moe_split in POLICIES, "'request' or 'token'")
        self._check("connector", self.connector in CONNECTORS, "'none' or 'loopback'")
        self._check(
            "async_moe_token_alignment",
            1 <= self.async_moe_token_alignment <= 65536,
            "1 to 65536 tokens",
        )
        self._check(
            "async_moe_min_tokens",
            2 <= self.async_moe_min_tokens < 2**31,
            "2 to 2147483647 tokens (one token cannot be split)",
        )

    def described(self, names: Iterable[str]) -> str:
        """The options of these ``names``, in words, alike wherever they are alike."""
        return ", ".join(f"{name} {getattr(self, name)!r}" for name in names)

    def _check(
        self,
        name: str,
        ok: bool,
        allowed: str,
        refusal: type[OptionValueError] = OptionValueError,
    ) -> None:
        if not ok:
            raise refusal(
                f'additional_config["afd"]["{name}"] is {getattr(self, name)!r}; '
                f"allowed: {allowed}. Set an allowed value or leave the option out."
            )

    @classmethod
    def from_options(cls, options: object) -> AFDConfig:
        """Check a plain mapping, as vLLM hands it over; ``None`` means all defaults.

        Raises :class:`UnknownOption`, :class:`OptionTypeError`, :class:`OptionValueError`.
        """
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise OptionTypeError(
                f'additional_config["afd"] is {options!r} ({type(options).__name__}); '
                'it must be a mapping of options, for example {"async_moe_ubatching": true}.'
            )
        options = _with_extra(options)
        known = [option.name for option in fields(cls)]
        unknown = sorted((key for key in options if key not in known), key=str)
        if unknown:
            given = ", ".join(f"{key} = {options[key]!r}" for key in unknown)
            raise UnknownOption(
                f'additional_config["afd"] sets {given}: '
                f"unknown key(s) {', '.join(map(str, unknown))}; "
                f"known keys: {', '.join([*known, EXTRA])}. Remove or correct them."
            )
        return cls(**cast(Mapping[str, Any], options))

    @classmethod
    def from_additional_config(cls, additional_config: object) -> AFDConfig:
        """Read the ``afd`` entry of vLLM's ``additional_config``."""
        if not isinstance(additional_config, Mapping):
            raise OptionTypeError(
                f"additional_config is {additional_config!r} "
                f"({type(additional_config).__name__}); it must be a mapping with an 'afd' entry, "
                'for example {"afd": {"async_moe_ubatching": true}}.'
            )
        misspelt = [
            key for key in additional_config if str(key).strip().lower() == "afd" and key != "afd"
        ]
        if misspelt:
            raise UnknownOption(
                f"additional_config has the key {misspelt[0]!r}; the options are read from 'afd'. "
                "Write it in lower case and without spaces."
            )
        # Another plugin may well have a "connector" of its own; the other names are nobody else's.
        ours = {option.name for option in fields(cls)} - {"connector"} | {EXTRA}
        misplaced = [key for key in additional_config if key in ours]
        if misplaced:
            raise UnknownOption(
                f"additional_config sets {', '.join(misplaced)} beside 'afd', where nothing reads "
                f"them; the options are read from 'afd'. Move them into it: "
                f'additional_config={{"afd": {{"{misplaced[0]}": '
                f"{json.dumps(additional_config[misplaced[0]], default=repr)}}}}}."
            )
        return cls.from_options(additional_config.get("afd"))


def _with_extra(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """``options`` with those of its ``connector_extra_config`` in their place.

    Raises :class:`OptionTypeError`, :class:`UnknownOption`, or :class:`OptionValueError` where
    both places name an option and differ.
    """
    found = dict(options)
    extra = found.pop(EXTRA, {})
    place = f'additional_config["afd"]["{EXTRA}"]'
    if not isinstance(extra, Mapping):
        raise OptionTypeError(
            f"{place} is {extra!r} ({type(extra).__name__}); it must be a mapping of options, for "
            'example {"async_moe_split": "token"}.'
        )
    unknown = sorted((key for key in extra if key not in EXTRA_OPTIONS), key=str)
    if unknown:
        raise UnknownOption(
            f"{place} sets {', '.join(f'{key} = {extra[key]!r}' for key in unknown)}; known there "
            f"are {', '.join(EXTRA_OPTIONS)}. Remove or correct them."
        )
    for key, value in extra.items():
        if key in found and found[key] != value:
            raise OptionValueError(
                f"{key} is {value!r} in {place} and {found[key]!r} beside it; give it in one place."
            )
        found[key] = value
    return found
