"""Makes a training step of what a command line names, on FakeTensors: a model, its inputs and a loss.

A target is a module, or a class or function that makes one without arguments. The step is, in this order:

* a LightningModule's ``training_step(batch, 0)``, the batch being the one input, or the tuple or dict of them;
* the loss that was named, of the model's output and the last input, which the model is not given;
* the model's own loss, if its output has one (``output.loss`` or ``output["loss"]``). A language model of transformers
  that is given a single input of ids gets them as ``labels`` too, so that it has one;
* the sum of all outputs that are differentiable.

Forward runs as a :class:`~lightning_offload.cli.loop.Loop` says. Without a Trainer ``self.log`` does nothing: the ops
that it adds are none of a plan's business.

Shortfall: the last one leaves out what a criterion would save, which matters where outputs are large.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_offload.cli.inputs import fake_like
from lightning_offload.cli.loading import check_callable, describe, load_attribute
from lightning_offload.cli.loop import Loop
from lightning_offload.errors import UnsupportedError, type_of
from lightning_offload.graph.device_spec import DeviceSpec

_HAS_LANGUAGE_HEAD = ("CausalLM", "LMHead", "MaskedLM", "ForPreTraining", "ForConditionalGeneration")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model to plan for.

    Attributes:
        text: What the command line calls it.
        found: A module, or a callable that makes one.
    """

    text: str
    found: Any

    def make(self, dtype: torch.dtype) -> nn.Module:
        """The model, in training mode. Call it under FakeTensorMode.

        Args:
            dtype: What its floating-point parameters and buffers are cast to; float32 leaves them as they are made.

        Raises:
            UnsupportedError: What was called does not make a module, or failed.
        """
        if isinstance(self.found, nn.Module):
            return faked(self.found, dtype).train()
        try:
            made = self.found()
        except (Exception, SystemExit) as error:
            raise UnsupportedError(
                f"model {self.text!r} could not be made without memory: {describe(error)}"
            ) from error
        if not isinstance(made, nn.Module):
            raise UnsupportedError(
                f"model {self.text!r} makes {type_of(made)}: name a torch.nn.Module, or what makes one"
            )
        return made.train() if dtype is torch.float32 and not _is_real(made) else faked(made, dtype).train()


def find_target(text: str) -> Target:
    """Find what ``MODULE:ATTRIBUTE`` names.

    Raises:
        UnsupportedError: It is not there, or neither a module nor something that makes one.
    """
    found = load_attribute(text, "model")
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise UnsupportedError(f"model {text!r} is {type_of(found)}: name a torch.nn.Module, or what makes one")
        check_callable(found, text, "model")
    return Target(text=text, found=found)


def faked(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model without its memory: parameters and buffers are made anew, the rest is copied.

    Call it under FakeTensorMode.

    Args:
        model: Real or fake.
        dtype: What floating-point parameters and buffers are cast to; float32 leaves them as they are.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = _cast(fake_like(parameter.detach()), dtype)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    memo.update((id(buffer), _cast(fake_like(buffer), dtype)) for buffer in model.buffers())
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedError(
            f"{type_of(model)} that exists already could not be copied: {describe(error)}; "
            "name a function that makes it"
        ) from error


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if dtype is not torch.float32 and tensor.is_floating_point() else tensor


def _is_real(model: nn.Module) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(not isinstance(t.data, FakeTensor) for t in (*model.parameters(), *model.buffers()))


def default_input_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Type of inputs that name none: ids for a model of transformers, else the type that is computed in."""
    return torch.int64 if _main_input(model) == "input_ids" else dtype


def step_of(model: nn.Module, inputs: Any, loop: Loop, device: DeviceSpec) -> Callable[[], None]:
    """A forward and backward of a model on its inputs.

    Args:
        model: The model, or a LightningModule.
        inputs: A tuple of them, a dict, or one.
        loop: How it is run.
        device: Where.

    Raises:
        UnsupportedError: A loss was named, and there is no input for it.
    """
    if is_lightning(model):
        batch = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
        args: tuple[Any, ...] = (batch, 0) if _takes_index(model.training_step) else (batch,)

        def step() -> None:
            with loop.casting(device):
                loss = loss_of(model.training_step(*args))  # type: ignore[operator]
            (loss / loop.accumulate).backward()

        return step
    return _plain_step(model, inputs, loop, device)


def is_lightning(model: Any) -> bool:
    """Whether a model, or the class of one, has a training step of its own."""
    return callable(getattr(model, "training_step", None))


def _takes_index(training_step: Any) -> bool:
    """Whether it takes the batch's index, as the Trainer finds out."""
    parameters = inspect.signature(training_step).parameters
    return "batch_idx" in parameters or len(parameters) > 1


def _plain_step(model: nn.Module, inputs: Any, loop: Loop, device: DeviceSpec) -> Callable[[], None]:
    args, kwargs = _arguments(inputs)
    target: Any = None
    if loop.loss is not None:
        if len(args) + len(kwargs) < 2:
            raise UnsupportedError("--loss needs the target as the last --input: give the model's inputs and then that")
        if kwargs:
            target = kwargs.pop(next(reversed(kwargs)))
        else:
            *args, target = args
    elif len(args) == 1 and not kwargs and _wants_labels(model):
        kwargs = {"labels": args[0]}

    def step() -> None:
        with loop.casting(device):
            output = model(*args, **kwargs)
        if loop.loss is not None:
            if loop.autocast is not None and isinstance(output, Tensor):
                output = output.float()
            loss = loss_of(loop.loss(output, target))
        else:
            loss = loss_of(output)
        (loss / loop.accumulate if loop.accumulate > 1 else loss).backward()

    return step


def loss_of(output: Any) -> Tensor:
    """The loss of what a model or a training step returned, as this module finds one.

    Raises:
        UnsupportedError: There is nothing to differentiate.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    total: Tensor | None = None
    for leaf in _tensors(output):
        if leaf.requires_grad and leaf.is_floating_point():
            part = leaf.sum() if leaf.ndim else leaf
            total = part if total is None else total + part
    if total is None:
        raise UnsupportedError(
            f"the model returned {type_of(output)} with nothing to differentiate: it must return a loss, or "
            "floating-point outputs that depend on parameters that require gradients"
        )
    return total


def _tensors(output: Any) -> Iterator[Tensor]:
    plain = dict(output) if isinstance(output, Mapping) else output
    yield from (leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor))


def _arguments(inputs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _main_input(model: nn.Module) -> str | None:
    """What a model of transformers calls its main input; None for others."""
    is_transformers = hasattr(getattr(model, "config", None), "model_type")
    name = getattr(model, "main_input_name", None)
    return name if is_transformers and isinstance(name, str) else None


def _wants_labels(model: nn.Module) -> bool:
    if _main_input(model) != "input_ids" or "labels" not in inspect.signature(model.forward).parameters:
        return False
    return any(part in type(model).__name__ for part in _HAS_LANGUAGE_HEAD)
