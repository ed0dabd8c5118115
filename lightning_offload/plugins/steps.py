"""The steps of a training under a plugin: each is recorded, planned and followed, or runs as it is.

One step is open at a time, in one thread of training: from its forward, through its backward, which may come after
the scope was closed, until the next one begins. Whoever wants a step's figures finishes it first.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_offload.accelerators import is_capturing, kind_of, memory_of
from lightning_offload.errors import BudgetInfeasibleError, PlanError, SpillError, UnsupportedError
from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.baseline import Baseline, There
from lightning_offload.plugins.checkpointing import Checkpointing, NestedHooks, watch_regions
from lightning_offload.plugins.chunked_losses import ChunkedLosses
from lightning_offload.plugins.data_parallel import mark_of, run_unseen_around_forward
from lightning_offload.plugins.devices import find_device, supported
from lightning_offload.plugins.forwards import Forwards
from lightning_offload.plugins.hardware import Hardware, TierUse
from lightning_offload.plugins.imported_plan import ImportedPlan
from lightning_offload.plugins.infeasible import baseline_parts, shapes_of, with_reasons
from lightning_offload.plugins.inputs import flatten
from lightning_offload.plugins.misuse import Misuse
from lightning_offload.plugins.out_of_memory import out_of_memory
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.plain_steps import PlainStep
from lightning_offload.plugins.plan_cache import PlanCache
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_source import Imported, ShapeBucket
from lightning_offload.plugins.settings import Settings, budget_bytes_on
from lightning_offload.plugins.shape_families import StepShape, shape_of_leaves
from lightning_offload.plugins.step import DevicePeaks, StepRun, start_run
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import (
    executing,
    patch_data_escapes,
    watch_backward,
    within_hooks_of_others,
    within_transform,
)
from lightning_offload.tensors import compiled_code


class _Coming(NamedTuple):
    """A step that is about to begin.

    Attributes:
        shape: What it is known by.
        leaves: What it is given.
        gradients: Of earlier steps, those that are there: bytes by identity.
        hardware: Where it runs.
    """

    shape: StepShape
    leaves: Sequence[Any]
    gradients: dict[int, int]
    hardware: Hardware


class Steps:
    """Serves a model's steps: has each one recorded, planned, executed and learned from.

    Args:
        settings: What the user asked for.
        module: The model, where it is known.
        device: The compute device, where it is known.

    Attributes:
        settings: What the user asked for.
        device: The compute device, where it is known; found from the model or the inputs of the first step otherwise.
        hardware: The device with its lower tiers; None before the first step, and while detached.
        state: The state of the training.
        baseline: What is on the device beside the steps.
        cache: The specializations met so far.
        imported: The plan that the user gave, if any.
        peaks: What the device's allocator counts.
        tier_use: How much of the lower tiers was in use when the plugin was detached.
        executors: Those that still hold something.
        has_optimizer_run: Whether an optimizer updated parameters since somebody set this to False.
        nested_hooks: What the hooks of steps do not see.
        misuse: What was told of steps that the plugin does not serve.
        checkpointing: The regions that the program checkpoints itself.
        losses: Those that are computed in chunks.
        is_attached: Whether a model is served.
    """

    def __init__(self, settings: Settings, module: torch.nn.Module | None, device: torch.device | None) -> None:
        self.settings = settings
        self.device = device
        self.hardware: Hardware | None = None
        self.state = PersistentState(self._before_optimizer_step, self._after_optimizer_step)
        self.baseline = Baseline(self.state)
        self.cache = PlanCache()
        self.imported = ImportedPlan(settings)
        self.peaks = DevicePeaks()
        self.tier_use = TierUse()
        self.executors: weakref.WeakSet[StepExecutor] = weakref.WeakSet()
        self.has_optimizer_run = False
        self.nested_hooks = NestedHooks()
        self.misuse = Misuse()
        self.checkpointing = Checkpointing(is_replaced=settings.replace_checkpointing)
        self.losses = ChunkedLosses(settings.chunked_loss)
        self._module = weakref.ref(module) if module is not None else None
        self._undo = contextlib.ExitStack()
        self._run: StepRun | None = None
        self._plain: tuple[PlanEntry, PlainStep] | None = None
        self.is_attached = self._was_attached = False
        self._is_open = False
        self._num_optimizers = 0  # whose step is under way: one may call another
        self._num_nested: int | None = None  # steps in its closure; None outside
        self._is_repeating = False  # whether an optimizer called that more than once
        self._forwards = Forwards()
        self._guessed_bytes = 0  # of what the last look found beside a step
        self._earlier_hardware: Hardware | None = None  # of the last use, whose tiers are closed
        self._has_begun_backward = False  # of a step that runs as without the plugin

    @property
    def module(self) -> torch.nn.Module | None:
        """The model, while it lives; under DDP that inside the wrapper."""
        module = self._module() if self._module is not None else None
        return module.module if isinstance(module, DistributedDataParallel) else module

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None without one, or before the device is known that a fraction is of."""
        if self.device is None and (self.settings.budget is None or isinstance(self.settings.budget, float)):
            return None
        if self.hardware is not None:
            return self.hardware.budget_bytes
        return budget_bytes_on(self.settings, self.device or torch.device("cpu"))

    # ---- attaching

    def attach(self, module: torch.nn.Module | None, device: torch.device | None) -> None:
        """Begin to serve a model; idempotent."""
        if module is not None:
            self._module = weakref.ref(module)
        if device is not None:
            self.device = device
        if not self.settings.enabled:
            return
        model = self._module() if self._module is not None else None
        wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.state.data_parallel.called = wrapper
        if wrapper is not None:
            self.state.data_parallel.watch(wrapper)
            self._undo.callback(run_unseen_around_forward(wrapper, self.state.buckets))
        if not self.losses.is_attached:
            self.losses.attach(*[part for part in [self.module] if part is not None])
        self.state.attach(self.module)
        if not self.is_attached:
            self._undo.callback(watch_backward(self._around_backward))
            self._undo.callback(patch_data_escapes())
            self._undo.callback(watch_regions())
        self.is_attached = self._was_attached = True

    def detach(self) -> None:
        """Take every hook off and end every thread; idempotent."""
        self.finish()
        self.losses.detach()
        self.peaks.end_optimizer(is_whole=False)
        self.state.detach()
        self._undo.close()
        if self.hardware is not None:
            self.tier_use = self.hardware.use()
            self.hardware.tiers.close()
            self.hardware, self._earlier_hardware = None, self.hardware
        self.is_attached = False

    # ---- scopes

    @contextlib.contextmanager
    def step(self, inputs: tuple[Any, ...], wrapper: DistributedDataParallel | None = None) -> Iterator[None]:
        """Around one forward and its backward, or around forward alone.

        Args:
            inputs: What the step is given; shapes and dtypes of the tensors in it choose the cached plan.
            wrapper: The DDP model in whose forward the step begins, if it does.

        Raises:
            BudgetInfeasibleError: On entering, before anything ran: no plan can meet the budget.
            UnsupportedError: On entering: a CUDA graph is being captured.
        """
        is_idle = not self.is_attached or _thread.num_open or not torch.is_grad_enabled()
        if is_idle or within_transform() or within_hooks_of_others():
            self._tell_why_idle()
            yield
            return
        self.misuse.note_step()
        if is_capturing():
            raise UnsupportedError(
                "a step cannot begin while a CUDA graph is captured, whose memory is not the plugin's to manage: begin "
                "the capture within memory.step(), or capture the whole step with LIGHTNING_OFFLOAD=0 or enabled=False"
            )
        if self._goes_on:
            leaves, spec = flatten(inputs)
            shape = shape_of_leaves(leaves, spec)
            self._forwards.go_on(shape)
            self._note_inputs(leaves, shape)
            del inputs, leaves, spec
            with self._forward_of(self._run):
                yield
            return
        self.state.thread = threading.get_ident()
        self.finish()
        self.checkpointing.begin_step()
        self.losses.begin_step()
        try:
            run = self._begin((*inputs, *mark_of(wrapper or self.state.data_parallel.called)))
        except BaseException:
            self._forwards.abandon()
            raise
        del inputs  # the caller's to free
        with self._forward_of(run):
            yield

    @contextlib.contextmanager
    def _forward_of(self, run: StepRun | None) -> Iterator[None]:
        """Around a forward, and what else is in its scope; None for a step that runs as without the plugin."""
        opened = self._plainly() if run is None else self._opened(run, hooks=True)
        with self.checkpointing.scope(), self.losses.scope(), opened:
            yield

    @property
    def _goes_on(self) -> bool:
        """Whether the forward that begins is one more of the last step, which waits for its backward."""
        run = self._run
        if not self._forwards.num_seen or threading.get_ident() != self.state.thread:
            return False
        if run is None:  # it runs as without the plugin
            return not self._has_begun_backward and self._forwards.expects_more
        if run.executor.has_begun_backward or not (run.executor.packs or self._forwards.expects_more):
            return False
        return run.executor.reopen()

    def _tell_why_idle(self) -> None:
        """Warn where a step has no effect and that can hardly be meant."""
        if not self.settings.enabled or not torch.is_grad_enabled():
            return
        if _thread.num_open:
            if _thread.owner is not self:
                self.misuse.tell("within another", stacklevel=5)
        elif not self._was_attached:
            self.misuse.tell("not attached", stacklevel=5)
        elif within_transform():
            self.misuse.tell("within a transform", stacklevel=5)
        elif self.is_attached:
            self.misuse.tell("within hooks of others", stacklevel=5)

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
        """Around every backward of the process: those of the open or pending step are watched where they must be.

        One within a transform of ``torch.func`` is that transform's own, of a graph that saves nothing by hooks: like
        one within another backward it is not the step's.
        """
        if compiled_code.is_being_made():  # whose compiler asks autograd what a backward would do
            yield
            return
        run = self._run
        is_within_transform = within_transform()
        is_nested = torch._C._current_graph_task_id() != -1 or is_within_transform
        self.peaks.end_optimizer(is_whole=False)  # a mode would change it: Note [modes change backward]
        if run is None and not is_nested and threading.get_ident() == self.state.thread:
            self._has_begun_backward = True
            with self._plainly():
                yield
            return
        is_of_another_thread = threading.get_ident() != self.state.thread
        if run is None or run.executor.is_spent or (is_within_transform and is_of_another_thread):
            yield  # another's
            return
        executor = run.executor
        is_elsewhere = is_of_another_thread and not is_nested
        if is_elsewhere and (_thread.trains_with_another_than(self) or not executor.sees_user_code):
            yield
            return
        if is_elsewhere:  # perhaps its own, by another thread than forward's: then what that writes matters
            with executor.seeing_writes():
                yield
            return
        with contextlib.ExitStack() as stack:
            if not is_nested:
                run.backward_begins()
                executor.backward_begins()
                stack.callback(executor.backward_ends)
            if not (is_nested or self._is_open):
                stack.enter_context(self._opened(run, hooks=False))
            elif not executor.watches_backward:
                stack.enter_context(executor.unseen())
            if executor.sees_user_code:
                stack.enter_context(executor.seeing_user_code())
            yield
        if not is_nested:
            run.backward_ends()

    @contextlib.contextmanager
    def _plainly(self) -> Iterator[None]:
        """Around each scope of a step that runs plainly: watched, where that is for it to fit the budget."""
        if self._plain is None or self.device is None:
            yield
            return
        entry, step = self._plain
        _thread.begin(self)
        self.state.thread = threading.get_ident()
        try:
            with step.scope():
                yield
        except torch.OutOfMemoryError as error:
            self._plain = None
            self._forwards.abandon()
            raise out_of_memory(error, self.device, entry, self.budget_bytes) from None
        finally:
            _thread.end()
            entry.seen.measured_peak_bytes = step.peak_bytes

    @contextlib.contextmanager
    def _opened(self, run: StepRun, *, hooks: bool) -> Iterator[None]:
        self._is_open = True
        _thread.begin(self)
        self.state.thread = threading.get_ident()
        try:
            nested = self.nested_hooks.around(run.executor.pack) if hooks else contextlib.nullcontext()
            with run.timed(), executing(run.executor, hooks=hooks), nested:
                yield
        except BaseException as error:
            self._run = None
            self._forwards.abandon()
            if run.recorder is not None:
                run.recorder.close()
            if self.hardware is not None:
                with contextlib.suppress(Exception):  # the step's own error is the one to tell
                    self.hardware.tiers.drain()
            if isinstance(error, torch.OutOfMemoryError):
                raise out_of_memory(error, run.device, run.entry, self.budget_bytes) from None
            raise
        finally:
            self._is_open = False
            _thread.end()
            run.tiers.tidy()
        if self._is_within_optimizer and run.executor.num_unpacks and not kind_of(run.device).counts_memory:
            self.peaks.begin_optimizer(run.device, (), 0)  # what it makes until its closure is called again

    # ---- a step's begin and end

    def before_ddp(self) -> None:
        """Before DDP's forward, where steps begin inside of it: the last one must have noted the buckets it used."""
        if torch.is_grad_enabled() and not self._is_open and not self._goes_on:
            self.finish()

    def _begin(self, inputs: Any) -> StepRun | None:
        """Choose what the coming step does; None to leave it alone."""
        hardware = self.hardware_for(inputs)
        hardware.tiers.settle()  # what is still on its way would be memory of this step, and is in no live scan
        if kind_of(hardware.device).has_cudnn and torch.backends.cudnn.benchmark:
            inputs = (*inputs, _TryingAlgorithms())
        leaves, spec = flatten(inputs)
        shape, peaks = self._forwards.begin(shape_of_leaves(leaves, spec)), self.peaks
        self._has_begun_backward = False
        may_be_plain = self.settings.policy == "auto" and not self.imported.is_available
        plainly_on = hardware if may_be_plain else None
        entry = self.cache.choose(shape, plainly_on, may_wait=not self.imported.waits)
        self.imported.offer(entry)
        self._note_nested()
        self.baseline.note_left(peaks.end_optimizer(is_whole=False))
        self._num_optimizers = 0
        self.baseline.begin_step()
        self._note_inputs(leaves, shape)
        hardware.refresh()
        is_planned_here = entry.phase != "unplanned" and not entry.has_ample_room
        is_up_to_date = not is_planned_here or entry.made.hardware_version == hardware.version
        if is_up_to_date and entry.runs_plainly(hardware.budget_bytes, hardware.device, self.settings.policy):
            self._begin_plainly(entry, hardware)
            return None
        gradients = self.state.gradients()
        coming = _Coming(shape, leaves, gradients, hardware)
        entry.begin_with_gradients(gradients)
        there = self._count_baseline(entry, coming)
        with peaks.paused(hardware.device):
            chosen, entry = entry, self._plan(entry, coming)
        if entry.phase == "recording" and (entry is not chosen or there is None):
            there = self._count_baseline(entry, coming)
        if entry.runs_plainly(hardware.budget_bytes, hardware.device, self.settings.policy):
            self._begin_plainly(entry, hardware)
            return None
        self.cache.begin_step()
        self._run = run = start_run(
            entry, hardware.tiers, hardware.device, self.module, self.settings.verify, peaks, there, gradients,
            self.state, shape.family, is_first_sight=self.cache.is_first_sight,
        )  # fmt: skip
        self.executors.add(run.executor)
        return run

    def _note_inputs(self, leaves: Sequence[Any], shape: StepShape) -> None:
        """Follow what a forward is given, where no allocator counts."""
        if self.device is not None and memory_of(self.device) is None:
            self.baseline.note_inputs(self.device, leaves, shape.family)

    def _note_nested(self) -> None:
        """Notice a step in the closure of an optimizer, which keeps what it makes from one call of that to the next."""
        if self._num_nested is None:
            return
        self._num_nested += 1
        if self._num_nested > 1 and not self._is_repeating:
            self._is_repeating = True
            self.baseline.doubt()

    @property
    def _is_within_optimizer(self) -> bool:
        """Whether steps are in the closure of an optimizer that calls it again and again."""
        return self._num_nested is not None and self._is_repeating

    def _plan(self, entry: PlanEntry, coming: _Coming) -> PlanEntry:
        """Have a plan for the coming step; the specialization that it is for.

        Raises:
            BudgetInfeasibleError: No plan can meet the budget.
        """
        lifecycle.weigh_search(entry)
        is_searched, is_exact, before = entry.made.search == "due", False, entry.program
        with self.cache.figures.planning() as took:
            while True:
                try:
                    self.imported.offer_recorded(entry)
                    lifecycle.ensure_plan(entry, coming.hardware, self.state, self.settings)
                    break
                except (BudgetInfeasibleError, PlanError) as error:
                    if isinstance(entry.source, Imported):
                        self.imported.refuse(entry, str(error))
                    elif not isinstance(error, BudgetInfeasibleError):
                        raise
                    elif not (entry.guesses_less() or self._finds_less(entry, error, coming)):
                        entry, is_exact = self._instead(entry, error, coming, is_exact=is_exact), True
                        if entry.phase == "unplanned":
                            return entry
        if entry.graph is not None and not isinstance(entry.source, Imported):
            self.misuse.check_keep(self.settings.keep, entry.graph)
        if is_searched:
            entry.shared_changes.search_seconds = took()
        elif entry.family is not None and not is_exact and entry.program is not before:
            entry.family.note_hasty(took(), entry.plan)
        return entry

    def _finds_less(self, entry: PlanEntry, error: BudgetInfeasibleError, coming: _Coming) -> bool:
        """Whether less is beside a step than was counted, where it would be refused for a guess, or for garbage."""
        before = entry.graph.extra_bytes if entry.graph is not None else 0
        is_guess = error.floor_bytes - self._guessed_bytes <= error.budget_bytes
        if not before or (entry.serves_many and not is_guess):
            return False
        gc.collect()
        self.baseline.doubt()
        self._count_baseline(entry, coming)
        return entry.graph is not None and entry.graph.extra_bytes < before

    def _instead(self, entry: PlanEntry, error: BudgetInfeasibleError, coming: _Coming, *, is_exact: bool) -> PlanEntry:
        """What the coming step is taken for where there is no plan for what it was taken for.

        One of these very sizes; else one of another structure, or without a plan; else one to be recorded.

        Args:
            entry: What it was taken for.
            error: Why there is no plan for that.
            coming: The step.
            is_exact: Whether that was for these very sizes.

        Raises:
            BudgetInfeasibleError: There is nothing else.
        """
        self.cache.note_too_large()
        exact = self.cache.choose(coming.shape, is_exact=True) if entry.serves_many and not is_exact else entry
        if exact is entry and isinstance(entry.source, ShapeBucket):
            if (own := self.cache.recorded(coming.shape)) is not None:
                exact = own  # which others stood for, as long as they could
            elif entry.source.family.is_sure_of(entry.source.extrapolated.actual):
                raise self._told(error, entry, coming) from None
            else:
                return self.cache.record(coming.shape)
        if exact is not entry:
            exact.note_gradients(entry.baseline.gradients)
            exact.follow_others(coming.hardware.budget_bytes)
            if exact.family is None:
                self._count_baseline(exact, coming)
        elif not lifecycle.gives_up(entry, error):
            raise self._told(error, entry, coming) from None
        elif entry.phase != "unplanned":
            self._count_baseline(entry, coming)
        return exact

    def _told(self, error: BudgetInfeasibleError, entry: PlanEntry, coming: _Coming) -> BudgetInfeasibleError:
        """The error, with the step that it is about, and what lies beside that."""
        growth_bytes = self.state.growth_bytes if self._is_within_optimizer else 0
        if entry.graph is None:
            return with_reasons(error, shapes_of(coming.shape), growth_bytes=growth_bytes)
        num_waiting = sum(not executor.is_spent for executor in self.executors)
        baseline = baseline_parts(
            entry.graph.extra_bytes,
            error.budget_bytes,
            self.state,
            coming.hardware.device,
            entry.external.now(),
            num_waiting,
        )
        reasons = baseline, shapes_of(coming.shape), self.checkpointing.advice
        return with_reasons(error, *reasons, growth_bytes=growth_bytes)

    def _begin_plainly(self, entry: PlanEntry, hardware: Hardware) -> None:
        self.cache.begin_step()
        memory = memory_of(hardware.device)
        is_watched = entry.phase == "unplanned" or entry.is_aligned or entry.has_ample_room
        if not is_watched or hardware.budget_bytes is None or memory is None:
            return
        self.peaks.begin_step(hardware.device, is_watched=False)
        entry.seen.swapped_bytes = entry.seen.stayed_bytes = 0
        self._plain = entry, PlainStep(entry.plain, memory, hardware.budget_bytes)

    def _count_baseline(self, entry: PlanEntry, coming: _Coming, *, has_inputs: bool = True) -> There | None:
        """Count what is on the device beside a specialization, where its plan is about to be made or time allows.

        Args:
            entry: The specialization.
            coming: The coming step.
            has_inputs: Whether its inputs are there.

        Returns:
            What is there, where the coming step is one to watch.
        """
        hardware, gradients = coming.hardware, coming.gradients
        device, memory = hardware.device, memory_of(hardware.device)
        is_cheap = memory is not None and entry.family is not None
        if not (
            is_cheap
            or self._is_within_optimizer
            or entry.is_settling
            or entry.made.state_version != self.state.version
            or self.baseline.is_due
        ):
            entry.follow_others(hardware.budget_bytes)
            return None
        there: There | None = None
        if memory is None or entry.phase in ("recording", "verifying"):
            is_recorded, has_ample_room = entry.phase == "recording", self.cache.has_ample_room
            there = self.baseline.look(device, coming.leaves, is_recorded=is_recorded, has_ample_room=has_ample_room)
        held = memory.allocated_bytes() if memory is not None else there
        baseline = entry.baseline_bytes(held, gradients, has_inputs=has_inputs) if held is not None else None
        self._guessed_bytes = 0
        if baseline is not None:
            baseline += self.state.buckets.expected_bytes(device)
            if memory is None and there is not None and not there.is_whole:
                seen = baseline - sum(there.replaced)
                # What nobody saw come may have come in place of what went.
                baseline = max(baseline, entry.baseline_bytes_with(there.state_bytes_but(gradients)))
                self._guessed_bytes = baseline - seen
            if entry.family is None:
                entry.note_baseline(baseline, hardware.budget_bytes)
                entry.baseline.state_bytes = there.state_bytes_but(gradients) if there is not None else None
            self.cache.note_baseline(baseline)
        entry.follow_others(hardware.budget_bytes)
        return there

    def hardware_for(self, inputs: Any) -> Hardware:
        """The hardware that a step with these inputs runs on."""
        if self.device is None:
            self.device = supported(find_device(self.module, inputs))
        if self.hardware is None:
            self.hardware = Hardware(self.device, self.settings)
            if self._earlier_hardware is not None:
                self.hardware.go_on_from(self._earlier_hardware)
        return self.hardware

    def finish(self) -> None:
        """Take over what the last step showed, once its backward has run."""
        self._plain = None
        run, self._run = self._run, None
        other = self._forwards.end()
        hardware = self.hardware
        if run is None or hardware is None:
            return
        compiled_code.note_step()
        if other is not None:
            run.is_other = not other[1]
            self.cache.was(other[0], is_recorded=run.recorder is not None)
        if run.recorder is not None:
            self.state.learn_leaves(run.recorder.leaves)
        if run.slack_bytes is not None:
            hardware.read_budget_again(run.slack_bytes)
        source, executor = run.entry.source, run.executor
        lifecycle.learn(run.entry, run.finish(self.baseline), hardware)
        has_shown = executor.program is not None and (executor.num_unpacks or executor.has_deviated)
        if source.is_captured and has_shown:
            self.imported.note(run.entry, executor.deviation)
        superset = run.executor.superset
        astray_bytes = superset.ledger.astray_bytes if superset is not None else None
        has_deviated = run.executor.has_deviated and not run.is_other
        self.cache.learn_shape(has_deviated=has_deviated, astray_bytes=astray_bytes)

    def finish_if_read(self) -> None:
        """Take over what the last step showed if its backward has begun; a forward alone may yet have one."""
        if not self._is_open and self._run is not None and self._run.executor.num_unpacks:
            self.finish()

    def look_ahead(self, entry: PlanEntry) -> None:
        """Have what is on the device beside a recorded specialization counted, if it was not."""
        if self.hardware is not None and entry.phase != "recording" and not entry.baseline.is_known:
            coming = _Coming(StepShape("", "", (), ()), (), self.state.gradients(), self.hardware)
            self._count_baseline(entry, coming, has_inputs=self._is_open)

    def plan_ahead(self) -> None:
        """Have a plan for the specialization that ran last, if there can be one; its next step raises if not."""
        entry, hardware = self.cache.entry, self.hardware
        if entry.program is None and entry.graph is not None and entry.phase != "recording" and hardware is not None:
            self.look_ahead(entry)
            with contextlib.suppress(BudgetInfeasibleError, PlanError, SpillError), self.peaks.paused(hardware.device):
                lifecycle.ensure_plan(entry, hardware, self.state, self.settings)

    def forget(self, keep: Collection[str]) -> None:
        """Drop the specializations whose signatures are not among those to keep.

        Raises:
            UnsupportedError: A step is open.
        """
        if self._is_open:
            raise UnsupportedError("a plugin cannot forget kinds of step within a step: call forget() between steps")
        self.finish()
        self.cache.forget(keep)

    def _before_optimizer_step(self, parameters: list[Tensor]) -> None:
        run, self.has_optimizer_run = self._run, True
        self.misuse.note_optimizer(parameters, self.module)
        self.losses.note_update(parameters)
        if self._is_open and run is not None:
            run.optimizer_ran_inside = True
        for executor in list(self.executors):
            if executor.is_recomputing:
                executor.materialize_readers_of(parameters)
        if self.state.thread not in (None, threading.get_ident()):
            return
        self._num_optimizers += 1
        if self._num_optimizers == 1:
            self._num_nested = 0
        device = self.device
        if self._num_optimizers > 1 or run is None or device is None or kind_of(device).counts_memory:
            return
        if self._is_open:
            if run.live is not None:
                run.live.begin_lap()
        elif run.is_watched and run.live is not None:
            there = {s._cdata: s for s in run.live.alive()} | self.state.known_storages(device)
            self.peaks.begin_optimizer(device, there.values(), run.bytes_out_of_sight)

    def _after_optimizer_step(self) -> None:
        self.misuse.note_optimizer_end()
        if self.state.thread not in (None, threading.get_ident()):
            return
        if not self._num_optimizers:  # a training step began within it
            self._num_nested = None
            self.baseline.note_left(self.peaks.end_optimizer(is_whole=False))
            return
        self._num_optimizers -= 1
        if self._num_optimizers:  # that of an optimizer which has another one inside
            return
        peaks, run = self.peaks, self._run
        self._num_nested = None
        peaks.end_optimizer(is_whole=True)
        if self._is_open and run is not None and run.live is not None:
            peaks.note_optimizer(run.live.lap_peak_bytes + run.bytes_out_of_sight)


class _TryingAlgorithms:
    """Given among a step's inputs: cuDNN tries its algorithms, so that no convolution can be replayed."""


class _Thread(threading.local):
    """Steps open in a thread; inside one, another is a no-op, whoever's it is: the outermost plugin serves."""

    num_open = 0
    owner: Steps | None = None
    last_owner: weakref.ref[Steps] | None = None

    def begin(self, steps: Steps) -> None:
        self.num_open += 1
        self.owner = steps
        self.last_owner = weakref.ref(steps)

    def end(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self.owner = None

    def trains_with_another_than(self, steps: Steps) -> bool:
        """Whether the last step that was open here was another plugin's."""
        last = self.last_owner() if self.last_owner is not None else None
        return last is not None and last is not steps


_thread = _Thread()
