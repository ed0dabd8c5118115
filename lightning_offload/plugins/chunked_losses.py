"""Losses of a model's own code, computed in chunks of rows: its output embedding's logits are put off until then.

The linear layer that makes the logits gets another ``forward`` while a plugin serves the model. In a step's forward
that gives :class:`~lightning_offload.tensors.deferred_logits.DeferredLogits`; everywhere else it is the layer's own.

Nobody is to believe in chunks that there are not. A layer that cannot do so is refused before training. A model of
which no loss has been computed in chunks when a step has read its logits is refused as the next step begins, with what
read them.

Shortfalls: within compiled regions the layer's own forward runs, which is told where nothing else calls it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_offload.errors import PolicyError, UnsupportedError
from lightning_offload.plugins.checkpointing import is_run_again
from lightning_offload.plugins.class_swap import graft, ungraft
from lightning_offload.runtime.hooks import within_transform
from lightning_offload.tensors import compiled_code
from lightning_offload.tensors.deferred_logits import Readers, defer, note_update

__all__ = ["ChunkedLosses"]

_LOSSES = "_lightning_offload_losses"
_STEPS_UNTIL_CALLED = 4  # a training may begin with steps of another kind
_ALLOWED = (
    "a loss in chunks is F.cross_entropy, or nn.CrossEntropyLoss, with class indices, of what one nn.Linear makes, "
    "perhaps reshaped, sliced, cast, scaled by a number, or capped by tanh"
)


class _Open(threading.local):
    def __init__(self) -> None:
        self.of: list[ChunkedLosses] = []


_open = _Open()


class _Watched(NamedTuple):
    """A layer that makes logits.

    Attributes:
        name: Within its model.
        head: The layer.
        readers: What reads its logits.
    """

    name: str
    head: weakref.ref[nn.Module]
    readers: Readers


class ChunkedLosses:
    """The losses of a plugin's steps.

    Args:
        asked: Whether they are computed in chunks, or the name of the layer that makes the logits.
    """

    def __init__(self, asked: bool | str) -> None:
        self._asked = asked
        self._heads: dict[int, _Watched] = {}
        self._is_served = False  # whether any loss has been computed in chunks
        self._num_steps = 0
        self._is_called = False  # a head, in a step, by the program itself
        self._has_warned = False
        self._not_deferred = ""  # why a head's own forward ran

    def attach(self, *modules: nn.Module) -> None:
        """Find the heads of models, and have them put off what they make until :meth:`detach`.

        Raises:
            PolicyError: There is none, or none of that name.
            UnsupportedError: It is no linear layer of its own.
        """
        if self._asked is False:
            return
        found = [each for module in modules for each in _heads_of(module, self._asked)]
        new = [(name, head) for name, head in found if vars(head).get(_LOSSES) is not self]
        for name, head in new:
            _check(name, head, self._asked)
        for name, head in new:
            self._heads[id(head)] = _Watched(name, weakref.ref(head), Readers(is_region=is_run_again))
            graft(head, _Head)
            vars(head)[_LOSSES] = self
        if not self._heads:
            raise PolicyError(_none_found(modules, self._asked))

    @property
    def is_attached(self) -> bool:
        """Whether heads are known."""
        return bool(self._heads)

    def detach(self) -> None:
        """Give heads their own forward back; idempotent."""
        for head in self._living():
            ungraft(head, _Head)
        self._heads.clear()

    def _living(self) -> list[nn.Module]:
        return [head for head in (watched.head() for watched in self._heads.values()) if head is not None]

    def begin_step(self) -> None:
        """Another step begins.

        Raises:
            UnsupportedError: What read the logits of the last one needed all of them, and no loss was in chunks yet.
        """
        if not self._heads:
            return
        heads = self._heads.values()
        if not self._is_served and any(watched.readers.num_chunked for watched in heads):
            self._is_served = True
        names = ", ".join(f"`{watched.name}`" for watched in heads)
        others = [text for watched in heads for text in watched.readers.others]
        if self._num_steps and not self._is_called and compiled_code.may_run():
            self._not_deferred = f"{names} runs in compiled code"
        self._num_steps += 1
        if not self._is_served and (others or self._not_deferred):
            why = self._not_deferred or f"what {names} made was read by {' and by '.join(others[:3])}"
            for watched in heads:
                watched.readers.others.clear()
            raise UnsupportedError(
                f"chunked_loss={self._asked!r}: the loss could not be computed in chunks: {why}; {_ALLOWED}: leave "
                "chunked_loss out, or call lightning_offload.chunked_linear_cross_entropy where the loss is computed"
            )
        if self._num_steps == _STEPS_UNTIL_CALLED and not self._is_called:
            warnings.warn(
                f"chunked_loss={self._asked!r}: {names} was not called in the first steps, so no loss is in chunks: "
                "name the layer that makes the logits, or leave chunked_loss out",
                stacklevel=2,
            )
        if others and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"chunked_loss={self._asked!r}: the loss is computed in chunks, but all logits are computed too, for "
                f"{' and for '.join(others[:3])}: without that a step needs less memory",
                stacklevel=2,
            )

    def note_update(self, parameters: Sequence[Tensor]) -> None:
        """An optimizer is about to write these."""
        own = {id(parameter) for head in self._living() for parameter in head.parameters()}
        if own and any(id(parameter) in own for parameter in parameters):
            note_update()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Around each forward of a step, in the thread that runs it."""
        if not self._heads:
            yield
            return
        _open.of.append(self)
        try:
            yield
        finally:
            _open.of.pop()

    def logits(self, head: nn.Module, hidden: Tensor) -> Tensor | None:
        """What a head makes, put off; None where its own forward has to run."""
        if not _open.of or _open.of[-1] is not self or not torch.is_grad_enabled():
            return None
        watched = self._heads.get(id(head))
        if watched is None or watched.head() is not head:
            return None
        self._is_called = True
        parameters: tuple[Any, Any] = (head.weight, head.bias)
        weight, bias = parameters
        self._not_deferred = _why_not(watched.name, head, hidden, weight)
        if self._not_deferred:
            return None
        return defer(hidden, weight, bias, watched.readers)


class _Head:
    """A linear layer that puts off what it makes in a step."""

    grafted_attributes: ClassVar[tuple[str, ...]] = (_LOSSES,)

    def forward(self, input: Tensor) -> Tensor:
        losses: ChunkedLosses | None = vars(self).get(_LOSSES)
        if losses is not None and not torch.compiler.is_compiling():
            logits = losses.logits(self, input)  # type: ignore[arg-type]
            if logits is not None:
                return logits
        made: Tensor = super().forward(input)  # type: ignore[misc]
        return made


def _heads_of(module: nn.Module, asked: bool | str) -> list[tuple[str, nn.Module]]:
    """The layers that make logits, with their names."""
    if isinstance(asked, str):
        return [(name, part) for name, part in module.named_modules() if name == asked]
    names = {id(part): name for name, part in module.named_modules()}
    found: dict[int, nn.Module] = {}
    for part in module.modules():
        ask = getattr(part, "get_output_embeddings", None)
        head = None
        with contextlib.suppress(NotImplementedError, AttributeError):
            head = ask() if callable(ask) else None
        if isinstance(head, nn.Module) and id(head) in names:
            found[id(head)] = head
    return [(names[key], head) for key, head in found.items()]


def _none_found(modules: Sequence[nn.Module], asked: bool | str) -> str:
    if not modules:
        return f"chunked_loss={asked!r} needs the model: give module=, or attach(model)"
    names = " and ".join(type(module).__name__ for module in modules)
    linear = [
        (part.out_features, name)
        for module in modules
        for name, part in module.named_modules()
        if name and isinstance(part, nn.Linear)
    ]
    widest = (
        f"its widest nn.Linear is {max(linear, key=lambda each: each[0])[1]!r}" if linear else "it has no nn.Linear"
    )
    if isinstance(asked, str):
        return f"chunked_loss={asked!r}: {names} has no part of this name; {widest}"
    return (
        f"chunked_loss=True: no part of {names} says by get_output_embeddings(), as Hugging Face's models do, which "
        f"layer makes the logits: give its name (chunked_loss='lm_head'); {widest}"
    )


def _check(name: str, head: nn.Module, asked: bool | str) -> None:
    """Refuse what is no linear layer.

    Raises:
        UnsupportedError: It is none.
    """
    if vars(head).get(_LOSSES) is not None:
        raise UnsupportedError(
            f"chunked_loss={asked!r}: another plugin computes the losses of `{name}` already: keep one, or detach() it"
        )
    if is_parametrized(head):
        raise UnsupportedError(
            f"chunked_loss={asked!r}: `{name}`, which makes the logits, is parametrized (weight norm, say), which is "
            "not supported: leave chunked_loss out"
        )
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise UnsupportedError(
            f"chunked_loss={asked!r}: `{name}`, which makes the logits, is {type(head).__name__} with a forward of its "
            "own, and not an nn.Linear (an adapter, a quantized layer, a framework's hook): name the nn.Linear itself, "
            "or leave chunked_loss out"
        )


def _why_not(name: str, head: nn.Module, hidden: Tensor, weight: Tensor) -> str:
    """Why a layer's own forward has to run; "" where it has not."""
    if is_run_again():
        return f"`{name}` runs in a checkpointed region, which recomputes it as a whole"
    if torch.autograd.forward_ad._current_level >= 0 or within_transform():
        return f"`{name}` runs under torch.func, or in forward mode"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return f"`{name}` has hooks of a program's own, which are given what it makes"
    if not {type(weight), type(hidden)} <= {Tensor, nn.Parameter, FakeTensor}:
        return f"`{name}` is given {type(hidden).__name__} and has {type(weight).__name__}, which are no plain tensors"
    if hidden.dtype is not weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return f"`{name}` is given {hidden.dtype} and has {weight.dtype}"
    return ""
