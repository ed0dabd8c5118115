"""Lets fake tensors of integers have values, so that programs that look at them go the way that they go in training.

A padding mask without padding, and positions that count up by one, make an attention without a mask; what is packed
makes one that grows with the square of the length. Fake tensors alone cannot say which it is.

Known is what was computed from nothing, or from what is known: counts, ones, comparisons of these. What a program draws
at random, or leaves uninitialised (the contents of inputs that are given as shapes), is not.

Note [transformers asks for fakes]: models of transformers take fake tensors for those of a compiler, and then do not
look at them. While a step is recorded, those whose values are known are not fake to them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_offload.accelerators import HOST

MOST_ELEMENTS = 1 << 22
"""Of a tensor whose values are known: those of ids, positions and padding, not of masks of all pairs."""

_ATTRIBUTE = "_lightning_offload_known"
_aten: Any = torch.ops.aten
_BY_SHAPE = frozenset(
    (_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full)
)
"""What these give does not depend on the values of the tensor that they are given."""
_UNINITIALISED = frozenset(
    (
        _aten.empty, _aten.empty_strided, _aten.empty_like, _aten.empty_permuted, _aten.new_empty,
        _aten.new_empty_strided,
    )
)  # fmt: skip


def value_of(tensor: Tensor) -> Tensor | None:
    """What a tensor holds, as a tensor that is not fake; None where that is not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    known = getattr(tensor, _ATTRIBUTE, None)
    return known[0] if known is not None and known[1] == _version(tensor) else None


def tell(tensor: Tensor, value: Tensor | None) -> None:
    """Let a fake tensor have values, if they are known and few."""
    if value is not None and isinstance(tensor, FakeTensor) and _may_be_known(tensor):
        setattr(tensor, _ATTRIBUTE, (value, _version(tensor)))


class BesideFakes(TorchDispatchMode):
    """A mode to be entered inside of a fake mode, and outside of what records."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        return True


class KnownValues(BesideFakes):
    """Computes values beside fake tensors."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            value = value_of(args[0])
            if value is not None:
                with unset_fake_temporarily():
                    return value.item()
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else (out,)
        if all(isinstance(item, FakeTensor) and _may_be_known(item) for item in made) and _is_function(func):
            for item, value in zip(made, _computed(func, args, kwargs or {}), strict=False):
                tell(item, value)
        return out


@contextlib.contextmanager
def seen_by_transformers() -> Iterator[None]:
    """Inside, transformers looks at fake tensors whose values are known: Note [transformers asks for fakes]."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    plain = getattr(module, "is_fake_tensor", None)
    if plain is None:
        yield
        return
    module.is_fake_tensor = lambda item: plain(item) and value_of(item) is None
    try:
        yield
    finally:
        module.is_fake_tensor = plain


def _may_be_known(tensor: Tensor) -> bool:
    is_number = not (tensor.is_floating_point() or tensor.is_complex())
    return is_number and tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS


def _is_function(func: Any) -> bool:
    """Whether an op's result is that of its arguments alone."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return not is_random and not func._schema.is_mutable and func.overloadpacket not in _UNINITIALISED


def _computed(func: Any, args: Any, kwargs: Any) -> Sequence[Tensor]:
    """What an op makes of what is known; nothing where something is not."""
    leaves, spec = tree_flatten((args, kwargs))
    values: list[Any] = []
    with unset_fake_temporarily():
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                values.append(leaf)
                continue
            value = value_of(leaf)
            if value is None and func.overloadpacket in _BY_SHAPE:
                value = torch.empty(leaf.shape, dtype=leaf.dtype)
            if value is None or value.numel() > MOST_ELEMENTS or value.device.type != HOST.type:
                return ()
            values.append(value)
        args, kwargs = tree_unflatten(values, spec)
        out = func(*args, **kwargs)
        return out if isinstance(out, (tuple, list)) else (out,)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
