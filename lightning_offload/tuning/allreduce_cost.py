"""The exchange of gradients by DistributedDataParallel: withheld in trials, measured between them, and added.

A rank that ran out of memory in a trial leaves its step, and the others would wait for its gradients. So DDP does not
exchange any in trials, as under its ``no_sync``; what each exchange would have added to its step is the *exposed* part:
buckets go one after another, each when its gradients are there, and what is left after backward is waited for. How
long a bucket takes is measured, on the model's own process group, at a point where no rank can be missing.

Shortfalls: gradients are taken to be ready evenly over backward, and backward to be two thirds of a step. Compute is
not slowed down by the exchange, and hooks that compress gradients are not counted. The first iteration of a static
graph, which reduces all gradients at its end, is withheld too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_offload.accelerators import synchronize
from lightning_offload.errors import UnsupportedError
from lightning_offload.tuning.ranks import Coordinator

__all__ = ["AllReduceCost", "Exchanges", "GradientSyncOff", "Traffic"]

_FORWARD_SHARE = 1 / 3  # of a step: backward has twice as much to compute
_NUM_REPEATS = 5
_FLAGS = {  # DDP reads them in its forward
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a model under DDP exchanges after a backward.

    Attributes:
        num_bytes: Its gradients.
        bucket_bytes: The size of a full bucket.
        device: Where they are.
        group: The process group that reduces them.
    """

    num_bytes: int
    bucket_bytes: int
    device: torch.device
    group: Any

    @classmethod
    def of(cls, model: DistributedDataParallel) -> Traffic:
        """Read it off a model."""
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        return cls(
            num_bytes=sum(p.nbytes for p in parameters),
            bucket_bytes=model.bucket_bytes_cap,
            device=parameters[0].device,
            group=model.process_group,
        )


class GradientSyncOff:
    """While it is entered, models under DDP exchange nothing; counts what they would have.

    Args:
        allows_sync_batch_norm: Whether a model may have it: its ranks wait for one another within a step.

    Attributes:
        traffic: Of the model that ran last; None where none is under DDP.
        num_exchanges: How often a model would have exchanged its gradients.
    """

    def __init__(self, *, allows_sync_batch_norm: bool = False) -> None:
        self.traffic: Traffic | None = None
        self.num_exchanges = 0
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
        if torch.is_grad_enabled():
            self.num_exchanges += bool(module.require_backward_grad_sync)
            self.traffic = Traffic.of(module)
        before = {name: vars(module)[name] for name in _FLAGS if name in vars(module)}
        self._before[id(module)] = before
        vars(module).update({name: _FLAGS[name] for name in before})

    def _put_back(self, module: nn.Module, *_: Any) -> None:
        vars(module).update(self._before.pop(id(module), {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceCost:
    """How long exchanging a model's gradients takes, bucket by bucket.

    Attributes:
        bucket_seconds: Of each bucket, undisturbed, in the order in which they become ready.
    """

    bucket_seconds: tuple[float, ...]

    def exposed_seconds(self, step_seconds: float) -> float:
        """The part of it that is left when a step has ended.

        Args:
            step_seconds: Duration of forward and backward.
        """
        now, num = 0.0, len(self.bucket_seconds)
        for index, seconds in enumerate(self.bucket_seconds):
            ready = step_seconds * (_FORWARD_SHARE + (1 - _FORWARD_SHARE) * (index + 1) / num)
            now = max(now, ready) + seconds
        return max(0.0, now - step_seconds)


class Exchanges:
    """Times exchanges, each kind once: its noise is that of no trial then, and the same for all sizes.

    Args:
        agreement: Among the ranks.
        clock: Seconds.
    """

    def __init__(self, agreement: Coordinator, clock: Callable[[], float]) -> None:
        self._agreement, self._clock = agreement, clock
        self._known: dict[tuple[int, int], AllReduceCost] = {}

    def of(self, traffic: Traffic | None) -> AllReduceCost:
        """What exchanging this takes; collective, and the same on every rank.

        Args:
            traffic: This rank's; nothing is exchanged unless all ranks have some, and as much.
        """
        sizes = self._agreement.gather(None if traffic is None else (traffic.num_bytes, traffic.bucket_bytes))
        if traffic is None or len(set(sizes)) > 1:
            return AllReduceCost(bucket_seconds=())
        key = (traffic.num_bytes, traffic.bucket_bytes)
        if key not in self._known:
            self._known[key] = self._measured(traffic)
        return self._known[key]

    def _measured(self, traffic: Traffic) -> AllReduceCost:
        full, rest = divmod(traffic.num_bytes, traffic.bucket_bytes)
        largest = traffic.bucket_bytes if full else rest
        buffer = _allocated(largest, traffic.device)
        if not self._agreement.is_true_on_all(buffer is not None) or buffer is None:
            return AllReduceCost(bucket_seconds=())
        seconds = [_all_reduced(buffer, traffic, self._clock) for _ in range(1 + _NUM_REPEATS)]
        (each,) = self._agreement.largest([median(seconds[1:])])
        last = [each * rest / largest] if rest else []
        return AllReduceCost(bucket_seconds=(*[each] * full, *last))


def _allocated(num_bytes: int, device: torch.device) -> torch.Tensor | None:
    try:
        return torch.zeros(math.ceil(num_bytes / 4), device=device)
    except torch.OutOfMemoryError:
        return None


def _all_reduced(buffer: torch.Tensor, traffic: Traffic, clock: Callable[[], float]) -> float:
    begin = clock()
    distributed.all_reduce(buffer, group=traffic.group)
    synchronize(traffic.device)
    return clock() - begin
