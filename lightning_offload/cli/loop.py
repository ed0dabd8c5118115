"""How a training loop runs a model: precision, loss, micro-batches of an update, optimizer.

Lightning's Trainer divides the loss by the number of micro-batches, also where that is one, and drops the gradients of
the last step between forward and backward; other loops drop them before forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_offload.accelerators import HOST, KINDS
from lightning_offload.cli.loading import describe, load_attribute
from lightning_offload.errors import UnsupportedError, type_of
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.tensors.op_facts import tensors_in

STATE_COPIES = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of an optimizer's state for each parameter, each as large as the parameter."""

CONFIGURED = "configured"
"""The optimizer that a LightningModule configures itself."""

USUAL = "momentum"

_PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a training loop runs a model.

    Attributes:
        autocast: What forward computes in, where parameters stay as they are; None for no autocast.
        accumulate: Micro-batches of an update.
        loss: Takes the model's output and the last input; None where the model has a loss of its own.
        chunked_loss: Cf. :class:`~lightning_offload.MemoryPlugin`.
        optimizer: Name of an optimizer, cf. :data:`STATE_COPIES`, or :data:`CONFIGURED`.
    """

    autocast: torch.dtype | None = None
    accumulate: int = 1
    loss: Callable[[Any, Any], Any] | None = None
    chunked_loss: bool | str = False
    optimizer: str = USUAL

    def casting(self, device: DeviceSpec) -> contextlib.AbstractContextManager[Any]:
        """Around forward.

        Args:
            device: Where the step runs.
        """
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.kind if device.kind in KINDS else HOST.type, dtype=self.autocast)

    def optimizer_bytes(self, model: nn.Module, trained: Iterable[Tensor], device: DeviceSpec) -> int:
        """What the optimizer's state takes on the device. Call it under FakeTensorMode.

        Args:
            model: The model.
            trained: The parameters that are trained.
            device: Where they are; counts of steps lie on the host.

        Raises:
            UnsupportedError: The model's own optimizer cannot be made, or cannot step, without a Trainer.
        """
        if self.optimizer != CONFIGURED:
            sizes = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in trained}
            return STATE_COPIES[self.optimizer] * sum(sizes.values())
        try:
            return _bytes_of_state(model, with_counts=device.kind == HOST.type)
        except Exception as error:
            raise UnsupportedError(
                f"{type_of(model)}.configure_optimizers() could not be called without a Trainer: {describe(error)}; "
                f"name the optimizer, --optimizer {USUAL} or one of {', '.join(STATE_COPIES)}"
            ) from error


def is_configured(model: Any) -> bool:
    """Whether a model, or the class of one, has an optimizer of its own."""
    method = getattr(model, "configure_optimizers", None)
    owner = getattr(method, "__qualname__", "")
    return callable(method) and owner != "LightningModule.configure_optimizers"


def _bytes_of_state(model: Any, *, with_counts: bool) -> int:
    """Run a step of each optimizer of a model on gradients without contents, and count what they keep."""
    num_bytes = 0
    for optimizer in _optimizers_in(model.configure_optimizers()):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError("LBFGS runs the training step within its own, so its state cannot be counted ahead")
        optimizer.step()
        optimizer.zero_grad()
        states = tensors_in(list(optimizer.state.values()))
        num_bytes += sum(state.untyped_storage().nbytes() for state in states if state.ndim or with_counts)
    return num_bytes


def _optimizers_in(made: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what ``configure_optimizers`` returns: one, several, with schedulers, or in dicts."""
    if isinstance(made, torch.optim.Optimizer):
        return [made]
    if isinstance(made, dict):
        return _optimizers_in(made.get("optimizer"))
    return [found for item in made for found in _optimizers_in(item)] if isinstance(made, (list, tuple)) else []


def parse_precision(text: str | None) -> torch.dtype | None:
    """What forward computes in, from the Trainer's name of a precision.

    Raises:
        UnsupportedError: There is none of that name, or it is one of another option.
    """
    if text is None:
        return None
    if text not in _PRECISIONS:
        raise UnsupportedError(
            f"--precision {text!r} is not known: choose one of {', '.join(_PRECISIONS)}; a model held in a narrow type "
            "has --dtype bfloat16 or float16"
        )
    return _PRECISIONS[text]


def parse_loss(text: str | None) -> Callable[[Any, Any], Any] | None:
    """The function that a loss is called by.

    Raises:
        UnsupportedError: It is not there, or no function or class.
    """
    if text is None:
        return None
    found = load_attribute(text, "--loss")
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = found()
    if not callable(found):
        raise UnsupportedError(f"--loss {text!r} is {type_of(found)}: name a function of the output and the last input")
    loss: Callable[[Any, Any], Any] = found
    return loss
