"""Parameters that are frozen when a fit begins and are trained later: memory has to be enough for that, too.

A callback that unfreezes parts of a model (Lightning's `BaseFinetuning`) says so before the training begins, so trials
train all parameters, with the state that an optimizer keeps for them. A model that unfreezes its own says nothing; then
there is a warning when it happens.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["num_trainable", "unfreeze", "unfreezes_later"]


def unfreezes_later(trainer: Any) -> bool:
    """Whether a callback is going to unfreeze parameters."""
    return any(cls.__name__ == "BaseFinetuning" for callback in trainer.callbacks for cls in type(callback).__mro__)


def num_trainable(module: torch.nn.Module) -> int:
    """How many parameters require gradients."""
    return sum(parameter.requires_grad for parameter in module.parameters())


def unfreeze(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let all parameters be trained, by this optimizer where they have none.

    Args:
        module: The model, whose state is put back later.
        optimizer: Which is made anew later.
    """
    frozen = [each for each in module.parameters() if not each.requires_grad and each.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    added = [parameter for parameter in frozen if id(parameter) not in known]
    if added:
        optimizer.add_param_group({"params": added})
