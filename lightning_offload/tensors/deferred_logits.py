"""Logits that are computed when they are read, and never as a whole where a cross-entropy reads them.

What a language model's last linear layer makes is put off: the layer gives a tensor of the right shape and type without
any memory. Reshaped, sliced, cast, scaled or capped it is put off further. ``torch.nn.functional.cross_entropy`` of it
is computed in chunks of rows, cf. :mod:`~lightning_offload.losses`. Whatever else reads it has it computed then, as the
program would have: the same ops, on the same memory for its views, with the same graph for autograd.

Note [Graphs of others]: a ``torch.autograd.Function`` may return logits that are still put off, as DDP's does with all
outputs. Autograd then gives them a place in the graph that is not theirs: they are computed and go on from there.

So a program's own loss runs unmodified, and its result is the same up to the order of sums over rows.

Shortfalls: what is put off keeps what the layer read, and its parameters as they were: reading it after they were
written is refused. ``torch.autograd.Function`` and what else torch does not show to subclasses reads it below autograd;
gradients are right there too, by computing the logits once more in backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_offload.errors import UnsupportedError
from lightning_offload.losses import Autocast, Cast, Change, Scale, Shift, Tanh, loss_in_chunks

__all__ = ["DeferredLogits", "Readers", "defer"]

_OURS = ("lightning_offload.", "torch.")
_ASKED = frozenset((
    "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "ndimension", "element_size", "get_device",
    "__len__", "__hash__", "is_inference", "is_same_size", "has_names",
))  # fmt: skip
"""Methods that read no number."""

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "output_nr", "is_cuda",
    "is_cpu", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes",
)  # fmt: skip
_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_WATCHERS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"))
"""Methods after which the gradient of the logits has to come by."""


@dataclasses.dataclass(slots=True)
class Readers:
    """What read the logits of a head.

    Attributes:
        num_chunked: How many cross-entropies were computed in chunks.
        others: What else read them as a whole, in words.
    """

    num_chunked: int = 0
    others: list[str] = dataclasses.field(default_factory=list)

    def note(self, name: str) -> None:
        """Something reads them as a whole."""
        text = f"`{name}` ({_caller()})"
        if text not in self.others:
            self.others.append(text)


def _caller() -> str:
    """Where the program is, without torch and without us."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _State:
    """What logits are.

    Attributes:
        hidden: What the layer reads for these rows, with features last.
        weight: Of the layer.
        bias: Of the layer.
        versions: How often what the layer reads had been written.
        autocast: What it computes in.
        changes: What was done with what it makes.
        is_second: Whether classes are the second dimension, and not the last.
        has_graph: Whether autograd is to see them.
        readers: Who reads them.
        source: The logits that these were made of, if any.
        made_by: What made them of these.
        whole: They, once something has read them.
        version: How often they had been written then.
        is_watched: Whether something waits for their gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, ...]
    autocast: Autocast
    changes: tuple[Change, ...]
    is_second: bool
    has_graph: bool
    readers: Readers
    source: _State | None = None
    made_by: Callable[[Tensor], Tensor] | None = None
    whole: Tensor | None = None
    version: int = 0
    is_watched: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows, num_classes = tuple(self.hidden.shape[:-1]), len(self.weight)
        return (rows[0], num_classes, *rows[1:]) if self.is_second else (*rows, num_classes)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.autocast.dtype or self.hidden.dtype
        for change in self.changes:
            dtype = change.dtype if isinstance(change, Cast) else dtype
        return dtype

    @property
    def is_as_made(self) -> bool:
        """Whether the program has written neither them nor what they are made of, nor asked for their gradient."""
        state: _State | None = self if self.is_current else None
        if state is None:
            return False
        while state is not None:
            if state.is_watched or (state.whole is not None and state.whole._version != state.version):
                return False
            state = state.source
        return True

    @property
    def is_current(self) -> bool:
        """Whether what the layer reads is as it was."""
        return self.versions == _versions(self.hidden, self.weight, self.bias)

    def check(self) -> None:
        """Refuse to compute them of what has been written since.

        Raises:
            UnsupportedError: It has.
        """
        if not self.is_current:
            raise UnsupportedError(
                "chunked_loss=True: these logits were not computed when the model made them, and what they are made of "
                "has been written since (an optimizer has stepped, say): read them before, or leave chunked_loss out"
            )

    def compute(self) -> Tensor:
        """All of them; from then on they are a tensor like any."""
        if self.whole is None:
            with torch.set_grad_enabled(self.has_graph):
                if self.source is not None and self.made_by is not None:
                    self.whole = self.made_by(self.source.compute())
                else:
                    self.check()
                    with self.autocast.again():
                        self.whole = F.linear(self.hidden, self.weight, self.bias)
            self.version = self.whole._version
        return self.whole

    def derived(self, made_by: Callable[[Tensor], Tensor], **changed: Any) -> _State:
        """Other logits, that something makes of these."""
        new = dataclasses.replace(
            self, source=self, made_by=made_by, whole=None, version=0, is_watched=False, **changed
        )
        new.has_graph = self.has_graph and new.has_graph and _needs_graph(new.hidden, new.weight, new.bias)
        if not new.has_graph:
            new.hidden, new.weight = new.hidden.detach(), new.weight.detach()
            new.bias = new.bias.detach() if new.bias is not None else None
        new.versions = _versions(new.hidden, new.weight, new.bias)
        return new


def _needs_graph(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None)


def defer(hidden: Tensor, weight: Tensor, bias: Tensor | None, readers: Readers) -> DeferredLogits:
    """What ``F.linear(hidden, weight, bias)`` would be, put off until it is read.

    Args:
        hidden: What the layer reads, (..., features).
        weight: Of the layer, (classes, features).
        bias: Of the layer, (classes,).
        readers: Told of what reads it.
    """
    return _made(
        _State(
            hidden=hidden,
            weight=weight,
            bias=bias,
            versions=_versions(hidden, weight, bias),
            autocast=Autocast.now(hidden),
            changes=(),
            is_second=False,
            has_graph=_needs_graph(hidden, weight, bias),
            readers=readers,
        )
    )


def _made(state: _State) -> DeferredLogits:
    if not state.has_graph:
        return DeferredLogits(state)
    apply: Any = _Deferred.apply
    made: DeferredLogits = apply(state.hidden, state.weight, state.bias, state)
    made.state = state
    return made


class DeferredLogits(Tensor):
    """Logits that are computed when they are read.

    Attributes:
        state: What they are.
    """

    state: _State

    @staticmethod
    def __new__(cls, state: _State) -> DeferredLogits:
        """Logits without memory."""
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, state.shape, dtype=state.dtype, device=state.hidden.device
        )
        made.state = state
        return made

    def __init__(self, state: _State) -> None:
        pass

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _GETTERS or name in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(_adopted, (args, kwargs))
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, DeferredLogits) and first.state.is_as_made:
            further = _further(func, name, first, args, kwargs)
            if further is not None:
                return further
        if isinstance(first, DeferredLogits) and name in _WATCHERS:
            first.state.is_watched = True
        for logits in (item for item in tree_leaves((args, kwargs)) if isinstance(item, DeferredLogits)):
            logits.state.readers.note(_name_of(func))
        args, kwargs = tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch takes its own for a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read below autograd, which knows of the logits by their own node."""
        args, kwargs = tree_map(_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _name_of(func: Any) -> str:
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", "__get__"))
    return str(getattr(func, "__name__", func))


def _whole(item: Any) -> Any:
    return item.state.compute() if isinstance(item, DeferredLogits) else item


def _adopted(item: Any) -> Any:
    """Logits to which autograd has given a place in the graph that is not theirs, as a tensor at that place."""
    if not isinstance(item, DeferredLogits):
        return item
    with torch._C.DisableTorchFunctionSubclass():
        node, state = item.grad_fn, item.state
        if (
            getattr(node, "state", None) is (state if state.has_graph else None)
            and (node is None) is not state.has_graph
        ):
            return item
        return item.clone()  # autograd knows of it, and has it read below


def _numbers(item: Any) -> Any:
    if not isinstance(item, DeferredLogits):
        return item
    item.state.readers.note("torch.autograd.Function")
    return item.state.compute().detach()


class _Deferred(torch.autograd.Function):
    """The logits' place in the graph, for what reads them below autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, state: _State) -> DeferredLogits:
        del hidden, weight, bias
        ctx.state = state
        return DeferredLogits(state)

    @staticmethod
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor | None, ...]:
        state: _State = ctx.state
        state.check()
        leaves = [
            tensor.detach().requires_grad_(needs) if tensor is not None else None
            for tensor, needs in zip((state.hidden, state.weight, state.bias), ctx.needs_input_grad, strict=False)
        ]
        hidden, weight, bias = leaves
        assert hidden is not None
        assert weight is not None
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            with state.autocast.again():
                logits = F.linear(hidden, weight, bias)
            for change in state.changes:
                logits = change(logits)
            logits = logits.movedim(-1, 1) if state.is_second else logits
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(logits, wanted, of_logits))
        return (*(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves), None)


def _same(tensor: Tensor) -> Tensor:
    return tensor


# ---- what is put off further


def _further(func: Any, name: str, logits: DeferredLogits, args: Any, kwargs: Any) -> Any:
    """The result of a function of logits that are not computed for it; None for any other."""
    if func is F.cross_entropy:
        return _cross_entropy(logits.state, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    if func == _DATA:
        name = "detach"
    find = _FINDERS.get(name)
    if find is None or "out" in kwargs:
        return None
    operands = args[1:] if args else ()
    others = {key: item for key, item in kwargs.items() if key != "input"}
    if any(isinstance(item, DeferredLogits) for item in (*operands, *others.values())):
        return None
    try:
        changed = find(logits.state, *operands, **others)
    except (TypeError, ValueError, RuntimeError, IndexError):  # the function itself says what is wrong
        return None
    if changed is None:
        return None
    if not changed:
        return logits

    def made_by(whole: Tensor) -> Tensor:
        made: Tensor = func(whole, *operands, **others)
        return made

    return _made(logits.state.derived(made_by, **changed))


_Changed = dict[str, Any] | None


def _as_is(state: _State) -> _Changed:
    del state
    return {}


def _copied(state: _State, *, memory_format: Any = None) -> _Changed:
    return {"changes": state.changes} if memory_format is None else None


def _without_graph(state: _State) -> _Changed:
    del state
    return {"has_graph": False}


def _reshaped(state: _State, *sizes: Any, shape: Any = None) -> _Changed:
    sizes = tuple(shape if shape is not None else sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)
    if state.is_second or not all(isinstance(size, int) for size in sizes):
        return None
    num_classes = len(state.weight)
    known = math.prod(size for size in sizes if size != -1)
    sizes = tuple(math.prod(state.shape) // known if size == -1 else size for size in sizes)
    if sizes[-1] != num_classes or math.prod(sizes) != math.prod(state.shape):
        return None
    return {"hidden": state.hidden.reshape(*sizes[:-1], state.hidden.shape[-1])}


def _flattened(state: _State, start_dim: int = 0, end_dim: int = -1) -> _Changed:
    num_dims = len(state.shape)
    if state.is_second or end_dim % num_dims == num_dims - 1:
        return None
    return {"hidden": state.hidden.flatten(start_dim, end_dim)}


def _indexed(state: _State, index: Any) -> _Changed:
    """Some of the rows, all classes of each."""
    index = index if isinstance(index, tuple) else (index,)
    num_dims, num_used, whole = len(state.shape), 0, slice(None)
    for item in index:
        if isinstance(item, Tensor):
            num_used += item.dim() if item.dtype is torch.bool else 1
        elif isinstance(item, (int, slice)) and not isinstance(item, bool):
            num_used += 1
        elif item is not None and item is not Ellipsis:
            return None
    places = [place for place, item in enumerate(index) if item is Ellipsis]
    place = places[0] if places else len(index)
    index = (*index[:place], *[whole] * (num_dims - num_used), *index[place + 1 :])
    if state.is_second or not isinstance(index[-1], slice) or index[-1] != whole:
        return None
    return {"hidden": state.hidden[index]}


def _swapped(state: _State, dim0: int, dim1: int) -> _Changed:
    if len(state.shape) != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
        return None
    return {"is_second": not state.is_second}


def _permuted(state: _State, *dims: Any) -> _Changed:
    dims = tuple(dims[0] if isinstance(dims[0], (tuple, list)) else dims)
    if len(state.shape) != 3 or tuple(dim % 3 for dim in dims) != (0, 2, 1):
        return None
    return {"is_second": not state.is_second}


def _cast(state: _State, dtype: torch.dtype | None) -> _Changed:
    if dtype is None or dtype is state.dtype:
        return {}
    if not dtype.is_floating_point:
        return None
    return {"changes": (*state.changes, Cast(dtype))}


def _to(state: _State, *args: Any, **kwargs: Any) -> _Changed:
    if "copy" in kwargs:
        return None
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if memory_format is not None or (device is not None and device != state.hidden.device):
        return None
    return _cast(state, dtype)


def _scaled(state: _State, number: Any, *, is_divisor: bool) -> _Changed:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or not number:
        return None
    return {"changes": (*state.changes, Scale(float(number), is_divisor))}


def _capped(state: _State) -> _Changed:
    return {"changes": (*state.changes, Tanh())}


def _shifted(state: _State, numbers: Any) -> _Changed:
    if not isinstance(numbers, Tensor) or numbers.requires_grad or state.is_second or numbers.dim() > len(state.shape):
        return None
    num_classes = len(state.weight)
    if numbers.numel() != num_classes or numbers.shape[-1:] != (num_classes,) or numbers.device != state.hidden.device:
        return None
    if not numbers.dtype.is_floating_point:
        return None
    dtype = torch.promote_types(numbers.dtype, state.dtype)
    casts = () if dtype is state.dtype else (Cast(dtype),)
    return {"changes": (*state.changes, *casts, Shift(numbers.detach().reshape(-1)))}


_FINDERS: dict[str, Callable[..., _Changed]] = {
    "view": _reshaped,
    "reshape": _reshaped,
    "flatten": _flattened,
    "__getitem__": _indexed,
    "transpose": _swapped,
    "swapaxes": _swapped,
    "swapdims": _swapped,
    "permute": _permuted,
    "contiguous": _as_is,
    "clone": _copied,
    "detach": _without_graph,
    "float": lambda state: _cast(state, torch.float32),
    "double": lambda state: _cast(state, torch.float64),
    "half": lambda state: _cast(state, torch.float16),
    "bfloat16": lambda state: _cast(state, torch.bfloat16),
    "to": _to,
    "mul": lambda state, number: _scaled(state, number, is_divisor=False),
    "div": lambda state, number: _scaled(state, number, is_divisor=True),
    "tanh": _capped,
    "add": _shifted,
}


def _cross_entropy(
    state: _State,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss in chunks; None where the arguments are none that it can be computed so of."""
    rows = tuple(state.hidden.shape[:-1])
    if not state.is_second and len(rows) != 1:
        return None
    if not isinstance(target, Tensor) or target.dtype is not torch.int64 or tuple(target.shape) != rows:
        return None
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
        return None
    if weight is not None and (weight.requires_grad or weight.shape != state.weight.shape[:1]):
        return None
    if not 0 <= label_smoothing <= 1 or target.device != state.hidden.device:
        return None
    kind = state.hidden.device.type
    is_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.promote_types(state.dtype, torch.float32) if is_autocast else state.dtype
    changes = state.changes
    while changes and changes[-1] == Cast(torch.float32):  # what a loss does with them itself
        changes = changes[:-1]
    state.readers.num_chunked += 1
    with torch.autocast(kind, enabled=False) if is_autocast else contextlib.nullcontext():
        return loss_in_chunks(
            state.hidden,
            state.weight,
            target,
            bias=state.bias,
            class_weight=weight,
            num_chunks=None,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            autocast=state.autocast,
            dtype=dtype,
            changes=changes,
        )
