"""What training changes in Python objects, remembered and put back bit for bit.

Of each model: parameters, gradients, all buffers, training flags and plain attributes; of optimizers and whatever else
has ``state_dict`` and ``load_state_dict`` (schedulers, gradient scalers, averaged weights): that; of generators, and of
dataloaders that have one: their state; and the random state of Python, numpy and torch. Tensors are remembered on the
host, so a snapshot takes no device memory. What lies elsewhere (iterators, files, loggers) is not known here.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_offload.plugins.memory import MemoryPlugin

Restore = Callable[[], None]
"""Puts something back as it was; may be called more than once."""


def take_snapshot(objects: Iterable[Any]) -> Restore:
    """Remember objects, those inside lists, tuples and dicts too, and the random state.

    Returns:
        What puts all of it back.
    """
    found: dict[int, Any] = {}
    for each in objects:
        _collect(each, found)
    # The state of an optimizer is put back by loading it, and models first: it refers to their parameters.
    in_order = sorted(found.values(), key=lambda each: not isinstance(each, nn.Module))
    restores = [_remember(each) for each in in_order]
    restores.append(_remember_random_state())

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _collect(each: Any, found: dict[int, Any]) -> None:
    if isinstance(each, (list, tuple, Mapping)):
        for inner in each.values() if isinstance(each, Mapping) else each:
            _collect(inner, found)
    elif isinstance(each, DataLoader):
        for holder in (each, each.sampler, each.batch_sampler):
            _collect(getattr(holder, "generator", None), found)
    elif _is_stateful(each):
        found[id(each)] = each


def _is_stateful(each: Any) -> bool:
    if isinstance(each, (type, MemoryPlugin)):  # plans are welcome to stay
        return False
    has_state = hasattr(type(each), "state_dict") and hasattr(type(each), "load_state_dict")
    return has_state or isinstance(each, torch.Generator)


def _remember(each: Any) -> Restore:
    if isinstance(each, nn.Module):
        return _remember_module(each)
    if isinstance(each, torch.Generator):
        state = each.get_state()
        return lambda: _drop(each.set_state(state))
    restore_attributes = _remember_attributes(each) if isinstance(each, torch.optim.Optimizer) else None
    held = _on_host(each.state_dict())

    def restore() -> None:
        if restore_attributes is not None:
            restore_attributes()
        each.load_state_dict(copy.deepcopy(held))
        if isinstance(each, torch.amp.GradScaler):  # an update cut short leaves its marks here
            each._per_optimizer_states.clear()

    return restore


def _drop(_: object) -> None:
    """Give a call's result to nobody."""


def _remember_module(module: nn.Module) -> Restore:
    parts = [_remember_attributes(part) for part in module.modules()]
    tensors = [(t, _on_host(t.data)) for t in (*module.parameters(), *module.buffers())]
    gradients = [(p, None if p.grad is None else _on_host(p.grad)) for p in module.parameters()]

    @torch.no_grad()
    def restore() -> None:
        for part in parts:
            part()
        for tensor, held in tensors:
            tensor.data.copy_(held)
        for parameter, gradient in gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    return restore


_STATE_OF_THEIR_OWN = ("state", "param_groups")


def _remember_attributes(owner: Any) -> Restore:
    """Attributes themselves, not what is inside them; of dicts (parameters, hooks) the entries too."""
    before = {name: value for name, value in vars(owner).items() if name not in _STATE_OF_THEIR_OWN}
    entries = {name: dict(value) for name, value in before.items() if isinstance(value, dict)}

    def restore() -> None:
        for name in [name for name in vars(owner) if name not in before and name not in _STATE_OF_THEIR_OWN]:
            del vars(owner)[name]
        vars(owner).update(before)
        for name, held in entries.items():
            before[name].clear()
            before[name].update(held)

    return restore


def _on_host(value: Any) -> Any:
    """A copy in which tensors are on the host; loading brings them back to where they belong."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    return copy.deepcopy(value)


def _remember_random_state() -> Restore:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - others draw from the global state
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.extend(torch.cuda.default_generators)
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for generator, state in states:
            generator.set_state(state)

    return restore
