"""Gives an object that others have made a few methods of ours, in place, until they are taken off again.

Others look at its type, by `isinstance` or by name, so a wrapper would not do: the very instance gets a subclass of its
own class, under the same name, with a mixin of ours in front.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["graft", "ungraft"]


def graft(target: Any, mixin: type[Any]) -> None:
    """Put a mixin in front of the object's class; does nothing where it is there already."""
    if not isinstance(target, mixin):
        classes: tuple[Any, Any] = (type(target), mixin)  # mypy does not take a class for something to be cached by
        target.__class__ = _grafted_class(*classes)


def ungraft(target: Any, mixin: type[Any]) -> None:
    """Give the object its own class back; does nothing to one without the mixin."""
    if isinstance(target, mixin):
        target.__class__ = type(target).__bases__[1]


@functools.cache
def _grafted_class(cls: type[Any], mixin: type[Any]) -> type[Any]:
    namespace = {"__qualname__": cls.__qualname__, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), namespace)
