"""`DDPOffloadStrategy`: Lightning's DDP strategy within a memory budget.

Each rank records, plans and runs its own steps; no collective is added to DDP's own, so ranks may meet new
shapes at different steps. A step whose backward all-reduces gradients and one under `no_sync` are two kinds of
step, with a plan each. What is DDP's own in a step is `lightning_offload.plugins.data_parallel`'s business.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_offload.errors import check_keywords
from lightning_offload.plugins.data_parallel import run_unseen_around_forward
from lightning_offload.strategies.mixin import OffloadMixin, build

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _StrategyBase
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _StrategyBase = object  # the real base comes from the package in use, see building


class DDPOffloadStrategyMixin(OffloadMixin, _StrategyBase):
    """Trains on several devices, each within a memory budget, with results identical to plain DDP's.

    Takes all keywords of Lightning's DDPStrategy too, such as `find_unused_parameters` and `static_graph`. The
    budget is that of one device. `.memory` is the plugin of this process.
    """

    strategy_name = "ddp_offload"
    public_name = "DDPOffloadStrategy"
    base_name = "DDPStrategy"

    @override
    def _check_base_keywords(self, keywords: dict[str, Any]) -> None:
        """Checks them against DistributedDataParallel's own: Lightning does not, and fails in the middle of a fit."""
        takers = (OffloadMixin.__init__, super(OffloadMixin, self).__init__, DistributedDataParallel.__init__)
        allowed = {name for taker in takers for name in inspect.signature(taker).parameters}
        check_keywords(self.public_name, keywords, allowed - {"self", "module", "kwargs"})

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return super().parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        self._assign_inherited("parallel_devices", None if devices is None else self._check_devices(devices))

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Wraps the model as usual; the plugin learns of DDP's buckets, and does not see its own work."""
        if not self._memory.enabled:
            return super()._setup_model(model)
        wrapped: DistributedDataParallel = self._memory.data_parallel.construct(super()._setup_model, model)
        run_unseen_around_forward(wrapped, self._memory.data_parallel.buckets)
        return wrapped

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the step as usual, through the wrapper or, as in the trials of a batch size, without it."""
        model = self.model
        self._memory.data_parallel.called = model if isinstance(model, DistributedDataParallel) else None
        return super().training_step(*args, **kwargs)


def build_strategy(package: str) -> type[DDPOffloadStrategyMixin]:
    """Builds the class `DDPOffloadStrategy` for the Lightning package `package`, importing it if need be."""
    return build(DDPOffloadStrategyMixin, package)
