"""Makes the strategy classes for the Lightning package in use, cf. Note [One strategy, two Lightnings]."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_offload.lightning_packages import import_from, loaded_packages

if TYPE_CHECKING:
    from lightning_offload.strategies.mixin import OffloadMixin

_Mixin = TypeVar("_Mixin", bound="OffloadMixin")
_BUILT: list[type[Any]] = []


def build(mixin: type[_Mixin], package: str) -> type[_Mixin]:
    """Builds the strategy of a mixin for the Lightning package `package`, importing it if need be; once."""
    built: type[_Mixin] = _build(mixin, package)
    return built


@functools.cache
def _build(mixin: type[Any], package: str) -> type[Any]:
    base = getattr(import_from(package, "strategies"), mixin.base_name)
    namespace = {
        # the public name, by which pickle and LightningCLI find the class
        "__module__": "lightning_offload",
        "__qualname__": mixin.public_name,
        "__doc__": _documentation(mixin),
        "_package": package,
    }
    built: type[Any] = type(base)(mixin.public_name, (mixin, base), namespace)
    _BUILT.append(built)
    for loaded in loaded_packages():
        accept_built_classes(loaded)
    return built


def revive(mixin: type[_Mixin], package: str) -> _Mixin:
    """An empty strategy, for pickle to fill."""
    cls = build(mixin, package)
    return cls.__new__(cls)


def accept_built_classes(package: str) -> None:
    """Lets the Trainer of `package` accept every strategy of ours, whichever package it was built for."""
    strategy = import_from(package, "strategies").Strategy
    for built in _BUILT:
        strategy.register(built)


def _documentation(mixin: type[Any]) -> str:
    """The mixin's own summary, then the keywords, which all mixins share."""
    summary = inspect.getdoc(mixin) or ""
    shared = inspect.getdoc(mixin.__mro__[1]) or ""
    return f"{summary}\n\n{shared[shared.index('Args:') :]}"
