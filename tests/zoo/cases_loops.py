"""Training as users write it, with tensors so large that a budget matters: what `tests.engine.promise` trains.

These are not among `CASES`: they take longer, and what they are about is memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from tests.zoo.case import Case, Job, Scope, adamw, integers, normal, sgd, simple
from tests.zoo.cases_language import next_token
from tests.zoo.cases_training import closure_step, gan_step, two_adams
from tests.zoo.cases_vision import classify, images
from tests.zoo.models import hugging_face
from tests.zoo.models.mlp import PartlyScripted, ResidualMLP, TwoModes
from tests.zoo.models.optimizers import SAM, Lookahead, NestedStateSGD
from tests.zoo.models.resnet import ResNet
from tests.zoo.models.sandwich import square_loss
from tests.zoo.models.sequence import Adversaries, RecurrentLM

ROWS, WIDTH, HIDDEN = 512, 160, 320


def _mlp(depth: int = 2, **options: Any) -> Callable[[], nn.Module]:
    return lambda: ResidualMLP(WIDTH, HIDDEN, depth, dropout=0.1, **options)


def _rows(step: int) -> Tensor:
    return normal(step, ROWS, WIDTH)


def _sam(job: Job, batch: Any, scope: Scope) -> None:
    """Two forwards and backwards, and both moves of the weights, in one step."""
    optimizer = job.optimizer
    assert isinstance(optimizer, SAM)
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
        scope.backward(loss)
        optimizer.ascend()
        with scope.forward():
            loss = square_loss(job.model, batch)
        scope.backward(loss)
        scope.record("loss", loss)
        scope.update(optimizer)


def _sams(model: nn.Module) -> Sequence[Optimizer]:
    return (SAM(model.parameters()),)


def _maml(job: Job, batch: Any, scope: Scope) -> None:
    """Two inner steps whose gradients are differentiated again (Finn et al., 2017)."""
    support, query = batch.chunk(2)
    weights = dict(job.model.named_parameters())
    with scope.step(batch):
        with scope.forward():
            fast = weights
            for _ in range(2):
                inner = functional_call(job.model, fast, (support,)).square().mean()
                grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
            loss = functional_call(job.model, fast, (query,)).square().mean()
        del fast, grads, inner
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


class _Smooth(nn.Module):
    """Layers that have second derivatives everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of rows."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) * x
        return x


def _lbfgs(model: nn.Module) -> Sequence[Optimizer]:
    return (torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2, history_size=6),)


def _ema(job: Job, batch: Any, scope: Scope) -> None:
    """A deep copy follows the weights after each step."""
    ema = job.extras.get("ema")
    if ema is None:
        ema = job.extras["ema"] = copy.deepcopy(job.model).requires_grad_(False)
    simple(square_loss)(job, batch, scope)
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), job.model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


def _ema_late(job: Job, batch: Any, scope: Scope) -> None:
    """As `_ema`, from the sixth step on."""
    (_ema if job.index >= 5 else simple(square_loss))(job, batch, scope)


def _swa(job: Job, batch: Any, scope: Scope) -> None:
    """The average of the weights over the steps."""
    if "swa" not in job.extras:
        job.extras["swa"] = AveragedModel(job.model)
    simple(square_loss)(job, batch, scope)
    job.extras["swa"].update_parameters(job.model)


def _lookahead(job: Job, batch: Any, scope: Scope) -> None:
    """Slow weights beside the fast ones."""
    if "lookahead" not in job.extras:
        job.extras["lookahead"] = Lookahead(job.optimizer)
    simple(square_loss)(job, batch, scope)
    job.extras["lookahead"].follow()


def _distillation(job: Job, batch: Any, scope: Scope) -> None:
    """A frozen teacher gives the targets."""
    if "teacher" not in job.extras:
        job.extras["teacher"] = copy.deepcopy(job.model).eval().requires_grad_(False)
    with scope.step(batch):
        with scope.forward():
            with torch.no_grad():
                target = job.extras["teacher"](batch) * 0.5
            loss = functional.mse_loss(job.model(batch), target)
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _teacher_before(job: Job, batch: Any, scope: Scope) -> None:
    """A frozen teacher gives the targets, before the step begins."""
    if "teacher" not in job.extras:
        job.extras["teacher"] = copy.deepcopy(job.model).eval().requires_grad_(False)
    with torch.no_grad():
        target = job.extras["teacher"](batch) * 0.5
    with scope.step(batch, target):
        with scope.forward():
            loss = functional.mse_loss(job.model(batch), target)
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _keeping(job: Job, batch: Any, scope: Scope) -> None:
    """The last batch, and what the model made of it, are kept until the next step has ended."""
    with scope.step(batch):
        with scope.forward():
            out = job.model(batch)
            loss = out.square().mean() + out.mean()
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)
    job.extras["last"] = (batch, out.detach())


def _curvature(job: Job, batch: Any, scope: Scope) -> None:
    """A Hessian-vector product and a vector-Jacobian product with respect to the input, in the loss."""
    with scope.step(batch):
        with scope.forward():
            inputs = batch.detach().requires_grad_()
            _, product = torch.autograd.functional.hvp(
                lambda x: square_loss(job.model, x), inputs, torch.ones_like(inputs), create_graph=True
            )
            _, pulled = torch.autograd.functional.vjp(job.model, inputs, torch.ones_like(inputs), create_graph=True)
            loss = square_loss(job.model, batch) + product.square().sum() + pulled.square().mean()
        del product, pulled
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _transforms(job: Job, batch: Any, scope: Scope) -> None:
    """Gradients of each sample, and the Jacobian of a few, by `torch.func`."""
    weights = dict(job.model.named_parameters())

    def sample_loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(job.model, values, (row,)).square().mean()

    with scope.step(batch):
        with scope.forward():
            grads = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0))(weights, batch[:16])
            penalty = torch.stack([g.square().sum() for g in grads.values()]).sum()
            slope = torch.func.jacrev(lambda x: functional_call(job.model, weights, (x,)).sum(0))(batch[:8])
            loss = square_loss(job.model, batch) + penalty + slope.square().mean()
        del grads, slope
        scope.backward(loss)
    scope.record("loss", loss)
    scope.update(*job.optimizers)


class _PartlyCompiled(nn.Module):
    """A compiled block between ordinary ones; the backend only traces, and runs what it traced."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block, self.after = (ResidualMLP(WIDTH, HIDDEN, 1) for _ in range(3))
        self.block.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of rows."""
        out: Tensor = self.after(self.block(self.before(x)))
        return out


def _nested(model: nn.Module) -> Sequence[Optimizer]:
    return (NestedStateSGD(model.parameters()),)


def _tokens(step: int) -> dict[str, Tensor]:
    tokens = integers(step, 96, 16, 64)
    return {"input_ids": tokens, "labels": tokens}


def _pairs(step: int) -> dict[str, Tensor]:
    return {"input_ids": integers(step, 96, 16, 48), "labels": integers(step, 96, 16, 40, salt=2)}


def _model_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _loop(name: str, build: Callable[[], nn.Module], train_step: Any, batch: Any = _rows, **options: Any) -> Case:
    options = {"optimizers": adamw, "steps": 8, "split": False, "budgeted": True, **options}
    return Case(name=name, build=build, batch=batch, train_step=train_step, **options)


LOOPS: tuple[Case, ...] = (
    _loop("sam", _mlp(), _sam, optimizers=_sams),
    _loop("maml", _Smooth, _maml, lambda step: normal(step, 1024, 96), optimizers=sgd),
    _loop("lbfgs", _mlp(), closure_step, optimizers=_lbfgs, steps=6, grows=True),
    _loop("ema", _mlp(), _ema),
    _loop(
        "gan",
        lambda: Adversaries(12),
        gan_step,
        lambda step: (normal(step, 48, 3, 32, 32), normal(step, 48, 16, 1, 1, salt=3)),
        optimizers=two_adams,
    ),
    _loop("scripted", lambda: PartlyScripted(WIDTH, 3), simple(square_loss)),
    _loop("batchnorm-modes", lambda: TwoModes(64, 4), simple(square_loss), lambda step: normal(step, 32, 64, 64)),
    _loop("layerdrop", _mlp(5, drop_layer=0.25), simple(square_loss), static=False, steps=12),
    _loop(
        "gru",
        lambda: RecurrentLM("gru", dim=96),
        simple(next_token),
        lambda step: integers(step, 64, 160, 11),
    ),
    _loop("t5", lambda: hugging_face.t5(layers=1), simple(_model_loss), _pairs),
    _loop("mixtral", hugging_face.mixtral, simple(_model_loss), _tokens, static=False, steps=12),
    _loop(
        "resnet",
        lambda: ResNet((2, 2, 1), bottleneck=False, width=12, num_classes=10),
        simple(classify),
        images(64, 32),
    ),
    _loop("ema-late", _mlp(), _ema_late, steps=10, grows=True),
    _loop("swa", _mlp(), _swa),
    _loop("lookahead", _mlp(), _lookahead),
    _loop("teacher", _mlp(), _distillation),
    _loop("teacher-before", _mlp(), _teacher_before),
    _loop("keeping", _mlp(), _keeping),
    _loop("curvature", _Smooth, _curvature, lambda step: normal(step, 1024, 96), optimizers=sgd),
    _loop("transforms", _Smooth, _transforms, lambda step: normal(step, 1024, 96), optimizers=sgd),
    _loop("nested-state", _mlp(), simple(square_loss), optimizers=_nested, grows=True, steps=10),
    _loop("compiled", _PartlyCompiled, simple(square_loss), hides=True, steps=9),
)
LOOPS_BY_NAME: dict[str, Case] = {case.name: case for case in LOOPS}
assert len(LOOPS_BY_NAME) == len(LOOPS), "case names must be unique"
