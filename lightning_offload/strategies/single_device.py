"""`OffloadStrategy`: Lightning's single-device strategy within a memory budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from lightning_offload.errors import UnsupportedError
from lightning_offload.strategies.mixin import OffloadMixin, build

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as _StrategyBase
else:
    _StrategyBase = object  # the real base comes from the package in use, see building


class OffloadStrategyMixin(OffloadMixin, _StrategyBase):
    """Trains on one device within a memory budget, with results identical to the plain strategy's."""

    strategy_name = "offload"
    public_name = "OffloadStrategy"
    base_name = "SingleDeviceStrategy"

    def __init__(
        self,
        budget: int | float | str | None = None,
        *,
        policy: str = "auto",
        tier: Literal["auto", "host", "disk"] = "auto",
        host_budget: int | float | str | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        plan: str | os.PathLike[str] | None = None,
        keep: Sequence[str] = (),
        enabled: bool = True,
        verify: Literal["first", "always", "never"] = "first",
        replace_checkpointing: bool = False,
        chunked_loss: bool | str = False,
    ) -> None:
        # Spelt out, for LightningCLI: the base class would have it ask for a device, which the Trainer chooses.
        super().__init__(
            budget, policy=policy, tier=tier, host_budget=host_budget, spill_dir=spill_dir, plan=plan, keep=keep,
            enabled=enabled, verify=verify, replace_checkpointing=replace_checkpointing, chunked_loss=chunked_loss,
            device="cpu",
        )  # fmt: skip
        self._parallel_devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that the Trainer chose; empty before it did."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        num_processes = max(len(devices), int(os.environ.get("WORLD_SIZE") or 1))
        if num_processes > 1:
            raise UnsupportedError(
                f"OffloadStrategy trains on one device, but {num_processes} were asked for: use"
                " DDPOffloadStrategy (strategy='ddp_offload') for them, or pass devices=1 to the Trainer and start"
                " one process"
            )
        self._parallel_devices = self._check_devices(devices)
        self._root_device = self._parallel_devices[0]

    @property
    def num_nodes(self) -> int:
        """Number of machines: one."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            raise UnsupportedError(
                f"OffloadStrategy trains on one device, but num_nodes={num_nodes} was asked for: use"
                " DDPOffloadStrategy (strategy='ddp_offload'), or pass num_nodes=1 to the Trainer"
            )


def build_strategy(package: str) -> type[OffloadStrategyMixin]:
    """Builds the class `OffloadStrategy` for the Lightning package `package`, importing it if need be."""
    return build(OffloadStrategyMixin, package)
