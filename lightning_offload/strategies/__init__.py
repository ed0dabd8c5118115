"""Lightning strategies that train within a memory budget.

`register` makes them known to a Lightning package under their short names; it is called once per package,
right after that package was imported, and builds nothing. `OffloadStrategy` and `DDPOffloadStrategy` are the
classes for the Lightning package in use. The name "offload" stands for the first, and under torchrun with
several processes for the second.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_offload.strategies.ddp import DDPOffloadStrategyMixin as DDPOffloadStrategy
    from lightning_offload.strategies.single_device import OffloadStrategyMixin as OffloadStrategy

__all__ = ["DDPOffloadStrategy", "OffloadStrategy", "register"]

_MODULES = {"DDPOffloadStrategy": "ddp", "OffloadStrategy": "single_device"}

# LightningCLI passes a class path without arguments on as text, and the Trainer makes it lower case.
_SINGLE_NAMES = ("lightning_offload.offloadstrategy",)
_DDP_NAMES: dict[str, dict[str, Any]] = {
    "ddp_offload": {},
    "ddp_offload_find_unused_parameters_true": {"find_unused_parameters": True},
    "ddp_offload_spawn": {"start_method": "spawn"},
    "ddp_offload_fork": {"start_method": "fork"},
    "ddp_offload_notebook": {"start_method": "fork"},
    "lightning_offload.ddpoffloadstrategy": {},
}


def register(package: str) -> None:
    """Registers the strategies with the imported Lightning package `package`.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".
    """

    def single_device(**keywords: Any) -> Any:
        return _build("OffloadStrategy", package)(**keywords)

    def ddp(**keywords: Any) -> Any:
        return _build("DDPOffloadStrategy", package)(**keywords)

    def offload(**keywords: Any) -> Any:
        return (ddp if _is_one_of_several() else single_device)(**keywords)

    registry = sys.modules[f"{package}.strategies"].StrategyRegistry
    one, several = "Trains within a memory budget on one device", "Trains within a memory budget on each device"
    registry.register("offload", offload, description=f"{one}, under torchrun on each", override=True)
    for name in _SINGLE_NAMES:
        registry.register(name, single_device, description=one, override=True)
    for name, keywords in _DDP_NAMES.items():
        registry.register(name, ddp, description=several, override=True, **keywords)
    _accept_built_classes(package)


def _is_one_of_several() -> bool:
    """Whether torchrun started this process, and others with it."""
    from torch import distributed

    is_torchrun = distributed.is_available() and distributed.is_torchelastic_launched()
    return is_torchrun and int(os.environ.get("WORLD_SIZE") or 1) > 1


def _accept_built_classes(package: str) -> None:
    """Lets `package` accept the classes that were built for the other package before it was imported."""
    building = sys.modules.get("lightning_offload.strategies.mixin")
    if building is not None:
        building.accept_built_classes(package)


def _build(name: str, package: str) -> Any:
    return importlib.import_module(f"lightning_offload.strategies.{_MODULES[name]}").build_strategy(package)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_offload.lightning_packages import current_package

    return _build(name, current_package())
