"""What an op does to its arguments: which it writes, whether it draws random numbers, whether it may be replayed.

Schemas do not declare every write (``c10d.allreduce_`` declares none, ``native_batch_norm`` hides its running
statistics), so an op outside ``aten`` and ``prims`` counts as writing all of its inputs and is never replayed, until
recorded steps have seen that it keeps to its schema: :mod:`.custom_ops`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_offload.tensors import custom_ops
from lightning_offload.tensors.deferred_logits import DeferredLogits

ALL_REDUCE = "c10d.allreduce_"
"""How names of the op begin that sums over the ranks of a process group."""

_NAMESPACES = frozenset({"aten", "prims"})

# Contents undefined (empty), side effects or hidden state (set_, resize_, sync batch norm), outputs that depend
# on more than the arguments (data_ptr-like, sparse layouts; autocast, which is off in replays, in _trilinear), or
# results that alias in undeclared ways.
_DENIED_PREFIXES = (
    "empty",
    "new_empty",
    "_resize",
    "resize",
    "set_",
    "_sync",
    "sparse",
    "_sparse",
    "_nested",
)
_DENIED = frozenset(
    {
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_stats",
        "batch_norm_update_stats", "record_stream", "_local_scalar_dense", "_cudnn_rnn", "miopen_rnn",
        "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "to_sparse", "_to_sparse", "coalesce", "_coalesce",
        "_pin_memory", "_fused_moving_avg_obs_fq_helper", "lift", "lift_fresh", "_assert_async", "_trilinear",
    }
)  # fmt: skip

_IN_ANY_ORDER = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "put", "put_"})
"""Kernels whose threads write, or add with atomics, to one place in any order on a CPU: two runs may differ."""

# Kernels that add with atomics on CUDA: two runs may differ in the last bit.
_ATOMIC_ON_CUDA = frozenset(
    {
        "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce",
        "index_reduce_", "bincount", "histc",
        "_embedding_bag", "_embedding_bag_forward_only", "cumsum", "cumsum_", "median", "kthvalue",
        "grid_sampler_2d", "grid_sampler_3d", "_ctc_loss", "_cudnn_ctc_loss", "cumprod", "cumprod_", "logcumsumexp",
        "_logcumsumexp", "scatter", "scatter_", "index_copy", "index_copy_", "max_unpool2d", "max_unpool3d",
        "nll_loss2d_forward", "nanmedian", "mode", "_unsafe_masked_index_put_accumulate",
        "segment_reduce",
    }
)  # fmt: skip
"""Ops that torch lists as nondeterministic on CUDA (``torch.use_deterministic_algorithms``), and others like them."""

_NO_PRODUCTS = frozenset(
    {
        "_log_softmax", "_safe_softmax", "_softmax", "bernoulli_", "cat", "clone", "copy_", "embedding", "fill_",
        "gather", "index_select", "max_pool2d_with_indices", "mean", "native_batch_norm", "native_dropout",
        "native_group_norm", "native_layer_norm", "normal_", "sum", "uniform_", "zero_",
    }
)  # fmt: skip
"""Kernels in which nothing is multiplied as matrices are, nor convolved, beside those that torch tags as pointwise."""

_SURE_BACKWARDS = (
    "threshold", "gelu", "silu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "softplus", "native_dropout",
    "mish", "hardswish", "hardsigmoid", "_softmax", "_log_softmax", "log_sigmoid", "glu", "mse_loss", "smooth_l1_loss",
)  # fmt: skip
"""Backward ops without sums between threads; the others are not replayed on CUDA."""

CONVOLUTION = "aten.convolution.default"
_TRANSPOSED = 6  # place of that argument

# In-place ops whose result does not depend on what their first argument held. What is drawn on memory fresh from
# ``empty`` (a dropout mask on a CPU) can be made again, though ``empty`` itself cannot.
_OVERWRITING = frozenset(
    {
        "bernoulli_.float", "uniform_.default", "normal_.default", "exponential_.default", "log_normal_.default",
        "geometric_.default", "cauchy_.default", "random_.default", "random_.from", "random_.to", "zero_.default",
        "fill_.Scalar", "fill_.Tensor", "copy_.default",
    }
)  # fmt: skip

# Positions of (running mean, running variance) and of the flag that says they are updated.
_BATCH_NORM = {
    "native_batch_norm": (3, 4, 5),
    "_native_batch_norm_legit": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
}

# Positions of the running statistics that are only read, and of a flag that says they are not; -1 where there is none.
_READS_STATISTICS = {
    **_BATCH_NORM,
    "_native_batch_norm_legit_no_training": (3, 4, -1),
    "_batch_norm_no_update": (3, 4, -1),
    "native_batch_norm_backward": (3, 4, 7),
}

# Positions of the running statistics that synchronised batch norm updates behind the schemas of its parts.
_UPDATES_STATISTICS = {
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
    "batch_norm_update_stats": (1, 2),
}


@dataclasses.dataclass(frozen=True, slots=True)
class OpFacts:
    """What is known of one overload.

    Attributes:
        name: Qualified overload.
        replayable: Whether it may be replayed on a CPU.
        replayable_on_cuda: Whether it may be replayed on CUDA.
        is_random: Whether it draws from a generator.
        writes: Arguments it writes, by position and name; empty for a pure op.
        writes_all: Whether any tensor argument may be written (an op we know nothing of).
        overwrites: Whether its first argument is written without being read.
        is_query: Whether it only asks a tensor something (``prim.device`` under FakeTensorMode) and is no op.
        running_stats: Positions of batch norm's running statistics and its training flag, or ().
        read_stats: Positions of running statistics that are only read, unless the flag at the last one is set; or ().
        may_make_any_size: Whether the first size of what it makes may depend on data.
        may_multiply: Whether it may multiply matrices or convolve, so that the settings for that matter to it.
        custom: What an op outside torch's own namespaces is known by whose calls are watched, or "".
        declared: Of such an op, the arguments that its schema says it writes.
        mutates: Whether running it may change the contents of an argument.
        writes_first_alone: Whether it writes its first argument, and no other.
        is_foreach_write: Whether it writes lists of tensors.
    """

    name: str
    replayable: bool
    replayable_on_cuda: bool
    is_random: bool
    writes: tuple[tuple[int, str], ...]
    writes_all: bool
    running_stats: tuple[int, ...]
    overwrites: bool = False
    is_query: bool = False
    may_make_any_size: bool = False
    may_multiply: bool = True
    read_stats: tuple[int, ...] = ()
    custom: str = ""
    declared: tuple[tuple[int, str], ...] = ()
    mutates: bool = dataclasses.field(init=False)  # asked for at every op
    writes_first_alone: bool = dataclasses.field(init=False)
    is_foreach_write: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        mutates = bool(self.writes) or self.writes_all or bool(self.running_stats)
        object.__setattr__(self, "mutates", mutates)
        is_alone = [position for position, _ in self.writes] == [0] and not (self.writes_all or self.running_stats)
        object.__setattr__(self, "writes_first_alone", is_alone)
        object.__setattr__(self, "is_foreach_write", bool(self.writes) and self.name.startswith("aten._foreach_"))

    def may_replay(self, device_type: str, args: Any) -> bool:
        """Whether replaying a call on this type of device gives the same bits without side effects."""
        if device_type == "cpu":
            return self.replayable
        if self.name == CONVOLUTION:
            # With its benchmark on, cuDNN chooses an algorithm for each thread: perhaps another one in backward's. A
            # transposed convolution is the gradient of another, which cuDNN sums in any order.
            return not torch.backends.cudnn.benchmark and not args[_TRANSPOSED]
        return self.replayable_on_cuda

    def makes_any_size(self, args: Any) -> bool:
        """Whether the first size of what a call makes depends on data: where it picks by a mask, say."""
        if self.name != "aten.index.Tensor":
            return self.may_make_any_size
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])

    def replayed_args(self, args: Any) -> Any:
        """The arguments of a replay: without the running statistics that batch norm updates in training."""
        if not self.running_stats or not args[self.running_stats[-1]]:
            return args
        return tuple(None if i in self.running_stats[:-1] else item for i, item in enumerate(args))

    def recorded_args(self, args: Any) -> Any:
        """The arguments to keep for a replay: with copies of running statistics that are only read.

        They are updated past their version counters, and where ops are not seen nobody notices.
        """
        args = self.replayed_args(args)
        if not self.read_stats or (self.read_stats[-1] >= 0 and args[self.read_stats[-1]]):
            return args
        return tuple(
            item.clone() if i in self.read_stats[:-1] and isinstance(item, Tensor) and is_plain(item) else item
            for i, item in enumerate(args)
        )

    def remakes(self, position: int, num_fresh: int) -> bool:
        """Whether a replay makes a result: not running statistics that were updated, which it leaves out."""
        return not self.running_stats or position < num_fresh

    def made_anew(self, args: Any) -> Tensor | None:
        """The first argument, where a call writes all of its storage without reading any of it."""
        if not self.overwrites or not isinstance(args[0], Tensor) or not is_plain(args[0]):
            return None
        return args[0] if _covers_storage(args[0]) else None

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors among the arguments that a call writes."""
        if self.writes_all:
            yield from tensors_in((args, kwargs))
        yield from _named(self.writes, args, kwargs)
        if self.running_stats:
            *statistics, training = self.running_stats
            if args[training]:
                yield from (args[i] for i in statistics if args[i] is not None)

    def declared_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors among a custom op's arguments that its schema says it writes."""
        return _named(self.declared, args, kwargs)


def _named(which: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, name in which:
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


_CACHE: dict[int, tuple[Any, OpFacts]] = {}  # by identity, since overloads hash slowly; which keeps them alive


def exposed(tensor: Tensor) -> None:
    """Stands for a call that gives a tensor's raw memory away: from then on it may be written unseen."""


_CACHE[id(exposed)] = exposed, OpFacts("python.exposed", False, False, False, (), True, ())


def facts_of(func: Any) -> OpFacts:
    """Facts about an ``OpOverload``, or about a higher-order operator (of which nothing is assumed, but of few)."""
    known = _CACHE.get(id(func))
    if known is None:
        known = _CACHE[id(func)] = func, _inspect(func)
    return known[1]


_WRITING_NOTHING = frozenset(("flex_attention", "flex_attention_backward"))
"""Higher-order operators that torch has no input written by, whatever functions they are given."""
_ONE_OP = {"aten._reshape_alias.default": "aten.view.default"}
"""What ``reshape`` calls: the one where no dispatch mode is on, the other where one is."""


def _inspect(func: Any) -> OpFacts:
    if isinstance(func, torch._ops.OpOverload) and func.namespace == "prim":
        return OpFacts(str(func), False, False, False, (), False, (), is_query=True)
    if not isinstance(func, torch._ops.OpOverload):
        return OpFacts(str(func), False, False, False, (), str(func) not in _WRITING_NOTHING, ())
    if func.namespace not in _NAMESPACES:
        return _inspect_custom(func)
    schema = func._schema
    base = schema.name.split("::")[1]
    writes = _declared_writes(schema, _UPDATES_STATISTICS.get(base, ()))
    denied = base in _DENIED or base.startswith(_DENIED_PREFIXES) or base.endswith("_out")
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_batch_norm = base in _BATCH_NORM and func._overloadname != "no_stats"
    if is_batch_norm and func._overloadname != "default":
        hidden = ((3, "running_mean"), (4, "running_var")) if base == "native_batch_norm" else ()
        return OpFacts(str(func), False, False, is_random, (*hidden, *writes), False, ())
    stats = _BATCH_NORM[base] if is_batch_norm else ()
    denied = denied or base in _IN_ANY_ORDER
    denied = denied or base == "_native_batch_norm_legit"  # needs running statistics, which a replay leaves out
    return OpFacts(
        name=_ONE_OP.get(str(func), str(func)),
        replayable=not denied,
        replayable_on_cuda=not denied and not _is_unsure_on_cuda(base),
        is_random=is_random,
        writes=() if stats else writes,
        writes_all=False,
        running_stats=stats,
        overwrites=f"{base}.{func._overloadname}" in _OVERWRITING,
        may_make_any_size=torch.Tag.dynamic_output_shape in func.tags,
        may_multiply=torch.Tag.pointwise not in func.tags and base not in _NO_PRODUCTS,
        read_stats=_READS_STATISTICS.get(base, ()) if func._overloadname == "default" else (),
    )


def _declared_writes(schema: Any, others: Sequence[int] = ()) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or i in others
    )


def _inspect_custom(func: torch._ops.OpOverload) -> OpFacts:
    """Facts about an op outside torch's own namespaces, as far as its calls were watched."""
    if not custom_ops.may_be_believed(func):
        return OpFacts(str(func), False, False, False, (), True, ())
    identity, declared = custom_ops.identity_of(func), _declared_writes(func._schema)
    standing = custom_ops.standing_of(identity)
    if standing is None or not standing.keeps_to_writes:
        return OpFacts(str(func), False, False, False, (), True, (), custom=identity, declared=declared)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    may_replay = standing.may_replay and not is_random and _is_deterministic(func)
    return OpFacts(
        name=str(func),
        replayable=may_replay,
        replayable_on_cuda=may_replay,
        is_random=False,
        writes=declared,
        writes_all=False,
        running_stats=(),
        may_make_any_size=torch.Tag.dynamic_output_shape in func.tags,
        custom=identity,
        declared=declared,
    )


def _is_deterministic(func: torch._ops.OpOverload) -> bool:
    """Whether an op's author has not tagged it as one whose results differ from run to run."""
    tag = getattr(torch.Tag, "nondeterministic_bitwise", None)
    return tag is None or tag not in func.tags


def _forget_custom() -> None:
    for key, (_, facts) in list(_CACHE.items()):
        if facts.custom:
            del _CACHE[key]


custom_ops.on_change(_forget_custom)


def _is_unsure_on_cuda(base: str) -> bool:
    """Whether an op may give other bits when it is run again on CUDA."""
    if base in _ATOMIC_ON_CUDA:
        return True
    return ("_backward" in base) and not base.removesuffix("_data").startswith(_SURE_BACKWARDS)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in an op's (nested) arguments or results, in order."""
    return iter(_gather(tree, []))


def _gather(tree: Any, found: list[Tensor]) -> list[Tensor]:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            if isinstance(item, Tensor):  # asked for here as well: most are not nested any further
                found.append(item)
            elif isinstance(item, _TREES):
                _gather(item, found)
    elif isinstance(tree, dict) and tree:
        _gather(list(tree.values()), found)
    return found


_TREES = (list, tuple, dict)


class Effects(NamedTuple):
    """What one call read and made, in the order in which a step graph lists it.

    Attributes:
        read: The tensors it read, without one that it makes anew.
        made: One tensor for each storage that it made a value on, those on fresh storages (outputs that share no
            argument's storage) first, then those written in place.
        num_fresh: The number of fresh ones.
        read_from: The storage of each tensor that it read; None where that is not plain.
        made_on: The storage of each tensor that it made.
    """

    read: list[Tensor]
    made: list[Tensor]
    num_fresh: int
    read_from: list[torch.UntypedStorage | None]
    made_on: list[torch.UntypedStorage]


def effects(facts: OpFacts, args: Any, kwargs: Any, out: Any) -> Effects:
    """What one call read and made.

    Args:
        facts: Facts about the op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    given = _gather(args, [])
    if kwargs:
        _gather(kwargs, given)
    given_from = [_storage_of(tensor) for tensor in given]
    if isinstance(out, Tensor) and not facts.mutates:  # nearly all calls
        storage = _storage_of(out)
        if storage is None or storage in given_from:
            return Effects(given, [], 0, given_from, [])
        return Effects(given, [out], 1, given_from, [storage])
    made: list[Tensor] = []
    made_on: list[torch.UntypedStorage] = []
    seen = {storage._cdata for storage in given_from if storage is not None}

    def make(tensors: Any) -> None:
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is not None and storage._cdata not in seen:
                seen.add(storage._cdata)
                made.append(tensor)
                made_on.append(storage)

    make((out,) if isinstance(out, Tensor) else _gather(out, []))
    num_fresh = len(made)
    if not facts.mutates:
        return Effects(given, made, num_fresh, given_from, made_on)
    seen.clear()
    make(facts.written(args, kwargs))
    args_read = facts.replayed_args(args) if facts.made_anew(args) is None else args[1:]
    read = _gather(kwargs, _gather(args_read, []))
    return Effects(read, made, num_fresh, [_storage_of(tensor) for tensor in read], made_on)


def sole_effect(facts: OpFacts, args: Sequence[Any], kwargs: Any, out: Any) -> tuple[list[Tensor], int] | None:
    """What a call made, and how many of those are fresh, where that is told in little time; else None.

    As :func:`effects` tells it: for calls with one plain result that lies on memory of its own, or that is the first
    argument, which they write.
    """
    if not isinstance(out, Tensor) or not is_plain(out):
        return None
    if facts.mutates:
        return ([out], 0) if facts.writes_first_alone and args and out is args[0] else None
    storage = out.untyped_storage()
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            if not is_plain(item) or item.untyped_storage() is storage:
                return None
        elif isinstance(item, _TREES) and not (item and item[0].__class__ is int):
            return None
    return [out], 1


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if is_plain(tensor) else None


def _covers_storage(tensor: Tensor) -> bool:
    """Whether each byte of the storage belongs to one element."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return step * tensor.element_size() == tensor.untyped_storage().nbytes()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one strided block of memory: no sparse, nested, quantised or wrapper-subclass tensor.

    Nor one of the zeros without memory that forward-mode differentiation makes, nor a lazy parameter without a shape,
    nor a fake one in a step that is not: torch traces a part of a program by these while the program runs.
    """
    is_subclass = type(tensor) not in _PLAIN_TYPES
    if is_subclass and torch.nn.parameter.is_lazy(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor():
        return False
    if is_subclass and isinstance(tensor, FakeTensor):
        return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if is_subclass and type(tensor) is DeferredLogits:
        return False  # without memory
    return not (is_subclass and torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor))


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor is made of: itself, or what a wrapper subclass has inside, such as a DTensor its shard."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a mesh of devices may be among them
            yield from parts_of(inner)


def is_leaf(tensor: Tensor) -> bool:
    """``tensor.is_leaf``; False for one that does not tell.

    One of several views that a function returned raises where it is asked, once its base was written in place. A
    program may keep it all the same.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def detached(tensor: Tensor) -> Tensor:
    """What ``tensor.detach()`` gives; past our dispatch mode where that is the only one, which takes longer than it."""
    if type(tensor) in _PLAIN_TYPES and torch._C._len_torch_dispatch_stack() == 1:
        with torch._C._DisableTorchDispatch():
            return tensor.detach()
    return tensor.detach()


_is_batched = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def as_saved(tensor: Tensor) -> tuple[Tensor, bool]:
    """What to hold of a saved tensor, without its graph, and whether it is plain.

    A plain one that belongs to no graph is held itself, as autograd does without hooks: whoever gives it other memory
    by ``.data`` before backward, as sharded parameters get it, has that read.

    The wrappers of ``torch.func`` and of batched gradients have no memory that could be asked for. They meet no
    dispatch mode, but a custom function may save them.
    """
    if _is_batched(tensor):
        with torch._C._DisableTorchDispatch():  # it has no rule for `detach`, which a mode makes of `data`
            return tensor.data, False
    if _is_wrapped(tensor):
        return tensor.detach(), False
    if is_plain(tensor):
        return (tensor if _has_no_graph(tensor) else detached(tensor)), True
    return detached(tensor), False


def _has_no_graph(tensor: Tensor) -> bool:
    may_be_held = tensor.__class__ in _PLAIN_TYPES or is_parameter(tensor)
    return may_be_held and (not tensor.requires_grad or is_leaf(tensor))


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, of whatever class; without the ``isinstance`` of torch, which takes longer."""
    kind = tensor.__class__
    if kind is Tensor:
        return False
    return issubclass(kind, torch.nn.Parameter) or getattr(tensor, "_is_param", False) is True


def plainly_saved(tensor: Tensor) -> Tensor | None:
    """What :func:`as_saved` gives of a plain tensor, in less time and unseen by our mode.

    None of one that may not be plain, and where other modes are on, which would see it.
    """
    if tensor.__class__ not in _PLAIN_TYPES or _is_batched(tensor) or _is_wrapped(tensor):
        return None
    if torch._C._len_torch_dispatch_stack() > 1:
        return None
    if tensor.layout is not _STRIDED or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor():
        return None
    return tensor if _has_no_graph(tensor) else detached(tensor)


def is_at_hand(tensor: Tensor, device: torch.device) -> bool:
    """Whether a replay may read a tensor again: not one on another device, which a loader may fill anew meanwhile."""
    return tensor.device == device or tensor.numel() <= 1


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
