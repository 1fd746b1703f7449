"""Options: what is allowed, and messages that say key, value, allowed values and remedy."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from afd_plugin import AFDConfig, AfdError
from afd_plugin.errors import (
    ConfigError,
    OptionTypeError,
    OptionValueError,
    TooManyUbatches,
    UnknownOption,
)

pytestmark = pytest.mark.cpu

DEFAULTS = {
    "async_moe_ubatching": False,
    "async_moe_num_ubatches": 2,
    "async_moe_split": "request",
    "async_moe_token_alignment": 1,
    "async_moe_min_tokens": 2,
    "compute_gate_on_attention": False,
    "connector": "none",
    "force_balanced_routing": False,
}


def test_defaults() -> None:
    assert dataclasses.asdict(AFDConfig()) == DEFAULTS


@pytest.mark.parametrize("options", [None, {}, MappingProxyType({}), DEFAULTS])
def test_absent_options_are_defaults(options: Any) -> None:
    assert AFDConfig.from_options(options) == AFDConfig()


@pytest.mark.parametrize("config", [{}, {"afd": None}, {"afd": {}}, {"other": {"x": 1}}])
def test_additional_config_without_options(config: Any) -> None:
    assert AFDConfig.from_additional_config(config) == AFDConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("async_moe_ubatching", True),
        ("async_moe_split", "token"),
        ("async_moe_token_alignment", 65536),
        ("async_moe_token_alignment", 7),
        ("async_moe_min_tokens", 2**31 - 1),
        ("compute_gate_on_attention", True),
        ("connector", "loopback"),
        ("force_balanced_routing", True),
    ],
)
def test_allowed_values(name: str, value: Any) -> None:
    config = AFDConfig.from_additional_config({"afd": {name: value}, "other": 1})
    assert dataclasses.asdict(config) == {**DEFAULTS, name: value}


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AFDConfig().async_moe_split = "token"  # type: ignore[misc]


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("value", [None, [], {}, b"token", 1.0, float("nan")], ids=repr)
def test_wrong_type_everywhere(name: str, value: Any) -> None:
    with pytest.raises(OptionTypeError) as caught:
        AFDConfig.from_options({name: value})
    text = str(caught.value)
    assert f'additional_config["afd"]["{name}"] is {value!r} ({type(value).__name__})' in text
    assert "it must be" in text
    assert f"for example {DEFAULTS[name]!r}" in text
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, AfdError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("async_moe_ubatching", 1),
        ("async_moe_ubatching", "true"),
        ("async_moe_ubatching", np.bool_(True)),
        ("async_moe_num_ubatches", True),
        ("async_moe_num_ubatches", "2"),
        ("async_moe_split", True),
        ("async_moe_split", 2),
        ("async_moe_token_alignment", True),
        ("async_moe_token_alignment", "8"),
        ("async_moe_token_alignment", 8.0),
        ("async_moe_min_tokens", False),
        ("compute_gate_on_attention", 0),
        ("connector", False),
        ("force_balanced_routing", "yes"),
    ],
)
def test_nearly_the_right_type(name: str, value: Any) -> None:
    with pytest.raises(OptionTypeError, match=name):
        AFDConfig.from_options({name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("connector", "ethernet", "'none' or 'loopback'"),
        ("connector", "", "'none' or 'loopback'"),
        ("async_moe_num_ubatches", 1, "2 (exactly two stages)"),
        ("async_moe_num_ubatches", 0, "2 (exactly two stages)"),
        ("async_moe_num_ubatches", 3, "2 (exactly two stages)"),
        ("async_moe_num_ubatches", -2, "2 (exactly two stages)"),
        ("async_moe_split", "", "'request' or 'token'"),
        ("async_moe_split", "tokens", "'request' or 'token'"),
        ("async_moe_split", "Token", "'request' or 'token'"),
        ("async_moe_split", "request_boundary", "'request' or 'token'"),
        ("async_moe_token_alignment", 0, "1 to 65536"),
        ("async_moe_token_alignment", -1, "1 to 65536"),
        ("async_moe_token_alignment", 65537, "1 to 65536"),
        ("async_moe_min_tokens", 1, "2 to 2147483647"),
        ("async_moe_min_tokens", 0, "2 to 2147483647"),
        ("async_moe_min_tokens", 2**31, "2 to 2147483647"),
    ],
)
def test_values_that_are_not_allowed(name: str, value: Any, allowed: str) -> None:
    for make in (AFDConfig, lambda **o: AFDConfig.from_options(o)):
        with pytest.raises(OptionValueError) as caught:
            make(**{name: value})
        text = str(caught.value)
        assert f'additional_config["afd"]["{name}"] is {value!r}' in text
        assert f"allowed: {allowed}" in text
        assert "Set an allowed value" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"async_moe_ubatch": True},
            "sets async_moe_ubatch = True: unknown key(s) async_moe_ubatch",
        ),
        (
            {"zeta": 1, "alpha": "2", "async_moe_split": "token"},
            "sets alpha = '2', zeta = 1: unknown key(s) alpha, zeta",
        ),
        ({1: 2}, "sets 1 = 2: unknown key(s) 1"),
        ({None: 2, "x": [1]}, "sets None = 2, x = [1]: unknown key(s) None, x"),
        ({"": 1}, "sets  = 1: unknown key(s) "),
        ({"self": None}, "sets self = None: unknown key(s) self"),
    ],
)
def test_unknown_keys_and_values_are_listed_with_the_known_keys(options: Any, said: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        AFDConfig.from_options(options)
    text = str(caught.value)
    assert text.startswith(f'additional_config["afd"] {said}; known keys: ')
    for name in DEFAULTS:
        assert name in text
    assert "Remove or correct them" in text


@pytest.mark.parametrize("options", ["token", 1, True, [], [("a", 1)], object], ids=repr)
def test_options_that_are_no_mapping(options: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"it must be a mapping of options"):
        AFDConfig.from_options(options)
    with pytest.raises(OptionTypeError, match=r"it must be a mapping of options"):
        AFDConfig.from_additional_config({"afd": options})


@pytest.mark.parametrize("config", [None, "afd", [], 1], ids=repr)
def test_additional_config_that_is_no_mapping(config: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"additional_config is .*'afd' entry"):
        AFDConfig.from_additional_config(config)


@pytest.mark.parametrize(("stages", "kind"), [(3, TooManyUbatches), (1, OptionValueError)])
def test_more_than_two_stages_has_a_class_of_its_own(
    stages: int, kind: type[OptionValueError]
) -> None:
    with pytest.raises(OptionValueError) as caught:
        AFDConfig(async_moe_num_ubatches=stages)
    assert type(caught.value) is kind


@pytest.mark.parametrize("key", ["AFD", "Afd", "afd ", " afd", "AFD\t"])
def test_options_under_a_misspelt_key_are_not_silently_ignored(key: str) -> None:
    with pytest.raises(UnknownOption) as caught:
        AFDConfig.from_additional_config({key: {"async_moe_ubatching": True}})
    assert f"the key {key!r}; the options are read from 'afd'. Write it" in str(caught.value)


@pytest.mark.parametrize("name", [*sorted(set(DEFAULTS) - {"connector"}), "connector_extra_config"])
@pytest.mark.parametrize("beside", [{}, {"afd": {"async_moe_ubatching": True}}], ids=["", "afd"])
def test_options_beside_the_entry_are_not_silently_ignored(name: str, beside: Any) -> None:
    with pytest.raises(UnknownOption) as caught:
        AFDConfig.from_additional_config({**beside, "other": 1, name: True})
    text = str(caught.value)
    assert f"additional_config sets {name} beside 'afd', where nothing reads them" in text
    assert text.endswith(f'Move them into it: additional_config={{"afd": {{"{name}": true}}}}.')


def test_what_others_may_well_call_so_is_theirs() -> None:
    assert AFDConfig.from_additional_config({"connector": "x", "split": 1, 3: 4}) == AFDConfig()


EXTRA = "connector_extra_config"


def test_options_of_the_connector_extra_config() -> None:
    extra = {"async_moe_ubatching": True, "async_moe_num_ubatches": 2, "async_moe_split": "token"}
    assert AFDConfig.from_options({EXTRA: extra}) == AFDConfig(True, 2, "token")
    assert AFDConfig.from_options({EXTRA: {}}) == AFDConfig()
    both = {"async_moe_split": "token", "async_moe_min_tokens": 9, EXTRA: extra}
    assert AFDConfig.from_options(both) == AFDConfig(True, 2, "token", async_moe_min_tokens=9)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({EXTRA: "token"}, OptionTypeError, "is 'token' (str); it must be a mapping"),
        ({EXTRA: None}, OptionTypeError, "is None (NoneType)"),
        ({EXTRA: {"dynamicQuant": 1}}, UnknownOption, "sets dynamicQuant = 1; known there are asy"),
        ({EXTRA: {"async_moe_ubatching": "true"}}, OptionTypeError, "it must be true or false"),
        ({EXTRA: {"async_moe_num_ubatches": 3}}, TooManyUbatches, "is 3"),
        (
            {"async_moe_split": "request", EXTRA: {"async_moe_split": "token"}},
            OptionValueError,
            "async_moe_split is 'token' in",
        ),
    ],
)
def test_refused_connector_extra_config(options: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        AFDConfig.from_options(options)
    assert type(caught.value) is kind
    assert said in str(caught.value)
