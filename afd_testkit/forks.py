"""Descriptors that belong to one process, and that a forked child must not keep.

Python's descriptors are closed when a child executes another program, but a child of a bare
``fork`` keeps copies: a lock or a port would outlive the process that took it.  The child drops
them as the first thing it does; until it has run for the first time they count as held.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    """Something that holds descriptors of its own process."""

    def drop_after_fork(self) -> None:
        """Close the copies in the child; what the parent holds stays as it is."""
        ...


_owners: WeakSet[Owner] = WeakSet()


def drop_in_children(owner: Owner) -> None:
    """Have ``owner`` drop its descriptors in every child that is forked from now on."""
    _owners.add(owner)


def _drop_all() -> None:
    for owner in list(_owners):
        owner.drop_after_fork()


os.register_at_fork(after_in_child=_drop_all)
