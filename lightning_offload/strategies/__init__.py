"""Lightning strategies that train within a memory budget.

`register` makes them known to a Lightning package under their short names; it is called once per package,
right after that package was imported, and builds nothing. `OffloadStrategy` is the class for the Lightning
package in use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_offload.strategies.single_device import OffloadStrategyMixin as OffloadStrategy

__all__ = ["OffloadStrategy", "register"]

# LightningCLI passes a class path without arguments on as text, and the Trainer makes it lower case.
_NAMES = ("offload", "lightning_offload.offloadstrategy")


def register(package: str) -> None:
    """Registers the strategies with the imported Lightning package `package`.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".
    """

    def offload(**init_params: Any) -> OffloadStrategy:
        from lightning_offload.strategies.single_device import build_strategy

        return build_strategy(package)(**init_params)

    registry = sys.modules[f"{package}.strategies"].StrategyRegistry
    for name in _NAMES:
        registry.register(name, offload, description="Trains within a memory budget on one device", override=True)
    _accept_built_classes(package)


def _accept_built_classes(package: str) -> None:
    """Lets `package` accept the classes that were built for the other package before it was imported."""
    single_device = sys.modules.get("lightning_offload.strategies.single_device")
    if single_device is not None:
        single_device.accept_built_classes(package)


def __getattr__(name: str) -> Any:
    if name != "OffloadStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_offload.plugins.lightning_packages import current_package
    from lightning_offload.strategies.single_device import build_strategy

    return build_strategy(current_package())
