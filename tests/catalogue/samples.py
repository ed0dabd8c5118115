"""The entries: each is an op, a custom function or a module of torch's own test catalogues, in one dtype.

torch tests itself on them: `op_db`, `module_db`, `autograd_function_db` and `custom_op_db` in `torch.testing`. What
they hold moves with torch's version, and so does what is tested here.

A sample is built by `Sample.build`, which makes its parameters and a function that runs one forward. Inputs that
require a gradient become parameters; the op gets copies of them, made in the step, which lie in memory as the
catalogue had them, so that the inputs of the op itself leave the device or are recomputed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.utils._pytree import tree_map_only

from tests.shares import is_all

# torch's test utilities, once imported, forbid other tests to set flags of torch.backends.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
assert not torch.backends.flags_frozen()

SEED = 20
NUM_FIRST = 8
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)

Forward = Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One way to call an op or a module.

    Attributes:
        build: Makes, from the global generator, a module that holds what is trained and the function that runs one
            forward on it, whose result is a tree with tensors in it.
        limit: Why it may differ from plain PyTorch in the last bit: a limit in docs/limits.md, or something that
            differs between runs of plain PyTorch itself; "" where it may not.
    """

    build: Callable[[], tuple[nn.Module, Forward]]
    limit: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An op, a function or a module in one dtype.

    Attributes:
        family: The op, in place or not, the function or the module.
        name: What the tests call it.
        samples: Makes its samples.
    """

    family: str
    name: str
    samples: Callable[[], Iterator[Sample]]

    def __str__(self) -> str:
        return self.name


class _Held(nn.Module):
    """Holds the tensors that an op is given and that require a gradient."""

    def __init__(self, leaves: list[Tensor]) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([nn.Parameter(leaf) for leaf in leaves])


def share_of(entries: list[Entry]) -> list[Entry]:
    """The entries of this run: all of them, or one of each op, function and module, chosen by its name."""
    if is_all():
        return entries
    of_one: dict[str, list[Entry]] = {}
    for entry in entries:
        of_one.setdefault(entry.family, []).append(entry)
    return [found[_number(name) % len(found)] for name, found in of_one.items()]


def samples_of(entry: Entry) -> list[Sample]:
    """The samples of this run: all of them, or one of the first few, chosen by the entry's name."""
    torch.default_generator.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own catalogues
        samples = list(itertools.islice(entry.samples(), None if is_all() else NUM_FIRST))
    return samples if is_all() or not samples else [samples[_number(entry.name) % len(samples)]]


def policies_of(entry: Entry) -> tuple[str, ...]:
    """The policies of this run: both, or for one in two entries that alone which calls the op again."""
    return ("all-recompute",) if not is_all() and _number(entry.name) % 2 else ("all-swap", "all-recompute")


def _number(name: str) -> int:
    """A number that is the same in every process and for ever."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _limit_of(name: str, named: dict[str, Any]) -> str:
    is_smoothed = bool(named.get("label_smoothing")) and named.get("weight") is not None
    if name.endswith(("cross_entropy", "CrossEntropyLoss")) and is_smoothed:  # linear_cross_entropy calls the former
        return "under a mode torch sums the weights of smoothed labels in another order"
    if name == "linalg.lstsq" and named.get("driver") in (None, "gelsy"):
        return "torch gives gelsy a vector of pivots that it never filled: the bits depend on what lay there before"
    return ""


# ---- ops and functions


@functools.cache
def op_entries() -> list[Entry]:
    """The differentiable ops of `op_db`, and their in-place variants."""
    return [*_entries(op_db), *_entries(op_db, is_inplace=True)]


@functools.cache
def function_entries() -> list[Entry]:
    """Functions with a backward of their own, and custom ops."""
    return [*_entries(autograd_function_db), *_entries(custom_op_db)]


def _entries(infos: list[Any], *, is_inplace: bool = False) -> list[Entry]:
    return [
        Entry(
            _name(info),
            f"{_name(info)}{'_' * is_inplace}-{_dtype_name(dtype)}",
            functools.partial(_op_samples, info, dtype, is_inplace),
        )
        for info in infos
        if info.supports_autograd and (info.get_inplace() is not None or not is_inplace)
        for dtype in DTYPES
        if dtype in info.supported_backward_dtypes("cpu") and dtype in info.supported_dtypes("cpu")
    ]


def _name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _op_samples(info: Any, dtype: torch.dtype, is_inplace: bool) -> Iterator[Sample]:
    op = info.get_inplace() if is_inplace else info.get_op()
    for sample in info.sample_inputs_func(info, "cpu", dtype, True):  # not sample_inputs, which reads all the stack
        if is_inplace and (sample.broadcasts_input or not _is_trained(sample.input)):
            continue
        yield Sample(functools.partial(_build_op, op, sample), _limit_of(info.name, sample.kwargs))


def _is_trained(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad


def _build_op(op: Any, sample: Any) -> tuple[nn.Module, Forward]:
    return _built(op, (sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad)


def _built(
    op: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], process: Callable[[Any], Any]
) -> tuple[nn.Module, Forward]:
    leaves: list[Tensor] = []
    again: list[Callable[[Tensor], Tensor]] = []

    def hold(tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            return tensor
        leaf, remake = _taken_apart(tensor)
        leaves.append(leaf)
        again.append(remake)
        return _Slot(len(leaves) - 1)

    args, kwargs = tree_map_only(Tensor, hold, (given, named))
    held = _Held(leaves)

    def forward() -> Any:
        def fill(slot: _Slot) -> Tensor:
            return again[slot.index](held.leaves[slot.index])

        filled, filled_by_name = tree_map_only(_Slot, fill, (args, kwargs))
        return process(op(*filled, **filled_by_name))

    return held, forward


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    index: int


def _taken_apart(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The memory of a tensor, as a leaf, and how to have the tensor again from it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.detach().clone(), Tensor.clone
    plain = tensor.detach()
    is_conj, is_neg = plain.is_conj(), plain.is_neg()
    plain = plain.conj() if is_conj else plain
    plain = torch._neg_view(plain) if is_neg else plain
    size, stride = plain.size(), plain.stride()
    clone, offset = plain.clone(), 0
    if clone.stride() != stride or plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
        num_elements = plain.untyped_storage().nbytes() // plain.element_size()
        clone, offset = plain.as_strided((num_elements,), (1,), 0).clone(), int(plain.storage_offset())

    def again(leaf: Tensor) -> Tensor:
        made = leaf.clone()
        if made.stride() != stride or made.size() != size:
            made = made.as_strided(size, stride, offset)
        made = made.conj() if is_conj else made
        return torch._neg_view(made) if is_neg else made

    return clone, again


# ---- modules


def module_entries() -> list[Entry]:
    """The modules of `module_db`, as they train and as they evaluate where that differs."""
    return [
        Entry(
            f"{info.name}{'' if is_training else '.eval'}",
            f"{info.name}{'' if is_training else '.eval'}-{_dtype_name(dtype)}",
            functools.partial(_module_samples, info, dtype, is_training),
        )
        for info in module_db
        for is_training in ((True, False) if info.train_and_eval_differ else (True,))
        for dtype in DTYPES
        if dtype in info.supported_dtypes("cpu")
    ]


def _module_samples(info: Any, dtype: torch.dtype, is_training: bool) -> Iterator[Sample]:
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=is_training)
    for item in inputs:
        if item.forward_input is not None:
            limit = _limit_of(info.name, item.constructor_input.kwargs)
            yield Sample(functools.partial(_build_module, info, item, dtype, is_training), limit)


def _build_module(info: Any, item: Any, dtype: torch.dtype, is_training: bool) -> tuple[nn.Module, Forward]:
    constructor, given = item.constructor_input, item.forward_input
    module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype).train(is_training)
    held, forward = _built(module, tuple(given.args), dict(given.kwargs), lambda out: out)
    held.add_module("module", module)
    return held, forward
