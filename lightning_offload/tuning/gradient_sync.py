"""The exchange of gradients by DistributedDataParallel, kept off until a size is known to fit on all ranks.

A rank that ran out of memory in a trial leaves its step, and the others would wait for its gradients. So the first
steps of a trial exchange none, as under DDP's ``no_sync``, the first iteration of a static graph, which reduces all
gradients at its end, included.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_offload.errors import UnsupportedError

__all__ = ["GradientSyncOff"]

_FLAGS = {  # DDP reads them in its forward
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


class GradientSyncOff:
    """While it is entered, models under DDP exchange nothing.

    Args:
        allows_sync_batch_norm: Whether a model may have it: its ranks wait for one another within a step.
    """

    def __init__(self, *, allows_sync_batch_norm: bool = False) -> None:
        self._allows_sync_batch_norm = allows_sync_batch_norm
        self._hooks = contextlib.ExitStack()
        self._before: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> GradientSyncOff:
        self._hooks.callback(register_module_forward_pre_hook(self._withhold).remove)
        self._hooks.callback(register_module_forward_hook(self._put_back, always_call=True).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _withhold(self, module: nn.Module, _: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        if not self._allows_sync_batch_norm and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise UnsupportedError(
                "a batch size cannot be tried with SyncBatchNorm: a rank that runs out of memory would leave the "
                "others waiting; use batch norm without synchronisation, or set the batch size yourself"
            )
        before = {name: vars(module)[name] for name in _FLAGS if name in vars(module)}
        self._before[id(module)] = before
        vars(module).update({name: _FLAGS[name] for name in before})

    def _put_back(self, module: nn.Module, *_: Any) -> None:
        vars(module).update(self._before.pop(id(module), {}))
