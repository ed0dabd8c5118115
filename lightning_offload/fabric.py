"""Lightning Fabric: strategies that train within a memory budget.

    fabric = Fabric(strategy=lightning_offload.fabric.OffloadStrategy(budget="12GiB"))   # or strategy="offload"
    model, optimizer = fabric.setup(model, optimizer)
    ...                                                    # the loop as it was
    fabric.strategy.memory.report()

``OffloadStrategy`` is for one device; ``DDPOffloadStrategy`` ("ddp_offload") is Fabric's DDP, in which every rank
plans alone. Every training forward of a model that was set up begins a step, and so does ``training_step`` of one that
has it; the backward, by ``fabric.backward`` or without it, belongs to it. Plans go into a checkpoint with the rest of
the state: ``fabric.save(path, {"model": model, "memory": fabric.strategy.memory})``.

Importing this module registers both names with each Fabric that is imported, or else with the first that is
installed: ``lightning.fabric`` and ``lightning_fabric`` are one code, but different classes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_offload.errors import UnsupportedError, check_keywords
from lightning_offload.plugins.module_steps import PLUGIN_KEYWORDS, ModuleMemoryPlugin
from lightning_offload.plugins.settings import Budget

if TYPE_CHECKING:
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy as _SingleBase
    from lightning.fabric.strategies.strategy import Strategy as _Base

    OffloadStrategy: type[SingleDeviceMixin]
    DDPOffloadStrategy: type[FabricOffloadMixin]
else:
    _Base = _SingleBase = object  # the real bases come from the Fabric in use

__all__ = ["DDPOffloadStrategy", "OffloadStrategy"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")


class FabricOffloadMixin(_Base):
    """Runs a Fabric strategy's training forwards, with their backwards, within a memory budget.

    Args:
        budget: Peak bytes of tensors alive on the device in a step, cf. :class:`~lightning_offload.MemoryPlugin`.
        keywords: Its further keywords; those that it does not have go to the strategy.

    Raises:
        OffloadError: A keyword is wrong; the message says which and what is allowed.
    """

    def __init__(self, budget: Budget = None, **keywords: Any) -> None:
        check_keywords(type(self).__name__, keywords, self._allowed_keywords())
        ours = {name: keywords.pop(name) for name in _KEYWORDS & keywords.keys()}
        super().__init__(**keywords)
        self._arguments = {"budget": budget, **ours}
        self._memory = self._make_plugin()

    def _allowed_keywords(self) -> set[str]:
        """Ours, those of the strategy, and those that it hands on to DistributedDataParallel unchecked."""
        parameters = inspect.signature(super().__init__).parameters
        allowed = {"budget", *_KEYWORDS, *parameters}
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            allowed |= inspect.signature(DistributedDataParallel).parameters.keys()
        return allowed - {"kwargs", "module"}

    @property
    def memory(self) -> ModuleMemoryPlugin:
        """The memory plugin: it has the ``report()``, and ``detach()`` takes every hook off."""
        return self._memory

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plugin out: Fabric's models refer to their strategy, and copies of them are to carry no hooks."""
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._memory = self._make_plugin()

    def _make_plugin(self) -> ModuleMemoryPlugin:
        return ModuleMemoryPlugin(**self._arguments, advice_without_steps=_NOTHING_SEEN)

    @override
    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Follow the model, unless that is done, then set it up as usual."""
        if not self._memory.is_following(module):
            self._memory.follow(module, device=self.root_device)
        if self.is_global_zero:
            self._memory.announce(type(self).__name__)
        return super().setup_module(module)

    @override
    def teardown(self) -> None:
        """Take every hook off."""
        self._memory.detach()
        super().teardown()


_NOTHING_SEEN = (
    "an optimizer stepped, but no model that was set up has been called with gradients, so no memory budget is kept: "
    "call the model itself, or put `with fabric.strategy.memory.step(batch):` around what you call in its place"
)
_KEYWORDS = PLUGIN_KEYWORDS - {"budget", "device", "module"}  # of which Fabric has the last two


class SingleDeviceMixin(FabricOffloadMixin, _SingleBase):
    """The same for one device, which Fabric assigns after it was asked for."""

    @override
    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Follow the model, and its ``training_step``: on one device Fabric does not lead that through forward."""
        ready = super().setup_module(module)
        method = getattr(module, "training_step", None)
        is_done = isinstance(getattr(method, "__self__", None), _Stepping)
        if self._memory.is_following(module) and isinstance(method, MethodType) and not is_done:
            stepping = _Stepping(self._memory, module, method.__func__)
            module.training_step = stepping.training_step  # type: ignore[assignment]
            self._memory.undo.callback(stepping.remove)
        return ready

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Empty: the devices are Fabric's choice."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        num_processes = max(len(devices), int(os.environ.get("WORLD_SIZE") or 1))
        if num_processes > 1:
            raise UnsupportedError(
                f"OffloadStrategy trains on one device, but {num_processes} were asked for: use "
                "strategy='ddp_offload', or pass devices=1 to Fabric and start one process"
            )
        self._root_device = torch.device(devices[0])


class _Stepping:
    """A model's ``training_step``, each call a step of the plugin; that of the model's copies is the plain one.

    Args:
        memory: The plugin; None for a copy.
        module: The model. That of the plugin is not kept alive: it ought to be gone when its user lets go of it.
        function: The method, unbound.
    """

    def __init__(
        self, memory: ModuleMemoryPlugin | None, module: torch.nn.Module, function: Callable[..., Any]
    ) -> None:
        self._memory, self._function = memory, function
        self._module: Callable[[], Any] = weakref.ref(module) if memory is not None else lambda: module

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; what it calls of the model is part of the step."""
        with self._memory.step(*args, **kwargs) if self._memory is not None else nullcontext():
            return self._function(self._module(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Stepping, (None, self._module(), self._function))

    def remove(self) -> None:
        """Give the model its own method back."""
        module = self._module()
        if module is not None:
            vars(module).pop("training_step", None)


_STRATEGIES = {
    "OffloadStrategy": (SingleDeviceMixin, "SingleDeviceStrategy", "offload"),
    "DDPOffloadStrategy": (FabricOffloadMixin, "DDPStrategy", "ddp_offload"),
}


@functools.cache
def build_strategy(name: str, package: str) -> Any:
    """Build one of the classes for a Fabric.

    Args:
        name: "OffloadStrategy" or "DDPOffloadStrategy".
        package: "lightning.fabric" or "lightning_fabric".
    """
    mixin, base_name, _ = _STRATEGIES[name]
    base = getattr(importlib.import_module(f"{package}.strategies"), base_name)
    namespace = {"__module__": __name__, "__qualname__": name, "__doc__": mixin.__doc__}
    return type(base)(name, (mixin, base), namespace)


def _packages() -> list[str]:
    """The Fabrics that are imported; else the first that is installed, imported now.

    Raises:
        UnsupportedError: None is installed.
    """
    loaded = [package for package in _PACKAGES if package in sys.modules]
    if loaded:
        return loaded
    for package in _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            importlib.import_module(package)
            return [package]
    raise UnsupportedError(f"Fabric is not installed (looked for {' and '.join(_PACKAGES)}): pip install lightning")


def _register() -> None:
    for package in _packages():
        registry = importlib.import_module(f"{package}.strategies").STRATEGY_REGISTRY
        for name, (_, _, short_name) in _STRATEGIES.items():
            registry.register(
                short_name,
                functools.partial(_make, name, package),
                description="Trains within a memory budget",
                override=True,
            )


def _make(name: str, package: str) -> Any:
    return build_strategy(name, package)()


def __getattr__(name: str) -> Any:
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_strategy(name, _packages()[0])


_register()
