"""Registers our strategies with Lightning, whichever of the two is imported first.

Lightning has no entry point for strategies, and importing this package must not import Lightning. So
:func:`install` registers at once with each Lightning package that is already imported, and puts a finder in
front of ``sys.meta_path`` that waits for the others. The finder never finds anything itself: for the two
names below it asks the finders behind it, and hands out their spec with a loader that

1. puts the true loader back on the spec and on the module, so that nothing of ours is visible afterwards,
2. runs the module,
3. calls ``lightning_offload.strategies.register(name)``.

A registration that fails is a warning: it must never be the reason that ``import lightning`` fails. Imports
of the two packages may come from any thread; Python's import lock makes each run once.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["LIGHTNING_PACKAGES", "install"]

LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Two distributions of the same code, with different classes and different registries."""


def install() -> None:
    """Register with each Lightning package imported so far or later; a second call changes nothing."""
    if not any(_is_ours(finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImportFinder())
    for package in LIGHTNING_PACKAGES:
        if package in sys.modules:
            _register(package)


def _is_ours(finder: object) -> bool:
    # By name, so that a finder left from before a reload of this module counts too.
    cls = finder if isinstance(finder, type) else type(finder)
    return (cls.__module__, cls.__qualname__) == (__name__, "_PostImportFinder")


def _register(package: str) -> None:
    try:
        importlib.import_module("lightning_offload.strategies").register(package)
    except Exception as error:
        warnings.warn(
            f"lightning-offload could not register its strategies with {package}: {error!r}; "
            f"pass Trainer(strategy=lightning_offload.OffloadStrategy(...)) instead of a name",
            RuntimeWarning,
            stacklevel=2,
        )


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the Lightning packages, and finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the finders behind this one have for a Lightning package."""
        if fullname not in LIGHTNING_PACKAGES or self not in sys.meta_path:
            return None
        # Only the finders behind this one: those before it have declined, and two wrapping finders that
        # each asked all the others would ask one another for ever.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find_spec and find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(importlib.abc.Loader):
    """Stands in for a module's loader until the module is executed."""

    def __init__(self, true_loader: Any) -> None:
        self.true_loader = true_loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its true loader does."""
        module: ModuleType | None = self.true_loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the true loader back, run the module, then register with it."""
        module.__loader__ = self.true_loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.true_loader
        self.true_loader.exec_module(module)
        _register(module.__name__)

    def __getattr__(self, name: str) -> Any:
        """Answer everything else (``get_source``, ``path``, ``is_package``) as the true loader does."""
        if name == "true_loader" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # copying and pickling look these up before __init__ has run
        return getattr(self.true_loader, name)
