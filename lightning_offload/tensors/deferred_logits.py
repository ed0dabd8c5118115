"""Logits that are computed when they are read, and never as a whole where a cross-entropy reads them.

What a language model's last linear layer makes is put off: the layer gives a tensor of the right shape and type without
any memory. Reshaped, sliced, cast, scaled or capped it is put off further. ``torch.nn.functional.cross_entropy`` of it
is computed in chunks of rows, cf. :mod:`~lightning_offload.losses`. Whatever else reads it has it computed then, as the
program would have: the same ops, on the same memory for its views, with the same graph for autograd.

So a program's own loss runs unmodified, and its result is the same up to the order of sums over rows.

Note [One family]: what was made of the same logits is computed together, when the first of it is read, and from then on
as it is made. So whatever is written then is written after all that was made before, as in the program.

Note [Graphs of others]: a ``torch.autograd.Function`` may return logits that are still put off, as DDP's does with all
outputs. Autograd then gives them a place in the graph that is not theirs: they are computed and go on from there.

Shortfalls: what is put off keeps what the layer read. Writes to that, and to the logits, are known by version counters:
``weight.data.mul_()`` between the layer and its loss is not noticed; what is handed out past the counters, hooks and
nodes of autograd end the chunks. ``torch.autograd.Function`` and what else torch does not show to subclasses reads the
logits below autograd; gradients are right there too, by computing them once more in backward, but not of a Function
that writes into a view of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_offload.errors import UnsupportedError
from lightning_offload.losses import Autocast, Cast, Change, Scale, Shift, Tanh, loss_in_chunks

__all__ = ["DeferredLogits", "Readers", "defer", "note_update"]

_OURS = ("lightning_offload.", "torch.")
_ASKED = frozenset((
    "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "ndimension", "element_size", "get_device",
    "__len__", "__hash__", "is_inference", "is_same_size", "has_names",
))  # fmt: skip
"""Methods that read no number."""

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "output_nr", "is_cuda", "is_cpu",
    "is_mps", "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes",
)  # fmt: skip
_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)
_NODE: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_EXPOSING_GETTERS = frozenset((Tensor.data.__get__, _NODE))  # type: ignore[attr-defined]
_EXPOSING = frozenset((
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "__set__",
    "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "__reduce_ex__",
    "set_", "share_memory_", "backward",
))  # fmt: skip
"""What gives away their memory, past version counters, or waits for their gradient."""

_GRADIENTS = frozenset(("register_hook", "retain_grad", "backward", "grad"))
"""What asks for the gradient of the logits, which a loss in chunks has none of."""

_num_updates = 0


def note_update() -> None:
    """Parameters are written, perhaps past version counters: logits that have not been computed are not any more."""
    global _num_updates
    _num_updates += 1


@dataclasses.dataclass(slots=True)
class Readers:
    """What read the logits of a head.

    Attributes:
        num_chunked: How many cross-entropies were computed in chunks.
        others: What else read them as a whole, in words.
        is_region: Whether the program is in a region that autograd may have run again, where nothing may be saved that
            is not saved the other time.
    """

    num_chunked: int = 0
    others: list[str] = dataclasses.field(default_factory=list)
    is_region: Callable[[], bool] = bool

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


@dataclasses.dataclass(slots=True, eq=False)
class _Family:
    """What was made of the logits of one call.

    Attributes:
        readers: Who reads them.
        members: All of it, in the order in which it was made.
        is_computed: Whether it has been computed.
        is_exposed: Whether it may be written unseen, or its gradient is waited for.
        is_chunked: Whether a loss has been computed in chunks of it.
    """

    readers: Readers
    members: list[weakref.ref[_State]] = dataclasses.field(default_factory=list)
    is_computed: bool = False
    is_exposed: bool = False
    is_chunked: bool = False

    def compute(self) -> None:
        """Compute all that is still there; see Note [One family]."""
        if not self.is_computed:
            for state in (reference() for reference in self.members):
                if state is not None:
                    state.compute()
            self.is_computed = True
            self.members.clear()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class _State:
    """What logits are.

    Attributes:
        family: What was made of the same.
        hidden: What the layer reads for these rows, with features last.
        weight: Of the layer.
        bias: Of the layer.
        autocast: What it computes in.
        changes: What was done with what it makes.
        is_second: Whether classes are the second dimension, and not the last.
        has_graph: Whether autograd is to see them.
        source: The logits that these were made of, if any.
        made_by: What made them of these.
        made_of: How the tensors that the layer reads were.
        whole: They, once something has read them.
        version: How often they had been written then.
        numbers: They without a graph, for what reads them below autograd before they are computed.
    """

    family: _Family
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: Autocast
    changes: tuple[Change, ...] = ()
    is_second: bool = False
    has_graph: bool
    source: _State | None = None
    made_by: Callable[[Tensor], Tensor] | None = None
    made_of: tuple[Any, ...] = ()
    whole: Tensor | None = None
    version: int = 0
    numbers: Tensor | None = None

    def __post_init__(self) -> None:
        self.made_of = self._made_of_now()
        if not self.family.is_computed:
            self.family.members.append(weakref.ref(self))

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

    def _made_of_now(self) -> tuple[Any, ...]:
        tensors = [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]
        seen = [(tensor._version, tensor.untyped_storage()._cdata, tensor.requires_grad) for tensor in tensors]
        return (_num_updates, *seen)

    @property
    def is_there(self) -> bool:
        """Whether they, or what they were made of, have been read, and so perhaps saved."""
        state: _State | None = self
        while state is not None:
            if state.whole is not None or state.numbers is not None:
                return True
            state = state.source
        return self.family.is_computed

    @property
    def is_as_made(self) -> bool:
        """Whether the program has written neither them nor what they are made of, and waits for no gradient of them."""
        if self.family.is_exposed or self.made_of != self._made_of_now():
            return False
        state: _State | None = self
        while state is not None:
            if state.whole is not None and state.whole._version != state.version:
                return False
            state = state.source
        return True

    def check(self) -> None:
        """Refuse to compute them of what has been written since.

        Raises:
            UnsupportedError: It has.
        """
        if self.made_of != self._made_of_now():
            raise UnsupportedError(
                "chunked_loss=True: these logits were not computed when the model made them, and what they are made of "
                "has been written since (an optimizer has stepped, say): read them before, or leave chunked_loss out"
            )

    def compute(self) -> Tensor:
        """All of them; from then on they are a tensor like any."""
        if self.whole is None:
            source = self.source.compute() if self.source is not None else None
            in_region = self.family.readers.is_region()
            saved = _kept() if in_region else contextlib.nullcontext()
            with torch.inference_mode(False), torch.set_grad_enabled(self.has_graph), saved:
                self.whole = self._made(source)
            self.version = self.whole._version
            self.numbers = None
        return self.whole

    def _made(self, source: Tensor | None) -> Tensor:
        if source is not None and self.made_by is not None:
            return self.made_by(source)
        self.check()
        with self.autocast.again():
            return F.linear(self.hidden, self.weight, self.bias)

    def read_below(self) -> Tensor:
        """Their numbers, for what reads them below autograd."""
        if self.whole is not None:
            return self.whole.detach()
        if self.numbers is None:
            self.numbers = self._made(self.source.read_below() if self.source is not None else None).detach()
        return self.numbers

    def derived(self, made_by: Callable[[Tensor], Tensor], changed: dict[str, Any]) -> _State:
        """Other logits, that something makes of these."""
        parts = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias, **changed}
        hidden, weight, bias = parts.pop("hidden"), parts.pop("weight"), parts.pop("bias")
        has_graph = parts.pop("has_graph", self.has_graph) and self.has_graph and _needs_graph(hidden, weight, bias)
        if not has_graph:
            hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach() if bias is not None else None
        new = dataclasses.replace(
            self, hidden=hidden, weight=weight, bias=bias, has_graph=has_graph, source=self, made_by=made_by,
            whole=None, version=0, numbers=None, **parts,
        )  # fmt: skip
        if self.family.is_computed:
            new.compute()
        return new


def _needs_graph(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


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
            family=_Family(readers),
            hidden=hidden,
            weight=weight,
            bias=bias,
            autocast=Autocast.now(hidden),
            has_graph=_needs_graph(hidden, weight, bias),
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
        if func in _GETTERS or name in _ASKED or (func == _NODE and _is_asked_by_a_wrapper()):
            args, kwargs = tree_map(_whole_if_there, (args, kwargs))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(_adopted, (args, kwargs))
        first = args[0] if args else kwargs.get("input")
        is_exposing = name in _EXPOSING or func in _EXPOSING_GETTERS
        if isinstance(first, DeferredLogits) and first.state.is_as_made and not is_exposing:
            further = _further(func, name, first, args, kwargs)
            if further is not None:
                return further
        for logits in (item for item in tree_leaves((args, kwargs)) if isinstance(item, DeferredLogits)):
            family = logits.state.family
            if family.is_chunked and name in _GRADIENTS:
                raise UnsupportedError(
                    f"chunked_loss=True: `{name}` asks for the gradient of logits whose loss was computed in chunks, "
                    "which has none: ask for it before the loss is computed, or leave chunked_loss out"
                )
            family.readers.note(_name_of(func))
            family.is_exposed |= is_exposing
            family.compute()
        args, kwargs = tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch takes its own for a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read below autograd, which knows of the logits by their own node.

        Raises:
            UnsupportedError: They would be written there, which nothing else would see.
        """
        if func._schema.is_mutable:
            raise UnsupportedError(
                f"chunked_loss=True: {func} writes into logits, or beside them, out of torch's sight (in an "
                "autograd.Function, say): leave chunked_loss out, or copy them first"
            )
        args, kwargs = tree_map(_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_asked_by_a_wrapper() -> bool:
    """Whether DDP looks at the node of what a model returns, on which it hooks nothing."""
    return (sys._getframe(2).f_globals.get("__name__") or "").startswith("torch.nn.parallel.")


def _name_of(func: Any) -> str:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", "__get__"))
    return str(getattr(func, "__name__", func))


def _whole(item: Any) -> Any:
    return item.state.compute() if isinstance(item, DeferredLogits) else item


def _whole_if_there(item: Any) -> Any:
    return item.state.whole if isinstance(item, DeferredLogits) and item.state.whole is not None else item


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
    item.state.family.readers.note("torch.autograd.Function")
    return item.state.read_below()


class _Deferred(torch.autograd.Function):
    """The logits' place in the graph, for what reads them below autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, state: _State) -> DeferredLogits:
        del hidden, weight, bias
        ctx.state = state
        return DeferredLogits(state)

    @staticmethod
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # which is what create_graph means here
            raise UnsupportedError(
                "chunked_loss=True: logits that an autograd.Function reads have no second derivative: call backward "
                "without create_graph, or leave chunked_loss out"
            )
        state: _State = ctx.state
        state.check()
        leaves = [
            tensor.detach().requires_grad_(needs) if tensor is not None else None
            for tensor, needs in zip((state.hidden, state.weight, state.bias), ctx.needs_input_grad, strict=False)
        ]
        hidden, weight, bias = leaves
        assert hidden is not None
        assert weight is not None
        with torch.enable_grad(), _kept():
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


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Inside, what is saved stays as it is, whoever's hooks are on."""
    torch._C._autograd._push_saved_tensors_default_hooks(_same, _same)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


# ---- what is put off further


def _further(func: Any, name: str, logits: DeferredLogits, args: Any, kwargs: Any) -> Any:
    """The result of a function of logits that are not computed for it; None for any other."""
    if torch.is_inference_mode_enabled():  # what is made in it has no version counter
        return None
    if func is F.cross_entropy:
        if logits.state.family.readers.is_region() and logits.state.is_there:  # backward gives the region a tensor
            return None
        return _cross_entropy(logits.state, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    find = _FINDERS.get(name)
    if find is None or "out" in kwargs:
        return None
    operands = args[1:] if args else ()
    others = {key: item for key, item in kwargs.items() if key != "input"}
    if any(isinstance(item, DeferredLogits) for item in tree_leaves((operands, others))):
        return None
    operands, others = tree_map(_copied_operand, (operands, others))
    try:
        changed = find(logits.state, *operands, **others)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        IndexError,
        ZeroDivisionError,
    ):  # the function itself says what is wrong
        return None
    if changed is None:
        return None

    def made_by(whole: Tensor) -> Tensor:
        made: Tensor = func(whole, *operands, **others)
        return made

    return _made(logits.state.derived(made_by, changed))


def _copied_operand(item: Any) -> Any:
    """What a function is given beside logits, as it is now: the program may write it before they are computed."""
    return item.clone() if isinstance(item, Tensor) and not item.requires_grad else item


_Changed = dict[str, Any] | None


def _as_is(state: _State, *, memory_format: Any = None) -> _Changed:
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
    if len(state.shape) != 3 or {dim0, dim1} not in ({1, 2}, {1, -1}, {-2, 2}, {-2, -1}):
        return None
    return {"is_second": not state.is_second}


def _permuted(state: _State, *dims: Any) -> _Changed:
    dims = tuple(dims[0] if isinstance(dims[0], (tuple, list)) else dims)
    if len(state.shape) != 3 or not all(-3 <= dim < 3 for dim in dims) or [dim % 3 for dim in dims] != [0, 2, 1]:
        return None
    return {"is_second": not state.is_second}


def _cast(state: _State, dtype: torch.dtype | None) -> _Changed:
    if dtype is None or dtype is state.dtype:
        return _as_is(state)
    if not dtype.is_floating_point:
        return None
    return {"changes": (*state.changes, Cast(dtype))}


def _to(state: _State, *args: Any, **kwargs: Any) -> _Changed:
    if "copy" in kwargs or len(args) > 2:
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
    "clone": _as_is,
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
    kind = state.hidden.device.type
    is_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if weight is not None and weight.dtype is not state.dtype and not is_autocast:
        return None
    if not 0 <= label_smoothing <= 1 or target.device != state.hidden.device:
        return None
    dtype = torch.promote_types(state.dtype, torch.float32) if is_autocast else state.dtype
    changes = state.changes
    while changes and changes[-1] == Cast(torch.float32):  # what a loss does with them itself
        changes = changes[:-1]
    state.family.readers.num_chunked += 1
    state.family.is_chunked = True
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
