"""Optimizers that people bring along: SAM, Lookahead, and one with nested state that grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class SAM(Optimizer):
    """Sharpness-aware minimization (Foret et al., 2021): a step up, a second backward there, back, a step down."""

    def __init__(self, weights: Iterable[Tensor], *, rho: float = 0.05, lr: float = 0.01) -> None:
        super().__init__(weights, {"rho": rho})
        self.base = SGD(self.param_groups, lr=lr, momentum=0.9, foreach=False)

    @torch.no_grad()
    def ascend(self) -> None:
        """Move to where the loss is worst nearby, remembering the weights."""
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in weights if p.grad is not None]).norm()
        for p in weights:
            assert p.grad is not None
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Go back, and down by the gradient that was found up there."""
        for group in self.param_groups:
            for p in group["params"]:
                if "before" in self.state[p]:
                    p.copy_(self.state[p].pop("before"))
        self.base.step()


class Lookahead:
    """Slow weights that follow the fast ones every few steps (Zhang et al., 2019)."""

    def __init__(self, optimizer: Optimizer, *, every: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.every, self.alpha, self.num_steps = optimizer, every, alpha, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]

    @torch.no_grad()
    def follow(self) -> None:
        """After each step of the optimizer."""
        self.num_steps += 1
        if self.num_steps % self.every:
            return
        for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
            for fast, weight in zip(group["params"], slow, strict=True):
                weight.lerp_(fast, self.alpha)
                fast.copy_(weight)


class NestedStateSGD(Optimizer):
    """As Shampoo's, the state of a weight is a tree of factors; it also keeps its last gradients, up to a number."""

    def __init__(self, weights: Iterable[Tensor], *, lr: float = 0.01, history: int = 6) -> None:
        super().__init__(weights, {"lr": lr, "history": history})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Precondition by the running second moments of rows and columns, and smooth over the last gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["factors"] = {"of": [torch.zeros(n, n) for n in p.shape], "info": {"step": 0}}
                    state["last"] = []
                for axis, factor in enumerate(state["factors"]["of"]):
                    rows = p.grad.transpose(0, axis).reshape(p.shape[axis], -1)
                    factor.addmm_(rows, rows.t())
                state["factors"]["info"]["step"] += 1
                state["last"].append(p.grad.clone())
                del state["last"][: -group["history"]]
                for grad in state["last"]:
                    p.add_(grad, alpha=-group["lr"] / group["history"])


def parameters(model: nn.Module) -> list[Tensor]:
    """What is trained of a model."""
    return [p for p in model.parameters() if p.requires_grad]
