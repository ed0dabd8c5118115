"""What our strategies share: a `MemoryPlugin` around every training step of one of Lightning's strategies.

Life of a fit: the constructor checks the keywords and builds the plugin; `setup`, once Lightning has put the
model on its device, attaches the plugin and grafts the precision plugin
(`lightning_offload.strategies.precision`); `teardown`, which Lightning also calls after an exception, takes both
off. Validation, test and prediction attach nothing. Plans travel in the checkpoint under `CHECKPOINT_KEY`.

Note [One strategy, two Lightnings]: `lightning.pytorch` and `pytorch_lightning` have unrelated base classes,
so each strategy is a mixin, and `build` makes the class for a package. A
Trainer first asks whether its strategy is an instance of *its* `Strategy`; our classes are registered there as
virtual subclasses and say yes to both. The first thing it then assigns is the accelerator, and by that we see
whose Trainer it is and take on the matching class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from typing_extensions import override

from lightning_offload.accelerators import KINDS
from lightning_offload.errors import PlanError, UnsupportedError
from lightning_offload.lightning_packages import package_of, rank_zero
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.strategies.precision import OffloadPrecisionMixin, check_supported, graft, ungraft
from lightning_offload.strategies.summary import PlanSummary

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy as _StrategyBase
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _StrategyBase = object  # the real base comes from the package in use, see building
import functools
import inspect
from typing import TYPE_CHECKING, TypeVar

from lightning_offload.lightning_packages import build_class, import_from, loaded_packages

CHECKPOINT_KEY = "lightning_offload"


class OffloadMixin(_StrategyBase):
    """Trains within a memory budget, with results identical to the plain strategy's.

    Args:
        budget: Peak bytes of tensors alive on the device in a training step, persistent state included: a
            number of bytes, a text such as "12GiB", a fraction of the device's memory in (0, 1], or None for
            that of the environment variable LIGHTNING_OFFLOAD_BUDGET, else for what is free.
        policy: Who plans: "auto" for the planner's own choice; "keep-all", "all-swap" or "all-recompute" for one action
            wherever it is possible; or a published system: "save-on-cpu", "checkpoint", "checkpoint-sqrt", "vdnn-all",
            "vdnn-conv", "vdnn-dyn", "superneurons", "swap-out-in", "layrub", "layup", "cpu-offload", "accudnn",
            "capuchin", "checkmate", "dtr" or "pofo".
        tier: Where swapped tensors go: "host", "disk", or "auto" for the host, and the disk once that is full.
        host_budget: Most host memory that swapped tensors may take, written as `budget` is.
        spill_dir: Directory of the disk tier's file, which has no name there and goes with the process.
        plan: Path of a plan to use instead of planning, with its step beside it from the first step on; without a
            budget that of the plan is kept.
        keep: Patterns of module names whose saved tensors stay on the device, such as "lm_head*".
        enabled: False turns everything off, as the environment variable LIGHTNING_OFFLOAD=0 does.
        verify: When recomputed tensors are compared with their originals: in the first step under a plan,
            always or never.
        replace_checkpointing: Whether regions that the model checkpoints itself (`torch.utils.checkpoint`, Hugging
            Face's `gradient_checkpointing_enable`) run as if they were not, so that what they save is planned.
        chunked_loss: Whether the model's cross-entropy is computed in chunks of rows, so that its logits never exist at
            once: the same loss up to the order of sums, not bit for bit. The layer that makes the logits is that of
            `get_output_embeddings()`, as Hugging Face's models have it, or the one that is named.
        kwargs: Keywords of the Lightning strategy.

    Raises:
        BudgetError: `budget` or `host_budget` cannot be read.
        PolicyError: There is no such policy, tier or way to verify.
        PlanError: `plan` is not a plan.
        SpillError: `spill_dir` is not a directory that can be written to.
    """

    public_name: ClassVar[str]
    base_name: ClassVar[str]
    _package: str

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
        **kwargs: Any,
    ) -> None:
        self._check_base_keywords(kwargs)
        super().__init__(**kwargs)
        self._base_keywords = kwargs
        self._restored_plans: dict[str, Any] | None = None
        self._summary: PlanSummary | None = None
        self._keywords: dict[str, Any] = {
            "budget": budget, "policy": policy, "tier": tier, "host_budget": host_budget, "spill_dir": spill_dir,
            "plan": plan, "keep": keep, "enabled": enabled, "verify": verify,
            "replace_checkpointing": replace_checkpointing, "chunked_loss": chunked_loss,
        }  # fmt: skip
        self._memory = MemoryPlugin(**self._keywords)

    def _check_base_keywords(self, keywords: dict[str, Any]) -> None:
        """Checks the keywords that go to the Lightning strategy, where that itself does not."""

    @classmethod
    def __subclasshook__(cls, candidate: type) -> bool:
        """The classes of both packages are one strategy, see Note [One strategy, two Lightnings]."""
        if "_package" in vars(cls) and issubclass(candidate, cls.__mro__[1]):
            return True
        return NotImplemented  # type: ignore[no-any-return]  # Python's way to say: look yourself

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the strategy without its plugin, as launchers do that spawn processes: each makes its own."""
        if "_package" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return revive, (type(self).__mro__[1], self._package), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())  # Lightning's own leaves wrapped optimizers out
        return {name: value for name, value in state.items() if name not in ("_memory", "_summary")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._summary = None
        self._memory = MemoryPlugin(**self._keywords)

    @property
    def memory(self) -> MemoryPlugin:
        """The plugin that plans and runs the training steps of this process."""
        return self._memory

    # --- what the Trainer assigns while it is built ---

    @property
    @override
    def accelerator(self) -> Any:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        package = package_of(accelerator)
        if package is not None and package != self._package:
            self._adapt(package)
        self._assign_inherited("accelerator", accelerator)

    @property
    @override
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        check_supported(precision_plugin)
        self._assign_inherited("precision_plugin", precision_plugin)

    def _assign_inherited(self, name: str, value: Any) -> None:
        """Assigns to the property `name` of the base class."""
        getattr(super(OffloadMixin, type(self)), name).fset(self, value)

    def _adapt(self, package: str) -> None:
        """Becomes the strategy of `package`, see Note [One strategy, two Lightnings]."""
        if "_package" not in vars(type(self)):
            raise UnsupportedError(
                f"{type(self).__name__} is a subclass of the strategy for {self._package}, but the Trainer is"
                f" {package}'s: import only one of the two packages, or import {package} first"
            )
        self.__class__ = build(type(self).__mro__[1], package)
        super().__init__(**self._base_keywords)  # the new base's own fields; nothing else was set yet

    @staticmethod
    def _check_devices(devices: Sequence[torch.device]) -> list[torch.device]:
        """Raises `UnsupportedError` for devices that the plugin does not know."""
        for device in map(torch.device, devices):
            if device.type not in KINDS:
                raise UnsupportedError(
                    f"lightning-offload does not support the device {str(device)!r} yet, only"
                    f" {' and '.join(KINDS)}: pass accelerator='cpu' to the Trainer"
                )
        return [torch.device(device) for device in devices]

    # --- the run ---

    @override
    def setup(self, trainer: Trainer) -> None:
        """Sets the run up as usual and, for a fit, puts the training steps under the plugin."""
        super().setup(trainer)
        if trainer.state.fn != "fit" or not self._memory.enabled:
            return
        self._memory.attach(module=self.lightning_module, device=self.root_device)
        self._load_restored_plans()
        graft(self.precision_plugin, self._memory)
        self._tell_of_base_finder(trainer)
        self._summary = PlanSummary(self._package, self._memory, trainer)
        self._summary.announce()

    def _tell_of_base_finder(self, trainer: Trainer) -> None:
        """Lightning's own finder takes nothing for too large but what the device itself refuses."""
        callbacks = import_from(self._package, "callbacks")
        finders = (each for each in vars(trainer)["callbacks"] if isinstance(each, callbacks.BatchSizeFinder))
        if self._memory.budget is not None and any(type(each).__name__ == "BatchSizeFinder" for each in finders):
            rank_zero(
                self._package,
                "warn",
                "BatchSizeFinder ends with the error of the first size that the budget does not hold: use "
                "lightning_offload.EfficientBatchSizeFinder, or give it a max_val that the budget holds",
            )

    @override
    def teardown(self) -> None:
        """Takes everything off, also after an exception, and then tears the run down as usual."""
        self._summary = None
        self._restored_plans = None
        ungraft(self.precision_plugin)
        try:
            self._memory.detach()
        finally:
            super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the step as usual, its batch noted for the choice of the plan."""
        plugin = self.precision_plugin
        if isinstance(plugin, OffloadPrecisionMixin):
            # a dataloader_iter in place of a batch says nothing about the step
            batch = [arg for arg in args[:1] if not isinstance(arg, Iterator)]
            plugin.note_inputs(*batch)
        return super().training_step(*args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prints the plan before the first batch that runs under it in its final form."""
        super().on_train_batch_start(batch, batch_idx)
        self._print_plan()

    @override
    def on_train_end(self) -> None:
        """Prints the plan if it became final in the last step."""
        super().on_train_end()
        self._print_plan()

    def _print_plan(self) -> None:
        if self._summary is not None and self._summary.print_when_planned():
            self._summary = None

    # --- checkpoints ---

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Adds the plans to a training checkpoint (not to one of weights alone) and saves it."""
        if self._memory.enabled and "optimizer_states" in checkpoint:
            # The program's hooks have seen the dictionary, and may hold it: another one.
            checkpoint = {**checkpoint, CHECKPOINT_KEY: self._memory.state_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint and keeps its plans, if it has any, for the fit that is about to begin."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._restored_plans = checkpoint.get(CHECKPOINT_KEY)
        return checkpoint

    def _load_restored_plans(self) -> None:
        """Hands the checkpoint's plans to the plugin; plans that do not fit are replaced, not fatal."""
        state, self._restored_plans = self._restored_plans, None
        if state is None:
            return
        try:
            self._memory.load_state_dict(state)
        except PlanError as error:
            rank_zero(self._package, "warn", f"The checkpoint's memory plan is not used, a new one is made: {error}")


_Mixin = TypeVar("_Mixin", bound="OffloadMixin")
_BUILT: list[type[Any]] = []


def build(mixin: type[_Mixin], package: str) -> type[_Mixin]:
    """Builds the strategy of a mixin for the Lightning package `package`, importing it if need be; once."""
    built: type[_Mixin] = _build(mixin, package)
    return built


@functools.cache
def _build(mixin: type[Any], package: str) -> type[Any]:
    base = getattr(import_from(package, "strategies"), mixin.base_name)
    built = build_class(mixin, mixin.public_name, base, __doc__=_documentation(mixin), _package=package)
    _BUILT.append(built)
    for loaded in loaded_packages():
        accept_built_classes(loaded)
    return built


def revive(mixin: type[_Mixin], package: str) -> _Mixin:
    """An empty strategy, for pickle to fill."""
    cls = build(mixin, package)
    return cls.__new__(cls)


def accept_built_classes(package: str) -> None:
    """Lets the Trainer of `package` accept every strategy of ours, whichever package it was built for."""
    strategy = import_from(package, "strategies").Strategy
    for built in _BUILT:
        strategy.register(built)


def _documentation(mixin: type[Any]) -> str:
    """The mixin's own summary, then the keywords, which all mixins share."""
    summary = inspect.getdoc(mixin) or ""
    shared = inspect.getdoc(mixin.__mro__[1]) or ""
    return f"{summary}\n\n{shared[shared.index('Args:') :]}"
