"""Linear layers with one odd operation between them: the smallest model in which its inputs matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zoo.case import Case, TrainStep, normal, sgd, simple

Body = Callable[[Tensor], Tensor]

ROWS = 768
WIDTH = 128


class Sandwich(nn.Module):
    """Alternates linear layers with a body that keeps the shape.

    Args:
        body: A function, or a module whose parameters are trained and shared by all layers.
        depth: The number of layers.
    """

    def __init__(self, body: Body | nn.Module, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of rows."""
        for layer in self.layers:
            x = self.body(layer(x))
        return x


def square_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of the model's output, weighted so that no gradient is constant."""
    out = model(batch)
    if out.is_complex():
        out = out.abs()
    loss: Tensor = (out.float() * out.float()).mean() + out.float().mean()
    return loss


def rows(step: int) -> Tensor:
    """A batch of rows."""
    return normal(step, ROWS, WIDTH)


def body_case(
    name: str,
    body: Body | None = None,
    *,
    module: Callable[[], nn.Module] | None = None,
    train_step: TrainStep | None = None,
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] = sgd,
    depth: int = 3,
    **options: Any,
) -> Case:
    """Return the case of a `Sandwich` around a function, or around a module made at build time."""

    def build() -> nn.Module:
        filling = module() if module is not None else body
        assert filling is not None
        return Sandwich(filling, depth)

    return Case(
        name=name,
        build=build,
        batch=rows,
        train_step=train_step or simple(square_loss),
        optimizers=optimizers,
        **options,
    )
