"""Hugging Face Trainer: a callback that trains within a memory budget.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[OffloadCallback(budget="12GiB")])
    trainer.train()

The callback attaches when training begins and detaches when it ends. Every training forward of the model begins a
step, with the backward that follows; evaluation, which runs without gradients, is left alone. Plans are part of the
callback's state in a checkpoint's ``trainer_state.json``, and a run that resumes from it starts with them, whether
or not ``restore_callback_states_from_checkpoint`` is set.

The Trainer tells callbacks nothing of an exception. After one, the model stays hooked until :meth:`detach`, until
the next ``train()``, or until the model is gone; it computes the same with and without.
"""

from __future__ import annotations

import os
import warnings
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_offload.errors import PlanError, UnsupportedError, check_keywords
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.plugins.module_steps import PLUGIN_KEYWORDS, ModuleMemoryPlugin, trained_modules
from lightning_offload.plugins.settings import Budget

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as _error:
    raise UnsupportedError(
        f"Transformers is not installed ({_error}): pip install 'lightning-offload[transformers]'"
    ) from _error


class OffloadCallback(TrainerCallback, ExportableState):
    """Trains within a budget of device memory, bit for bit as without it.

    Args:
        budget: Peak bytes of tensors alive on the device in a step, cf. :class:`~lightning_offload.MemoryPlugin`.
        module: The module whose training forwards are steps; by default the Trainer's model, or the modules that are
            attributes of one that is a wrapper and no module itself (SetFit's ``model_body``).
        keywords: Further keywords of :class:`~lightning_offload.MemoryPlugin`.

    Raises:
        OffloadError: A keyword is wrong; the message says which and what is allowed.
    """

    def __init__(self, budget: Budget = None, *, module: nn.Module | None = None, **keywords: Any) -> None:
        check_keywords(type(self).__name__, keywords, PLUGIN_KEYWORDS)
        self._arguments = {"budget": budget, **keywords}
        self._module = module
        self._memory = ModuleMemoryPlugin(**self._arguments, module=module)
        self._is_new = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plugin out, but for its plans: a copy has one of its own."""
        return {**{name: value for name, value in vars(self).items() if name != "_memory"}, "plans": self.plans}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plans = state.pop("plans")
        vars(self).update(state)
        self._memory = ModuleMemoryPlugin(**self._arguments, module=self._module)
        self.plans = plans

    @property
    def memory(self) -> ModuleMemoryPlugin:
        """The memory plugin; it has the ``report()``."""
        return self._memory

    def detach(self) -> None:
        """Take every hook off; for use after training that ended in an exception."""
        self._memory.detach()

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach, with the plans of the checkpoint that training resumes from."""
        self._memory.detach()  # what an earlier train() left that ended in an exception
        _check(args)
        modules = trained_modules(self._module if self._module is not None else model)
        if self._is_new:
            self._load_plans((state.stateful_callbacks or {}).get(type(self).__name__))
        self._is_new = False
        self._memory.follow(*modules, device=args.device)
        if state.is_world_process_zero:
            self._memory.announce(type(self).__name__)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach; the plans are kept for the next ``train()``."""
        self._memory.detach()

    @override
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the figures of the steps to the entry of the log history that the Trainer has just made of a loss."""
        if self._memory.enabled and self._memory.num_followed and "loss" in state.log_history[-1]:
            state.log_history[-1].update(self._memory.report().metrics())

    def _load_plans(self, saved: Any) -> None:
        if isinstance(saved, list):  # there are several callbacks of this name; their plans are one another's
            saved = saved[0] if saved else None
        plans = ((saved or {}).get("attributes") or {}).get("plans")
        if plans is not None:
            self.plans = plans

    # ---- the Trainer's way to save and restore a callback: its arguments, and attributes to be set

    @override
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the callback, as JSON-able data."""
        given = {name: value for name, value in self._arguments.items() if not isinstance(value, MemoryPlan)}
        arguments = {name: _as_json(value) for name, value in given.items()}  # a plan is among those of the plugin
        plan = self._arguments.get("plan")
        if isinstance(plan, MemoryPlan) and given["budget"] is None and plan.budget_bytes is not None:
            arguments["budget"] = f"{plan.budget_bytes}B"  # which was that of the plan
        return {"args": arguments, "attributes": {"plans": self.plans}}

    @property
    def plans(self) -> dict[str, Any]:
        """The plans made so far, as JSON-able data; those of a checkpoint can be set."""
        return self._memory.state_dict()

    @plans.setter
    def plans(self, plans: dict[str, Any]) -> None:
        try:
            self._memory.load_state_dict(plans)
        except PlanError as error:
            warnings.warn(f"the checkpoint's memory plans are not used, new ones are made: {error}", stacklevel=2)


def _as_json(value: Any) -> Any:
    """A keyword as a checkpoint can hold it."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, torch.device):
        return str(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check(args: Any) -> None:
    """Refuse what does not run one whole model on one device.

    Raises:
        UnsupportedError: The arguments ask for such a thing.
    """
    found = {"deepspeed": args.deepspeed, "fsdp": args.fsdp}
    for name, is_asked in found.items():
        if is_asked:
            raise UnsupportedError(f"{name} is not supported together with OffloadCallback: leave out one of the two")
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"n_gpu={args.n_gpu} in one process is not supported together with OffloadCallback: start one process for "
            "each GPU with torchrun, or let the process see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
