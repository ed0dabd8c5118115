"""The exchange of gradients by DistributedDataParallel: withheld in trials, measured between them, and added.

A rank that ran out of memory in a trial leaves its step, and the others would wait for its gradients. So DDP does not
exchange any in trials, as under its ``no_sync``; what each exchange would have added to its step is the *exposed* part:
buckets go one after another, each when its gradients are there, and what is left after backward is waited for. How
long a bucket takes is measured, on the model's own process group, at a point where no rank can be missing.

A communication hook of the model's is what its buckets go through, so it is timed in place of a plain reduction, on a
bucket of zeros. One with a state of its own other than a process group is not called: it would learn from the zeros.
A hook in Python holds backward up while it runs, so nothing of it is hidden.

Shortfalls: gradients are taken to be ready evenly over backward, and backward to be two thirds of a step. Compute is
not slowed down by the exchange. The first iteration of a static graph, which reduces all gradients at its end, is
withheld too.
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
        hook: The communication hook that they go through in its place, and its state; None where there is none.
    """

    num_bytes: int
    bucket_bytes: int
    device: torch.device
    group: Any
    hook: tuple[Callable[..., Any], Any] | None = None

    @classmethod
    def of(cls, model: DistributedDataParallel) -> Traffic:
        """Read it off a model."""
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        return cls(
            num_bytes=sum(p.nbytes for p in parameters),
            bucket_bytes=model.bucket_bytes_cap,
            device=parameters[0].device,
            group=model.process_group,
            hook=_hook_of(model),
        )


def _hook_of(model: DistributedDataParallel) -> tuple[Callable[..., Any], Any] | None:
    """The communication hook of a model that can be tried on zeros, and its state."""
    hooks = list(getattr(model, "_comm_hooks", None) or ())
    if len(hooks) != 1:
        return None
    hook, state = hooks[0]
    is_plain = state is None or isinstance(state, distributed.ProcessGroup)
    return (hook, state) if callable(hook) and is_plain else None


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
        is_blocking: Whether backward waits for each.
    """

    bucket_seconds: tuple[float, ...]
    is_blocking: bool = False

    def exposed_seconds(self, step_seconds: float) -> float:
        """The part of it that is left when a step has ended.

        Args:
            step_seconds: Duration of forward and backward.
        """
        if self.is_blocking:
            return sum(self.bucket_seconds)
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
        self._known: dict[tuple[int, int, bool], AllReduceCost] = {}

    def of(self, traffic: Traffic | None) -> AllReduceCost:
        """What exchanging this takes; collective, and the same on every rank.

        Args:
            traffic: This rank's; nothing is exchanged unless all ranks have some, and as much.
        """
        key = None if traffic is None else (traffic.num_bytes, traffic.bucket_bytes, traffic.hook is not None)
        if len(set(self._agreement.gather(key))) > 1 or traffic is None or key is None:
            return AllReduceCost(bucket_seconds=())
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
        if traffic.hook is not None and rest:
            last = [each]  # whatever a hook does besides, it does for a small bucket too
        return AllReduceCost(bucket_seconds=(*[each] * full, *last), is_blocking=traffic.hook is not None)


def _allocated(num_bytes: int, device: torch.device) -> torch.Tensor | None:
    try:
        return torch.zeros(math.ceil(num_bytes / 4), device=device)
    except torch.OutOfMemoryError:
        return None


def _all_reduced(buffer: torch.Tensor, traffic: Traffic, clock: Callable[[], float]) -> float:
    begin = clock()
    if traffic.hook is None:
        distributed.all_reduce(buffer, group=traffic.group)
    else:
        hook, state = traffic.hook
        hook(state, _Bucket(buffer)).wait()
    synchronize(traffic.device)
    return clock() - begin


class _Bucket:
    """What a communication hook is given, as DDP's own bucket that cannot be made in Python."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        """The gradients, flat."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put others in their place."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, one by one."""
        return [self._buffer]

    def parameters(self) -> list[torch.Tensor]:
        """What they are of."""
        return [self._buffer]

    def index(self) -> int:
        """Which bucket it is: the first one is not the last, of which some hooks keep what they know."""
        return 0

    def is_last(self) -> bool:
        """Whether it is the last."""
        return False
