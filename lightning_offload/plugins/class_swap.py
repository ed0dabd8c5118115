"""Gives an object that others have made a few methods of ours, in place, until they are taken off again.

Others look at its type, by `isinstance` or by name, so a wrapper would not do: the very instance gets a subclass of its
own class, under the same name, with a mixin of ours in front.

Copies and pickles of the instance are of its own class, without what is ours: a program copies its trainer, and a
loader pickles what its workers need, in the midst of a fit.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Collection
from typing import Any, SupportsIndex

__all__ = ["graft", "ungraft"]


def graft(target: Any, mixin: type[Any]) -> None:
    """Put a mixin in front of the object's class; does nothing where it is there already.

    Args:
        target: The object.
        mixin: The methods. The attributes that it gives to the object are named in its ``grafted_attributes``.
    """
    if not isinstance(target, mixin):
        classes: tuple[Any, Any] = (type(target), mixin)  # mypy does not take a class for something to be cached by
        target.__class__ = _grafted_class(*classes)


def ungraft(target: Any, mixin: type[Any]) -> None:
    """Give the object its own class back; does nothing to one without the mixin."""
    if isinstance(target, mixin):
        if vars(type(target)).get("__reduce_ex__") is _reduced:  # else others have put a class of theirs before ours
            target.__class__ = type(target).__bases__[1]
        for name in mixin.grafted_attributes:
            vars(target).pop(name, None)


@functools.cache
def _grafted_class(cls: type[Any], mixin: type[Any]) -> type[Any]:
    namespace = {
        "__qualname__": cls.__qualname__, "__module__": cls.__module__, "__doc__": cls.__doc__,
        "__reduce_ex__": _reduced,
    }  # fmt: skip
    return type(cls.__name__, (mixin, cls), namespace)


def _reduced(target: Any, protocol: SupportsIndex) -> Any:
    """What copies and pickles a grafted object, as one of its own class."""
    grafted: Any = type(target)
    mixin, cls = grafted.__bases__
    reduced = cls.__reduce_ex__(target, protocol)
    if not isinstance(reduced, tuple):  # the name of a global
        return reduced
    make, arguments, *rest = reduced
    make, *arguments = (cls if part is grafted else part for part in (make, *arguments))
    if rest:
        rest[0] = _without(rest[0], mixin.grafted_attributes)
    return (_MAKERS.get(make, make), tuple(arguments), *rest)


def _without(state: Any, names: Collection[str]) -> Any:
    """An object's state without some attributes: a dict, or one with what is in slots."""
    if isinstance(state, dict):
        return {name: item for name, item in state.items() if name not in names}
    if isinstance(state, tuple) and len(state) == 2:
        return tuple(_without(part, names) for part in state)
    return state


def _make(cls: type[Any], *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _make_with_keywords(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cls.__new__(cls, *args, **kwargs)


# Pickle wants those of copyreg to make the very class of the object.
_MAKERS: dict[Callable[..., Any], Callable[..., Any]] = {
    copyreg.__newobj__: _make,  # type: ignore[attr-defined]
    copyreg.__newobj_ex__: _make_with_keywords,  # type: ignore[attr-defined]
}
