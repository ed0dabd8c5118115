"""The memory plugin, for any training loop: what is asked of it, and what it tells.

Protocol: ``attach`` (or ``with``), then ``step()`` around each forward and backward, ``detach`` at the end. A
step that is closed after forward is finished by its backward, at the latest when the next one begins. One
plugin serves one device and one thread of training. What a step is, ``steps`` says.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_offload.errors import PolicyError, type_of
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.plugins.buffer_copies import BufferCopies
from lightning_offload.plugins.data_parallel import DataParallelModels
from lightning_offload.plugins.devices import supported
from lightning_offload.plugins.misuse import StepScope
from lightning_offload.plugins.out_of_memory import with_second_attempt
from lightning_offload.plugins.plan_entry import Phase
from lightning_offload.plugins.report import Report, make_report
from lightning_offload.plugins.settings import Budget, check_settings
from lightning_offload.plugins.steps import Steps

_T = TypeVar("_T")


class MemoryPlugin:
    """Trains within a budget of device memory, bit for bit as without it.

    Args:
        budget: Peak bytes of tensors alive on the compute device in a step, persistent state included: an int
            of bytes, ``"12GiB"``, a float in (0, 1] as a fraction of device memory, or None for that
            of ``LIGHTNING_OFFLOAD_BUDGET`` in the environment, and without one for what is free on the device, less
            a margin (on a CPU: no limit).
        policy: Who plans: "auto", "keep-all", "all-swap", "all-recompute", or a published system ("superneurons");
            :data:`~lightning_offload.planning.planner.POLICIES` has them all.
        tier: Where swapped tensors go: "host", "disk", or "auto": to the host, and to disk what has no room there.
        host_budget: Most host memory for swapped tensors; by default most of what is free, shared by the ranks of
            this host.
        spill_dir: Folder for the spill file, which has no name there and goes with the process; by default that of
            temporary files.
        plan: A plan, or the path of one, to use instead of planning: with its step beside it, as ``lightning-offload
            plan --output`` writes them, from the first step on. Without a budget that of the plan is kept.
        keep: Patterns of module names whose saved tensors stay on the device.
        enabled: False makes everything a no-op, as does ``LIGHTNING_OFFLOAD=0`` in the environment.
        verify: Compare replays with their originals in the "first" step under a plan, "always" or "never".
        replace_checkpointing: Whether regions that the model checkpoints itself (``torch.utils.checkpoint``, Hugging
            Face's ``gradient_checkpointing_enable``) run as if they were not, so that what they save is planned.
        chunked_loss: Whether the model's cross-entropy is computed in chunks of rows, so that its logits never exist at
            once: the same loss up to the order of sums, not bit for bit. The layer that makes the logits is that of
            ``get_output_embeddings()``, as Hugging Face's models have it, or the one that is named.
        device: The compute device; by default that of the module, or of the step's inputs.
        module: The model; gives names to its parts in ``keep`` and in messages. Under DDP the wrapper: its gradient
            buckets count, and steps with and without an all-reduce have plans of their own.

    Raises:
        OffloadError: A keyword is wrong; the message says which and what is allowed.
    """

    def __init__(
        self,
        budget: Budget = None,
        *,
        policy: str = "auto",
        tier: str = "auto",
        host_budget: Budget = None,
        spill_dir: str | os.PathLike[str] | None = None,
        plan: MemoryPlan | str | os.PathLike[str] | None = None,
        keep: str | Sequence[str] = (),
        enabled: bool = True,
        verify: str = "first",
        replace_checkpointing: bool = False,
        chunked_loss: bool | str = False,
        device: torch.device | str | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        settings = check_settings(
            budget=budget, policy=policy, tier=tier, host_budget=host_budget, spill_dir=spill_dir, plan=plan,
            keep=keep, enabled=enabled, verify=verify, replace_checkpointing=replace_checkpointing,
            chunked_loss=chunked_loss,
        )  # fmt: skip
        if module is not None and not isinstance(module, torch.nn.Module):
            raise PolicyError(f"module={module!r} is {type_of(module)}: give a torch.nn.Module")
        self._steps = Steps(settings, module, supported(device) if device is not None else None)

    @property
    def enabled(self) -> bool:
        """Whether the plugin does anything."""
        return self._steps.settings.enabled

    @property
    def policy(self) -> str:
        """Name of the planning policy."""
        return self._steps.settings.policy

    @property
    def device(self) -> torch.device | None:
        """The compute device, None before it is known."""
        return self._steps.device

    @property
    def budget(self) -> Budget:
        """The budget as it was asked for."""
        return self._steps.settings.budget

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None without one, or before the device is known that a fraction is of."""
        return self._steps.budget_bytes

    # ---- attaching

    def attach(self, module: torch.nn.Module | None = None, device: torch.device | str | None = None) -> None:
        """Begin to serve a model; idempotent."""
        self._steps.attach(module, supported(device) if device is not None else None)
        if self.enabled:
            _attached.add(self)

    @property
    def data_parallel(self) -> DataParallelModels:
        """The DistributedDataParallel models that the steps have to do with."""
        return self._steps.state.data_parallel

    def detach(self) -> None:
        """Take every hook off and end every thread; idempotent. Plans are remembered."""
        _attached.discard(self)
        self._steps.detach()

    def __enter__(self) -> MemoryPlugin:
        """Attach."""
        self.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        """Detach."""
        self.detach()

    def __reduce__(self) -> NoReturn:
        """A plugin belongs to its process.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a MemoryPlugin cannot be pickled or copied, it holds hooks and threads of this process: make another, and "
            "give it this one's plans with load_state_dict(plugin.state_dict())"
        )

    # ---- steps

    def step(self, *inputs: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Around one forward and its backward, or around forward alone.

        Args:
            inputs: What the step is given; shapes and dtypes of the tensors in it choose the cached plan.
            kwargs: The same, by name.

        Raises:
            BudgetInfeasibleError: On entering, before anything ran: no plan can meet the budget.
        """
        return StepScope(self._steps.step((inputs, kwargs)), self._steps.misuse)

    def backward_scope(self) -> AbstractContextManager[None]:
        """Around a backward of the step opened last, so that its ops and its peak are measured."""
        return self._steps.backward_scope()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run ``loss.backward(**kwargs)`` as part of the step opened last."""
        with self.backward_scope():
            loss.backward(**kwargs)

    def run(self, step: Callable[[], _T], *inputs: Any, **kwargs: Any) -> _T:
        """Run one forward and its backward, given as a function, and once more where the device ran out of memory.

        A step is repeated only where the model is known (``module=``) and all that the step changed in it can be
        put back: buffers, new gradients and the random state. What else the function changes is the caller's.

        Args:
            step: Runs forward and backward.
            inputs: What the step is given, cf. :meth:`step`.
            kwargs: The same, by name.

        Returns:
            What ``step`` returns.

        Raises:
            torch.OutOfMemoryError: The device ran out of memory and the step could not be repeated.
        """

        steps = self._steps

        def attempt() -> _T:
            steps.has_optimizer_run = not steps.is_attached  # then nobody tells
            with self.step(*inputs, **kwargs):
                return step()

        copies = steps.state.copies if steps.is_attached else BufferCopies()
        return with_second_attempt(attempt, steps.module, lambda: steps.has_optimizer_run, copies)

    def plan(self) -> None:
        """Have the plan for the next step like the last one made now, and not as it begins.

        For whoever wants to see it before; where there can be none the next step raises, and nothing is raised here.
        """
        self._steps.finish_if_read()
        self._steps.plan_ahead()

    # ---- results

    def report(self, *, of_last: bool = False) -> Report:
        """Figures of the run: of the shape of step that needs most, and some of each of the others.

        Args:
            of_last: Of the shape of the last step instead.
        """
        self._steps.finish_if_read()
        return make_report(self._steps, of_last=of_last)

    @property
    def phase(self) -> Phase:
        """What the last step did, cf. :class:`~lightning_offload.plugins.report.Report`; it costs nothing to ask."""
        return self._steps.cache.phase

    @property
    def step_kinds(self) -> frozenset[str]:
        """Signatures of the kinds of step that it has met, or was given plans of."""
        return frozenset(self._steps.cache.entries)

    def forget(self, *, keep: Collection[str] = ()) -> None:
        """Drop what was learned of kinds of step: they are recorded and planned anew when they come again.

        For steps that were only tried: their plans would go into checkpoints, and their figures into the report.

        Args:
            keep: Signatures of kinds to keep, of :attr:`step_kinds`; none for a plugin as new.

        Raises:
            UnsupportedError: A step is open.
        """
        self._steps.forget(keep)

    def state_dict(self) -> dict[str, Any]:
        """The recorded graphs and their plans, as JSON-able data."""
        return self._steps.cache.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start with plans made earlier; their replays are verified again in their first step.

        Raises:
            PlanError: The state is malformed.
        """
        self._steps.cache.load_state_dict(state, self.policy, self.budget_bytes)


_attached: weakref.WeakSet[MemoryPlugin] = weakref.WeakSet()


def attached_plugins() -> list[MemoryPlugin]:
    """The plugins of this process that serve a model now."""
    return list(_attached)
