"""The memory plugin: capture, plan, execute, re-plan, for any training loop.

Protocol: ``attach`` (or ``with``), then ``step()`` around each forward and backward, ``detach`` at the end. A
step that is closed after forward is finished by its backward, at the latest when the next one begins. One
plugin serves one device and one thread of training.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_offload.errors import PolicyError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.plugins.devices import find_device, supported
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.ledger import Ledger
from lightning_offload.plugins.out_of_memory import out_of_memory, with_second_attempt
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.provision import learn_from, provide_plan
from lightning_offload.plugins.report_data import Report
from lightning_offload.plugins.run import StepRun, start_run
from lightning_offload.plugins.saved_state import dump_kinds, load_kinds
from lightning_offload.plugins.settings import Budget, budget_bytes_on, check_settings
from lightning_offload.plugins.signature import step_signature
from lightning_offload.runtime.mode import Executor, executing
from lightning_offload.runtime.step_mode import mode_off, watch_backward

_T = TypeVar("_T")


class MemoryPlugin:
    """Trains within a budget of device memory, bit for bit as without it.

    Args:
        budget: Peak bytes of tensors alive on the compute device in a step, persistent state included: an int
            of bytes, ``"12GiB"``, a float in (0, 1] as a fraction of device memory, or None for all that the
            device has (on a CPU: no limit).
        policy: Who plans: "auto", "keep-all", "all-swap", "all-recompute", or a published system ("superneurons");
            :data:`~lightning_offload.planning.policies.POLICIES` has them all.
        tier: Where swapped tensors go: "host", "disk", or "auto": to the host, and to disk what has no room there.
        host_budget: Most host memory for swapped tensors; by default most of what is free.
        spill_dir: Folder for the spill file, which has no name there and goes with the process; by default that of
            temporary files.
        plan: A plan, or the path of one, to use instead of planning.
        keep: Patterns of module names whose saved tensors stay on the device.
        enabled: False makes everything a no-op, as does ``LIGHTNING_OFFLOAD=0`` in the environment.
        verify: Compare replays with their originals in the "first" step under a plan, "always" or "never".
        device: The compute device; by default that of the module, or of the step's inputs.
        module: The model; gives names to its parts in ``keep`` and in messages.

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
        device: torch.device | str | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        self._settings = check_settings(
            budget=budget, policy=policy, tier=tier, host_budget=host_budget, spill_dir=spill_dir, plan=plan,
            keep=keep, enabled=enabled, verify=verify,
        )  # fmt: skip
        self._device = supported(device) if device is not None else None
        if module is not None and not isinstance(module, torch.nn.Module):
            raise PolicyError(f"module={module!r} is a {type(module).__name__}: give a torch.nn.Module")
        self._module = weakref.ref(module) if module is not None else None
        self._state = PersistentState(self._before_optimizer_step)
        self._hardware: Hardware | None = None
        self._ledger = Ledger()
        self._executors: weakref.WeakSet[Executor] = weakref.WeakSet()
        self._run: StepRun | None = None
        self._is_attached = False
        self._is_open = False
        self._optimizer_ran_inside = False
        self._thread = 0
        self._end_watch: Callable[[], None] = _nothing

    # ---- attaching

    @property
    def enabled(self) -> bool:
        """Whether the plugin does anything."""
        return self._settings.enabled

    @property
    def policy(self) -> str:
        """Name of the planning policy."""
        return self._settings.policy

    @property
    def device(self) -> torch.device | None:
        """The compute device, None before it is known."""
        return self._device

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None without one, or before the device is known that a fraction is of."""
        if self._device is None and (self._settings.budget is None or isinstance(self._settings.budget, float)):
            return None
        if self._hardware is not None:
            return self._hardware.budget_bytes
        return budget_bytes_on(self._settings, self._device or torch.device("cpu"))

    def attach(self, module: torch.nn.Module | None = None, device: torch.device | str | None = None) -> None:
        """Begin to serve a model; idempotent."""
        if module is not None:
            self._module = weakref.ref(module)
        if device is not None:
            self._device = supported(device)
        if self.enabled:
            self._state.attach(self._module_now())
            if not self._is_attached:
                self._end_watch = watch_backward(self._around_backward)
            self._is_attached = True

    def detach(self) -> None:
        """Take every hook off and end every thread; idempotent. Plans are remembered."""
        self._finish()
        self._state.detach()
        self._end_watch()
        if self._hardware is not None:
            self._ledger.tier_use = self._hardware.use()
            self._hardware.tiers.close()
            self._hardware = None
        self._is_attached = False

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

    @contextlib.contextmanager
    def step(self, *inputs: Any, **kwargs: Any) -> Iterator[None]:
        """Around one forward and its backward, or around forward alone.

        Args:
            inputs: What the step is given; shapes and dtypes of the tensors in it choose the cached plan.
            kwargs: Likewise.

        Raises:
            BudgetInfeasibleError: On entering, before anything ran: no plan can meet the budget.
        """
        if not self._is_attached or _thread.num_open or not torch.is_grad_enabled():
            yield
            return
        self._finish()
        run = self._begin((inputs, kwargs))
        del inputs, kwargs  # the caller's to free
        if run is None:
            yield
            return
        with self._opened(run, hooks=True):
            yield

    @contextlib.contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Around a backward of the step opened last, so that its ops and its peak are measured."""
        run = self._run
        if run is None or self._is_open:
            yield
            return
        with self._opened(run, hooks=False):
            yield

    @contextlib.contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Around every backward of the process: those of the open or pending step are watched where they must be."""
        run = self._run
        is_nested = torch._C._current_graph_task_id() != -1
        if run is None or is_nested or threading.get_ident() != self._thread or run.executor.is_spent:
            yield  # another's
            return
        run.executor.backward_begins()
        if not self._is_open:
            with self._opened(run, hooks=False):
                yield
        elif run.executor.watches_backward:
            yield
        else:
            with mode_off():
                yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run ``loss.backward(**kwargs)`` as part of the step opened last."""
        with self.backward_scope():
            loss.backward(**kwargs)

    @contextlib.contextmanager
    def _opened(self, run: StepRun, *, hooks: bool) -> Iterator[None]:
        self._is_open = True
        _thread.num_open += 1
        self._thread = threading.get_ident()
        try:
            with run.timed(self._state.bytes_beside), executing(run.executor, hooks=hooks):
                yield
        except BaseException as error:
            self._run, self._optimizer_ran_inside = None, run.optimizer_ran_inside
            if self._hardware is not None:
                with contextlib.suppress(Exception):  # the step's own error is the one to tell
                    self._hardware.tiers.drain()
            if isinstance(error, torch.OutOfMemoryError):
                raise out_of_memory(error, run.device, run.kind, self.budget_bytes) from None
            raise
        finally:
            self._is_open = False
            _thread.num_open -= 1
            run.tiers.tidy()

    def _begin(self, inputs: Any) -> StepRun | None:
        """Choose what the coming step does; None to leave it alone."""
        hardware = self._hardware_for(inputs)
        kind = self._ledger.choose(step_signature(inputs))
        gradients = self._state.gradients()
        kind.note_gradients(sum(gradients.values()), 0)
        provide_plan(self._ledger.key, kind, hardware, self._state, self._settings)
        self._ledger.begin_step()
        if kind.runs_plainly(hardware.budget_bytes):
            return None
        peaks = self._ledger.peaks
        run = start_run(kind, hardware.tiers, hardware.device, self._module_now(), self._settings.verify, peaks)
        peaks.begin_step(hardware.device, is_watched=run.is_watched)
        run.state_version = self._state.version
        run.watch_gradients(gradients, self._state.gradients)
        self._executors.add(run.executor)
        self._run = run
        return run

    def _module_now(self) -> torch.nn.Module | None:
        return self._module() if self._module is not None else None

    def _hardware_for(self, inputs: Any) -> Hardware:
        if self._device is None:
            self._device = supported(find_device(self._module_now(), inputs))
        if self._hardware is None:
            self._hardware = Hardware(self._device, self._settings)
        return self._hardware

    def _finish(self) -> None:
        """Take over what the last step showed, once its backward has run."""
        run, self._run = self._run, None
        if run is None:
            return
        if run.recorder is not None:
            self._state.learn_leaves(run.recorder.leaves)
        run.finish(self._state)
        self._ledger.end_step(run)
        if self._hardware is not None:
            learn_from(run, self._hardware)

    def _before_optimizer_step(self, parameters: list[Tensor]) -> None:
        if self._is_open and self._run is not None:
            self._run.optimizer_ran_inside = True
        for executor in list(self._executors):
            if executor.is_recomputing:
                executor.settle_readers_of(parameters)

    # ---- running out of memory

    def run(self, step: Callable[[], _T], *inputs: Any, **kwargs: Any) -> _T:
        """Run one forward and its backward, given as a function, and once more where the device ran out of memory.

        A step is repeated only where the model is known (``module=``) and all that the step changed in it can be
        put back: buffers, new gradients and the random state. What else the function changes is the caller's.

        Args:
            step: Runs forward and backward.
            inputs: What the step is given, cf. :meth:`step`.
            kwargs: Likewise.

        Returns:
            What ``step`` returns.

        Raises:
            torch.OutOfMemoryError: The device ran out of memory and the step could not be repeated.
        """

        def attempt() -> _T:
            with self.step(*inputs, **kwargs):
                return step()

        return with_second_attempt(attempt, self._module_now(), lambda: self._optimizer_ran_inside)

    # ---- results

    def report(self) -> Report:
        """Figures of the kind of step that ran last."""
        if not self._is_open and self._run is not None and self._run.executor.num_unpacks:
            self._finish()
        ledger, hardware = self._ledger, self._hardware
        if ledger.kind.program is None and hardware is not None:
            provide_plan(ledger.key, ledger.kind, hardware, self._state, self._settings)
        return ledger.report(
            budget_bytes=self.budget_bytes,
            tier_use=hardware.use() if hardware is not None else ledger.tier_use,
            optimizer_peak_bytes=self._state.optimizer_peak_bytes,
            policy=self.policy,
        )

    def state_dict(self) -> dict[str, Any]:
        """The recorded graphs and their plans, as JSON-able data."""
        return dump_kinds(self._ledger.kinds)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start with plans made earlier; their replays are verified again in their first step.

        Raises:
            PlanError: The state is malformed.
        """
        self._ledger.kinds.update(load_kinds(state, self.policy, self.budget_bytes))


class _Thread(threading.local):
    """Steps open in a thread; inside one, another is a no-op, whoever's it is: the outermost plugin serves."""

    num_open = 0


_thread = _Thread()


def _nothing() -> None:
    """There is no watch to end."""
