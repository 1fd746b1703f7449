"""The error tree that the docstring draws is the tree that exists."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from afd_plugin import errors
from afd_plugin.errors import AfdError

pytestmark = pytest.mark.cpu


def drawn() -> dict[str, tuple[str | None, bool]]:
    """Class → (parent, whether it is drawn as a ValueError too), read from the docstring.

    A line may hold several columns of siblings.  A name's depth is its column over four; in a
    line of several names all have the depth of the first.
    """
    found: dict[str, tuple[str | None, bool]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        names = re.findall(r"(?:[├└]── |^ {4}(?=AfdError))(\w+)( \(ValueError\))?", line)
        if not names:
            continue
        depth = (re.search(r"\w", line).start() - 4) // 4  # type: ignore[union-attr]
        for name, is_value_error in names:
            assert name not in found, f"{name} is drawn twice"
            found[name] = (above.get(depth - 1), bool(is_value_error))
            above[depth] = name
    return found


def existing() -> dict[str, type[AfdError]]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in classes if cls.__module__.startswith(f"{errors.__name__}.")}


def test_every_error_can_be_imported_from_one_place() -> None:
    assert set(errors.__all__) == set(existing())


def test_the_drawing_is_complete() -> None:
    assert set(drawn()) == set(existing())
    assert len(drawn()) >= 40  # the pattern has not lost part of it


@pytest.mark.parametrize("name", sorted(existing()))
def test_drawn_where_it_stands(name: str) -> None:
    parent, is_value_error = drawn()[name]
    cls = existing()[name]
    if parent is None:
        assert cls is AfdError
        return
    assert issubclass(cls, AfdError)
    bases = [base.__name__ for base in cls.__bases__]
    assert bases == [parent, *(["ValueError"] if is_value_error else [])]


@pytest.mark.parametrize("name", sorted(existing()))
def test_every_error_says_what_it_is_for(name: str) -> None:
    assert "__doc__" in vars(existing()[name])
    assert existing()[name].__doc__


@pytest.mark.parametrize("name", sorted(existing()))
def test_errors_cross_process_boundaries(name: str) -> None:
    error = existing()[name]("value")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_a_refusal_keeps_its_value_and_notes_across_processes() -> None:
    error = errors.TensorParallel(2)
    error.add_note("also: another")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.value == 2
    assert copy.__notes__ == ["also: another"]
