"""Cross-entropy of a linear layer, over chunks of rows: the logits of all rows never exist at once.

For a language model the logits set the smallest feasible budget: ``rows x vocabulary``, and as much again for the
logarithms of the probabilities and for either gradient. A chunk of rows needs a share of two of them, and once its
gradients of the hidden states and of the weight are there nothing of it is needed any more. So forward computes the
gradients too, as Liger Kernel does (Hsu et al., 2024), and as many products of matrices are computed as without chunks.
What backward needs are two tensors: as large as the hidden states and as the weight.

Gradients are accumulated without the factor of backward (the loss's own gradient, over the number of targets for a
mean), in float32 where inputs are narrower, and get it in backward: half precision's range suffices whatever a
``GradScaler`` multiplies the loss by. For the same reason classes' weights count as shares of the largest until then,
and what is summed over rows in float16 is lifted or lowered to what its range has room for.

Everything is an ordinary op of PyTorch, so that a step with it is recorded, planned and replayed like any other. torch
2.13 has ``torch.nn.functional.linear_cross_entropy``, whose chunks are one custom op: FakeTensors do not show what it
allocates within, its gradients stay on the device unseen by saved-tensor hooks, and it has no label smoothing.

Shortfalls: gradients are computed in forward even if backward never comes (not under ``torch.no_grad``); no second
derivatives; targets are class indices; ``torch.func`` transforms are not supported; ``torch.compile`` unrolls the
chunks.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_offload.errors import UnsupportedError

__all__ = ["Autocast", "Cast", "Change", "Scale", "Shift", "Tanh", "chunked_linear_cross_entropy", "loss_in_chunks"]

_REDUCTIONS = ("mean", "sum")
_UNITS = (1e-30, 1e30)
"""What weights of classes are divided by is within these, so that it has a reciprocal."""
_MOST_IN_FLOAT16 = 2.0**15  # half of the largest number of float16, for sums of a few
_LEAST_ROWS = 128
"""Of a chunk whose number nobody gave: products of matrices are slow with fewer."""


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    num_chunks: int = 8,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of ``F.linear(hidden, weight, bias)``, of which no more than one chunk of rows exists at once.

    The same as ``F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, -2), targets.flatten(), ...)``, autocast
    included, up to the order of sums: those over rows, of the loss and of the gradients of the weight and of the bias.

    Args:
        hidden: What the linear layer reads, of shape (..., features).
        weight: Of the linear layer, (classes, features), which may be tied to an embedding.
        targets: The class of each row, of shape (...), in int64. A language model's next tokens are
            ``F.pad(tokens[:, 1:], (0, 1), value=-100)``.
        bias: Of the linear layer, (classes,).
        class_weight: How much each class counts, (classes,); gets no gradient.
        num_chunks: Into how many parts rows are cut; never more than there are rows.
        ignore_index: The target of rows that do not count.
        reduction: "mean" over the rows that count, by their classes' weights, or "sum".
        label_smoothing: Share of each target that is spread over all classes, in [0, 1].

    Returns:
        The loss, in the type that ``F.cross_entropy`` gives.

    Raises:
        UnsupportedError: An argument is not supported; says what is allowed.
    """
    _check(hidden, weight, targets, bias, class_weight, num_chunks, reduction, label_smoothing)
    autocast = Autocast.now(hidden)
    return loss_in_chunks(
        hidden,
        weight,
        targets,
        bias=bias,
        class_weight=class_weight,
        num_chunks=num_chunks,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        autocast=autocast,
        dtype=torch.float32 if autocast.dtype is not None else hidden.dtype,
    )


def loss_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_chunks: int | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    autocast: Autocast,
    dtype: torch.dtype,
    changes: Sequence[Change] = (),
) -> Tensor:
    """What :func:`chunked_linear_cross_entropy` computes, of arguments known to be right, and of more kinds of logits.

    Args:
        hidden: Cf. :func:`chunked_linear_cross_entropy`, as are those that are not named here.
        weight: Of the linear layer.
        targets: The class of each row.
        bias: Of the linear layer.
        class_weight: How much each class counts.
        num_chunks: Into how many parts rows are cut; None for as many as leave a part's logits no larger than the
            hidden states of all rows, or than 128 rows.
        ignore_index: The target of rows that do not count.
        reduction: "mean" or "sum".
        label_smoothing: Share of each target that is spread over all classes.
        autocast: What the linear layer computes in.
        dtype: Of the loss.
        changes: What is done with what the linear layer makes.
    """
    rows = hidden.reshape(targets.numel(), hidden.shape[-1])
    if num_chunks is None:
        num_chunks = max(1, min(-(-len(weight) // weight.shape[1]), len(rows) // _LEAST_ROWS))
    how = _How(
        num_chunks=num_chunks,
        ignore_index=ignore_index,
        is_mean=reduction == "mean",
        smoothing=float(label_smoothing),
        autocast=autocast.dtype,
        dtype=dtype,
        changes=tuple(changes),
        has_gradients=torch.is_grad_enabled(),
    )
    is_cast = autocast.dtype is not None
    with torch.autocast(autocast.kind, enabled=False) if is_cast else contextlib.nullcontext():
        apply: Any = _Chunked.apply
        loss: Tensor = apply(rows, weight, bias, targets.reshape(-1), class_weight, how)
    return loss


@dataclasses.dataclass(frozen=True, slots=True)
class Autocast:
    """What a linear layer computes in, as a region of autocast has it.

    Attributes:
        kind: The type of the device.
        dtype: What matrices are multiplied in; None where autocast is off, or has no effect.
    """

    kind: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, hidden: Tensor) -> Autocast:
        """That of a linear layer that reads this now."""
        kind = hidden.device.type
        is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return cls(kind, torch.get_autocast_dtype(kind) if is_on and hidden.dtype is not torch.float64 else None)

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Within, the linear layer computes as it would have."""
        if not torch.amp.is_autocast_available(self.kind):
            return contextlib.nullcontext()
        return torch.autocast(self.kind, self.dtype, enabled=self.dtype is not None)


class Change(abc.ABC):
    """Something that is done with each of the logits for itself, before the loss."""

    bound = 1.0
    """A bound of its derivative, where that is above one."""

    @abc.abstractmethod
    def __call__(self, logits: Tensor) -> Tensor:
        """The logits as they are after it."""

    def backward(self, gradient: Tensor, result: Tensor) -> Tensor:
        """The gradient with regard to what it read, in place of that with regard to its result, in float32."""
        del result
        return gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Scale(Change):
    """A product with a number, or a quotient.

    Attributes:
        number: The factor, or the divisor.
        is_divisor: Which of them.
    """

    number: float
    is_divisor: bool

    @property
    def bound(self) -> float:  # type: ignore[override]
        """A bound of its derivative, where that is above one."""
        return max(1.0, abs(1 / self.number if self.is_divisor else self.number))

    @override
    def __call__(self, logits: Tensor) -> Tensor:
        return logits / self.number if self.is_divisor else logits * self.number

    @override
    def backward(self, gradient: Tensor, result: Tensor) -> Tensor:
        return gradient.div_(self.number) if self.is_divisor else gradient.mul_(self.number)


class Tanh(Change):
    """A hyperbolic tangent, as a softcap has it."""

    @override
    def __call__(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits)

    @override
    def backward(self, gradient: Tensor, result: Tensor) -> Tensor:
        return gradient.mul_(result.to(gradient.dtype).square_().neg_().add_(1))


@dataclasses.dataclass(frozen=True, slots=True)
class Shift(Change):
    """A sum with a number for each class, that gets no gradient.

    Attributes:
        numbers: They, of shape (classes,).
    """

    numbers: Tensor

    @override
    def __call__(self, logits: Tensor) -> Tensor:
        return logits + self.numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Cast(Change):
    """Another type.

    Attributes:
        dtype: That.
    """

    dtype: torch.dtype

    @override
    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


class _How(NamedTuple):
    """How a loss is computed.

    Attributes:
        num_chunks: Into how many parts rows are cut.
        ignore_index: The target of rows that do not count.
        is_mean: Whether the loss is a mean.
        smoothing: Label smoothing.
        autocast: What autocast multiplies matrices in; None without it.
        dtype: Of the loss.
        changes: What is done with what the linear layer makes.
        has_gradients: Whether there may be a backward.
    """

    num_chunks: int
    ignore_index: int
    is_mean: bool
    smoothing: float
    autocast: torch.dtype | None
    dtype: torch.dtype
    changes: tuple[Change, ...]
    has_gradients: bool


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    num_chunks: int,
    reduction: str,
    label_smoothing: float,
) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UnsupportedError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)} do not match: "
            "give (..., features) and (classes, features)"
        )
    if targets.shape != hidden.shape[:-1]:
        raise UnsupportedError(
            f"targets of shape {tuple(targets.shape)} do not match hidden of shape {tuple(hidden.shape)}: "
            f"give one for each row, {tuple(hidden.shape[:-1])}"
        )
    if targets.dtype != torch.int64:
        raise UnsupportedError(f"targets are {targets.dtype}: give class indices in torch.int64, not probabilities")
    for name, given in (("bias", bias), ("class_weight", class_weight)):
        if given is not None and given.shape != weight.shape[:1]:
            raise UnsupportedError(
                f"{name} of shape {tuple(given.shape)} does not match weight of shape {tuple(weight.shape)}: "
                f"give one number for each class, {tuple(weight.shape[:1])}"
            )
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1:
        raise UnsupportedError(f"num_chunks={num_chunks!r} is no positive int: 1 is the loss without chunks")
    if reduction not in _REDUCTIONS:
        raise UnsupportedError(f"reduction={reduction!r} is not supported: choose one of 'mean', 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise UnsupportedError(f"label_smoothing={label_smoothing!r} is outside of [0, 1]")
    if class_weight is not None and class_weight.requires_grad:
        raise UnsupportedError("class_weight requires a gradient and gets none: give class_weight.detach()")


class _Rows(NamedTuple):
    """The targets of all rows, or of a chunk of them.

    Attributes:
        target: The class; 0 where there is none.
        counts: 1 for rows that count, 0 for others.
        weight: The weight of the class; 0 for rows that do not count.
    """

    target: Tensor
    counts: Tensor
    weight: Tensor

    def chunk(self, begin: int, end: int) -> _Rows:
        return _Rows(*(column[begin:end] for column in self))


def _rows_of(targets: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> _Rows:
    is_ignored = targets == ignore_index
    target = targets.masked_fill(is_ignored, 0)
    counts = torch.ones_like(targets, dtype=dtype).masked_fill_(is_ignored, 0)
    weight = counts if class_weight is None else class_weight[target].masked_fill(is_ignored, 0)
    return _Rows(target, counts, weight)


class _Chunked(torch.autograd.Function):
    """The loss of all rows, and the gradients that backward only has to scale."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        how: _How,
    ) -> Tensor:
        needs = [is_needed and how.has_gradients for is_needed in ctx.needs_input_grad[:3]]
        ctx.dtypes = [tensor.dtype if tensor is not None else None for tensor in (hidden, weight, bias)]
        if how.autocast is not None:
            hidden, weight = hidden.to(how.autocast), weight.to(how.autocast)
            bias = bias.to(how.autocast) if bias is not None else None
        total_dtype = torch.promote_types(torch.promote_types(hidden.dtype, torch.float32), how.dtype)
        unit: Tensor | None = None
        if class_weight is not None:
            class_weight = class_weight.to(total_dtype)
            unit = class_weight.abs().amax().clamp(*_UNITS)
            class_weight = class_weight / unit
        rows = _rows_of(targets, class_weight, how.ignore_index, total_dtype)
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        total = torch.zeros((), dtype=total_dtype, device=hidden.device)
        num_rows = hidden.shape[0]
        step = max(1, -(-num_rows // how.num_chunks))
        bound = 1.0
        for change in how.changes:
            bound *= change.bound
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            part = hidden[begin:end]
            loss, of_logits, factor = _chunk(part, weight, bias, rows.chunk(begin, end), class_weight, how, any(needs))
            total += loss
            if needs[2]:
                of_bias = _plus_product(of_bias, of_logits, factor, total_dtype, bound)
            if of_hidden is not None:
                of_hidden[begin:end] = (of_logits @ weight).mul_(factor.unsqueeze(-1))
            if needs[1]:
                scaled = part * factor.unsqueeze(-1)
                of_weight = _plus_product(of_weight, of_logits, scaled, total_dtype, bound)
            del of_logits
        if of_weight is None and needs[1]:
            of_weight = torch.zeros_like(weight, dtype=total_dtype)
        if of_bias is None and needs[2] and bias is not None:
            of_bias = torch.zeros_like(bias, dtype=total_dtype)
        loss, divisor = total, None
        if how.is_mean:
            count = rows.weight.sum()
            loss, divisor = total / count, count.masked_fill(rows.counts.sum() == 0, math.inf)
        elif unit is not None:
            loss, divisor = total * unit, unit.reciprocal()
        ctx.save_for_backward(of_hidden, of_weight, of_bias, divisor)
        return loss.to(how.dtype)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # which is what create_graph means here
            raise UnsupportedError(
                "chunked_linear_cross_entropy has no second derivative: call backward without create_graph, use "
                "F.cross_entropy(F.linear(...)), or leave chunked_loss=True out"
            )
        *gradients, divisor = ctx.saved_tensors
        factor = of_loss if divisor is None else of_loss / divisor
        return (*(_scaled(g, factor, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None)


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: _Rows,
    class_weight: Tensor | None,
    how: _How,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses of a chunk of rows, and its gradient with regard to their logits, if that is needed.

    Passes over the logits are what a chunk costs beside its products: there are two, and the gradient takes the place
    of the logits. What a row counts is no pass: it is left to what the gradient is multiplied with.

    Returns:
        The loss, the gradient, and by row a factor that the gradient lacks.
    """
    logits = F.linear(hidden, weight, bias)
    changed, results = logits, []
    for change in how.changes:
        changed = change(changed)
        results.append(changed if type(change) is Tanh else logits)  # others' derivatives need none
    scores = torch.log_softmax(changed, -1, dtype=rows.counts.dtype)
    del changed
    of_target = scores.gather(-1, rows.target.unsqueeze(-1)).squeeze(-1)
    losses = -of_target * rows.weight
    num_classes = scores.shape[-1]
    spread = how.smoothing / num_classes
    if how.smoothing:
        smooth = scores.sum(-1) if class_weight is None else scores @ class_weight
        losses = (1 - how.smoothing) * losses - spread * smooth
    loss = losses.masked_fill(rows.counts == 0, 0).sum()
    if not needs_gradient:
        return loss, logits, rows.weight
    each = torch.arange(len(logits), device=logits.device)
    if how.changes and not how.smoothing:
        scores.exp_()
        scores[each, rows.target] = of_target.expm1()
        return loss, _before(how.changes, results, scores, logits), rows.weight
    if not how.smoothing:
        torch.exp(scores, out=logits)
        logits[each, rows.target] = of_target.expm1().to(logits.dtype)
        return loss, logits, rows.weight
    shares = (1 - how.smoothing) * rows.weight
    all_weights = num_classes if class_weight is None else class_weight.sum()
    scores.exp_().mul_((shares + spread * rows.counts * all_weights).unsqueeze(-1))
    even = torch.ones_like(scores[0]) if class_weight is None else class_weight
    scores.addr_(rows.counts, even, alpha=-spread)
    scores[each, rows.target] -= shares
    return loss, _before(how.changes, results, scores, logits), rows.counts


def _before(changes: Sequence[Change], results: Sequence[Tensor], gradient: Tensor, logits: Tensor) -> Tensor:
    """The gradient with regard to the logits, in their place, of that with regard to what changes made of them."""
    for change, result in zip(reversed(changes), reversed(results), strict=True):
        gradient = change.backward(gradient, result)
    return logits.copy_(gradient)


def _plus_product(total: Tensor | None, of_logits: Tensor, other: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    """Add a chunk's share to the gradient of weight or bias, in place where there is one.

    No number of the gradient with regard to the logits is beyond -`bound` to `bound`: that bounds their sums over rows.
    """
    if of_logits.dtype is torch.float16:
        most = other.abs().amax() * len(other) * bound
        scale = torch.exp2(torch.floor(torch.log2(_MOST_IN_FLOAT16 / most.clamp_min(_UNITS[0]))))
        part = of_logits.mT @ (other * scale).to(torch.float16)
        return part.to(dtype).div_(scale) if total is None else total.addcdiv_(part, scale)
    other = other.to(of_logits.dtype)
    if total is None:
        return (of_logits.mT @ other).to(dtype)
    if other.dim() == 2 and other.dtype == dtype:
        return total.addmm_(of_logits.mT, other)
    return total.add_(of_logits.mT @ other)


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """A gradient times a factor, in float32 if not wider: the factor may be beyond half precision's range."""
    if gradient is None:
        return None
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.mul(gradient.to(wide), factor.to(wide), out=torch.empty_like(gradient, dtype=dtype))
