"""What ops write and whether they may be replayed; what a call read and made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_offload.tensors.op_facts import (
    OpFacts,
    detached,
    effects,
    facts_of,
    is_at_hand,
    is_plain,
    tensors_in,
)

aten = torch.ops.aten


def positions(items: Any, among: list[Tensor]) -> list[int]:
    """Which of some tensors these are, by storage; -1 for others."""
    keys = [t.untyped_storage()._cdata for t in among]
    return [keys.index(k) if (k := t.untyped_storage()._cdata) in keys else -1 for t in items]


def test_pure_op_writes_nothing() -> None:
    """An ordinary op makes a fresh result and may be replayed."""
    facts = facts_of(aten.add.Tensor)
    assert facts == OpFacts("aten.add.Tensor", True, True, False, (), False, (), may_multiply=False)
    assert not facts.mutates
    assert facts_of(aten.add.Tensor) is facts


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "written"),
    [
        (aten.add_.Tensor, (0, 1), {}, [0]),
        (aten.add.out, (0, 1), {"out": 2}, [2]),
        (aten.copy_.default, (0, 1), {}, [0]),
        (aten.relu_.default, (0,), {}, [0]),
        (aten._foreach_add_.Scalar, ([0, 1], 1.0), {}, [0, 1]),
        (aten._foreach_addcmul_.Scalar, ([0], [1], [2]), {}, [0]),
        (aten.native_dropout.default, (0, 0.5, True), {}, []),
        (aten.topk.values, (0, 1), {"values": 1, "indices": 2}, [1, 2]),
        (aten.index_put_.default, (0, [2], 1), {}, [0]),
    ],
    ids=lambda item: str(item) if isinstance(item, torch._ops.OpOverload) else "",
)
def test_declared_writes(op: Any, args: Any, kwargs: Any, written: list[int]) -> None:
    """In-place, out= and foreach ops write exactly the arguments that their schemas say."""
    tensors = [torch.ones(2), torch.ones(2), torch.ones(2)]

    def fill(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)(fill(part) for part in item)
        return tensors[item] if isinstance(item, int) and not isinstance(item, bool) else item

    found = facts_of(op).written(fill(args), {name: fill(item) for name, item in kwargs.items()})
    assert positions(found, tensors) == written
    assert facts_of(op).mutates == bool(written)


@pytest.mark.parametrize("op", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_running_statistics_in_training_alone(op: Any, training: bool) -> None:
    """In training it writes them behind its schema, and is replayed without them; in eval it reads them as they are."""
    x, weight, bias, mean, variance = (torch.ones(3) for _ in range(5))
    args = (x, weight, bias, mean, variance, training, 0.1, 1e-5)
    facts = facts_of(op)
    assert positions(facts.written(args, {}), [mean, variance]) == ([0, 1] if training else [])
    replayed, recorded = facts.replayed_args(args), facts.recorded_args(args)
    assert replayed == ((x, weight, bias, None, None, *args[5:]) if training else args)
    did = effects(facts, args, {}, (torch.ones(3), torch.ones(0)))
    assert [any(tensor is read for read in did.read) for tensor in (mean, variance)] == 2 * [not training]
    assert (*recorded[:3], *recorded[5:]) == (*args[:3], *args[5:])
    if training:
        assert recorded[3:5] == (None, None)
    else:
        mean.zero_(), variance.zero_()
        assert torch.equal(recorded[3], torch.ones(3))
        assert torch.equal(recorded[4], torch.ones(3))
    assert facts.replayable == (op is aten.native_batch_norm.default)  # the other one needs its statistics


def test_batch_norm_without_running_statistics_writes_nothing() -> None:
    """Statistics that are not tracked are not written."""
    x = torch.ones(4, 3)
    assert (
        list(facts_of(aten.native_batch_norm.default).written((x, None, None, None, None, True, 0.1, 1e-5), {})) == []
    )
    facts = facts_of(aten._native_batch_norm_legit.no_stats)
    assert list(facts.written((x, None, None, True, 0.1, 1e-5), {})) == []
    assert facts.recorded_args((x, None, None, True, 0.1, 1e-5)) == (x, None, None, True, 0.1, 1e-5)


@pytest.mark.parametrize(
    ("op", "first"),
    [
        (aten.batch_norm_gather_stats.default, 3),
        (aten.batch_norm_gather_stats_with_counts.default, 3),
        (aten.batch_norm_update_stats.default, 1),
    ],
    ids=str,
)
def test_synchronised_batch_norm_writes_its_statistics(op: Any, first: int) -> None:
    """Its parts update them behind their schemas, where there are any, and none of them is replayed."""
    args = [torch.ones(3) for _ in op._schema.arguments]
    facts = facts_of(op)
    assert positions(facts.written(tuple(args), {}), args) == [first, first + 1]
    assert not facts.replayable
    args[first] = args[first + 1] = None
    assert list(facts.written(tuple(args), {})) == []


@pytest.mark.parametrize("name", ["native_batch_norm.out", "_native_batch_norm_legit.no_stats_out"])
def test_batch_norm_out_writes_its_outputs(name: str) -> None:
    """The out= variants write their out arguments, as any out= op."""
    base, overload = name.split(".")
    op = getattr(getattr(aten, base), overload)
    statistics = [] if "no_stats" in name else [None, None]
    args = (torch.ones(4, 3), None, None, *statistics, True, 0.1, 1e-5)
    outs = {a.name: torch.ones(3) for a in op._schema.arguments if a.is_out}
    assert len(outs) == 3
    assert positions(facts_of(op).written(args, outs), list(outs.values())) == [0, 1, 2]


def test_running_statistics_of_the_functional_variant_are_results() -> None:
    """The variant that returns new statistics writes nothing."""
    assert not facts_of(aten._native_batch_norm_legit_functional.default).mutates


def test_op_of_another_namespace_writes_all_its_arguments() -> None:
    """Schemas outside aten are not believed: everything may be written, nothing is replayed."""
    with torch.library._scoped_library("offload_facts", "FRAGMENT") as library:
        library.define("innocent(Tensor a, Tensor[] b, *, Tensor? c=None) -> Tensor")
        facts = facts_of(torch.ops.offload_facts.innocent.default)
    tensors = [torch.ones(1) for _ in range(4)]
    found = facts.written((tensors[0], [tensors[1], tensors[2]]), {"c": tensors[3]})
    assert positions(found, tensors) == [0, 1, 2, 3]
    assert facts.mutates
    assert not facts.may_replay("cpu", ())
    assert not facts.may_replay("cuda", ())


def test_collective_writes_all_and_never_replays() -> None:
    """The all-reduce that declares no write is an op of another namespace."""
    facts = facts_of(torch.ops._c10d_functional.all_reduce.default)
    assert facts.writes_all
    assert not facts.replayable


def test_higher_order_operator_writes_all_and_never_replays() -> None:
    """Nothing is assumed of control flow and the like."""
    facts = facts_of(torch.ops.higher_order.cond)
    assert facts.writes_all
    assert not facts.replayable
    assert facts.name


def test_flex_attention_writes_nothing_and_never_replays() -> None:
    """Forward and backward: torch refuses functions that write."""
    for func in (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward):
        facts = facts_of(func)
        assert not facts.writes_all
        assert not facts.mutates
        assert not facts.replayable
        assert not facts.may_replay("cuda", ())


def test_fake_tensors_are_plain_where_the_step_is_fake() -> None:
    """Elsewhere torch traces by them while a program runs: they have no memory."""
    with FakeTensorMode():
        fake = torch.ones(2)
        assert is_plain(fake)
    assert not is_plain(fake)


def test_every_op_with_a_generator_is_random() -> None:
    """Each aten op that takes a generator has its state recorded."""
    missed = [
        str(op)
        for name in dir(aten)
        for overload in getattr(getattr(aten, name), "overloads", list)()
        if "Generator" in str((op := getattr(getattr(aten, name), overload))._schema) and not facts_of(op).is_random
    ]
    assert missed == []


def test_random_ops_replay(subtests: pytest.Subtests) -> None:
    """Random ops may be replayed, with the generator's state of the first time."""
    for op in [
        aten.rand.default,
        aten.bernoulli_.float,
        aten.native_dropout.default,
        aten.randperm.default,
        aten.normal_.default,
    ]:
        with subtests.test(op=op):
            assert facts_of(op).is_random
            assert facts_of(op).replayable


def test_ops_that_never_replay(subtests: pytest.Subtests) -> None:
    """Undefined contents, hidden state and side effects are not replayed."""
    for op in [
        aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
        aten.set_.source_Storage, aten.resize_.default, aten._local_scalar_dense.default, aten.record_stream.default,
        aten._cudnn_rnn.default, aten._assert_async.default, aten.to_sparse.default, aten.batch_norm_stats.default,
    ]:  # fmt: skip
        with subtests.test(op=op):
            assert not facts_of(op).may_replay("cpu", ())
            assert not facts_of(op).may_replay("cuda", ())


@pytest.mark.parametrize(
    "op", [aten.index_add.default, aten.scatter_add_.default, aten._embedding_bag.default], ids=str
)
def test_atomic_kernels_replay_on_cpu_alone(op: Any) -> None:
    """Kernels that add in any order on CUDA are replayed on a CPU only."""
    assert facts_of(op).may_replay("cpu", ())
    assert not facts_of(op).may_replay("cuda", ())


def test_backward_kernels_that_sum_replay_on_cpu_alone(subtests: pytest.Subtests) -> None:
    """On CUDA backward ops are replayed only if each result depends on its own elements alone."""
    for op in [
        aten.convolution_backward.default, aten._scaled_dot_product_flash_attention_backward.default,
        aten.embedding_dense_backward.default, aten.max_pool2d_with_indices_backward.default, aten.cumsum.default,
    ]:  # fmt: skip
        with subtests.test(op=op):
            assert not facts_of(op).may_replay("cuda", ())
            for sure in (
                aten.gelu_backward.default,
                aten._softmax_backward_data.default,
                aten.threshold_backward.default,
            ):
                assert facts_of(sure).may_replay("cuda", ())


def test_convolutions_replay_on_cuda_unless_their_algorithm_may_change() -> None:
    """Not where cuDNN tries algorithms in each thread, nor transposed ones, which sum in any order."""
    facts = facts_of(aten.convolution.default)
    plain, transposed = (None,) * 6 + (False,), (None,) * 6 + (True,)
    assert facts.may_replay("cuda", plain)
    assert not facts.may_replay("cuda", transposed)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert not facts.may_replay("cuda", plain)
        assert facts.may_replay("cpu", plain)


def test_tensors_on_other_devices_are_not_at_hand() -> None:
    """A batch on the host may be filled anew before backward; a number cannot."""
    device = torch.device("cpu")
    assert is_at_hand(torch.zeros(3), device)
    assert not is_at_hand(torch.zeros(3, device="meta"), device)
    assert is_at_hand(torch.zeros((), device="meta"), device)


def test_tensors_are_found_in_order() -> None:
    """Lists, tuples and dicts are searched depth first, in order; other objects are passed over."""
    a, b, c, d = (torch.ones(1) for _ in range(4))
    assert list(tensors_in((a, [b, (None, 3, c)], {"x": d, "y": "z"}))) == [a, b, c, d]


def test_effects_list_fresh_results_before_writes() -> None:
    """Fresh storages come first, then those written in place, each once; then the number of fresh ones."""
    x, out, index = torch.ones(3), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    facts = facts_of(aten.topk.values)
    read, made, fresh, *_ = effects(facts, (x, 2), {"values": out, "indices": index}, (out, index))
    assert positions(read, [x, out, index]) == [0, 1, 2]
    assert positions(made, [out, index]) == [0, 1]
    assert fresh == 0
    x2, mean, variance = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    args = (x2, None, None, mean, variance, True, 0.1, 1e-5)
    result = aten.native_batch_norm.default(*args)
    read, made, fresh, *_ = effects(facts_of(aten.native_batch_norm.default), args, {}, result)
    assert positions(read, [x2, mean, variance]) == [0]
    assert positions(made, [*result, mean, variance]) == [0, 1, 2, 3, 4]
    assert fresh == 3


def test_effects_of_a_view_make_nothing() -> None:
    """A view is no new value; several views of one written storage are one value."""
    x = torch.ones(4, 4)
    read, made, fresh, *_ = effects(facts_of(aten.t.default), (x,), {}, x.t())
    assert positions(read, [x]) == [0]
    assert (made, fresh) == ([], 0)
    parts = list(x.split(2))
    read, made, fresh, *_ = effects(facts_of(aten._foreach_add_.Scalar), (parts, 1.0), {}, None)
    assert len(read) == 2
    assert positions(made, [x]) == [0]
    assert fresh == 0


@pytest.mark.parametrize("as_sequence", [False, True])
def test_effects_are_the_same_for_a_result_and_a_list_of_it(as_sequence: bool) -> None:
    """The short way for one result finds what the long one does: a fresh result, an alias, an argument itself."""
    x, y = torch.ones(3, 2), torch.ones(3, 2)
    for func, args, out, num_fresh in (
        (aten.add.Tensor, (x, y), x + y, 1),
        (aten.t.default, (x,), x.t(), 0),
        (aten.select.int, (y, 0, 1), y[1], 0),
        (aten.contiguous.default, (x,), x, 0),
        (aten.cat.default, ([x, y],), torch.cat([x, y]), 1),
        (aten.stack.default, ([x, y],), y[0], 0),  # as if a kernel gave a part of an argument
        (aten.ones.default, ([2],), torch.ones(2), 1),
    ):
        did = effects(facts_of(func), args, {}, [out] if as_sequence else out)
        assert did.num_fresh == num_fresh
        assert [made is out for made in did.made] == [True] * num_fresh
        assert [id(read) for read in did.read] == [id(read) for read in tensors_in(args)]


class _Seen(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_detaching_shares_memory_and_versions_and_passes_a_lone_mode() -> None:
    """What is detached is what ``detach`` gives; a mode beside the one that is ours sees it as it sees any op."""
    x = (torch.ones(3, requires_grad=True) * 2.0)[1:]
    with _Seen() as lone:
        alone = detached(x)
    assert lone.names == []
    with _Seen() as outer, _Seen() as inner:
        beside = detached(x)
    assert (outer.names, inner.names) == (["aten.detach.default"], ["aten.detach.default"])
    for found in (alone, beside, detached(x)):
        assert found.untyped_storage() is x.untyped_storage()
        assert (found.shape, found.stride(), found.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
        assert found.grad_fn is None
        assert not found.requires_grad
        assert found._version == x._version
    with torch.no_grad():
        x.add_(1.0)
    assert alone._version == x._version == detached(x)._version


def test_effects_leave_sparse_results_out() -> None:
    """What is not one strided block is read, never made."""
    x = torch.eye(3)
    sparse = x.to_sparse()
    assert not is_plain(sparse)
    _, made, fresh, *_ = effects(facts_of(aten.add.Tensor), (x,), {}, sparse)
    assert (made, fresh) == ([], 0)


@pytest.mark.filterwarnings("ignore:.*(in beta state|in prototype stage):UserWarning")
def test_plain_tensors() -> None:
    """Tensors, parameters and simple subclasses are plain; sparse, nested, quantised and wrapping ones are not."""

    class Simple(Tensor):
        pass

    assert is_plain(torch.ones(2))
    assert is_plain(torch.nn.Parameter(torch.ones(2)))
    assert is_plain(torch.ones(2).as_subclass(Simple))
    assert not is_plain(torch.eye(2).to_sparse())
    assert not is_plain(torch.eye(2).to_sparse_csr())
    assert not is_plain(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
    assert not is_plain(torch.nested.nested_tensor([torch.ones(2)]))
    assert not is_plain(torch.nn.UninitializedParameter())
    assert not is_plain(torch.nn.UninitializedBuffer())


@pytest.mark.parametrize(
    ("op", "more"),
    [
        (aten.bernoulli_.float, (0.5,)), (aten.uniform_.default, ()), (aten.normal_.default, ()),
        (aten.exponential_.default, ()), (aten.log_normal_.default, ()), (aten.geometric_.default, (0.5,)),
        (aten.cauchy_.default, ()), (aten.random_.default, ()), (aten.random_.to, (9,)),
        (getattr(aten.random_, "from"), (1, 9)),
        (aten.zero_.default, ()), (aten.fill_.Scalar, (2.0,)), (aten.fill_.Tensor, (torch.tensor(3.0),)),
        (aten.copy_.default, (torch.arange(12.0).view(3, 4),)),
    ],
    ids=str,
)  # fmt: skip
def test_overwriting_ops_do_not_read_what_they_write(op: Any, more: tuple[Any, ...]) -> None:
    """What they leave does not depend on what was there, so it counts as made, not as read."""
    facts = facts_of(op)
    assert facts.overwrites
    results = []
    for content in (0.0, float("nan")):
        tensor = torch.full((3, 4), content)
        torch.manual_seed(0)
        out = op(tensor, *more)
        assert facts.made_anew((tensor, *more)) is tensor
        read, made, num_fresh, *_ = effects(facts, (tensor, *more), {}, out)
        assert (positions(read, [tensor]), positions(made, [tensor]), num_fresh) == ([-1] * len(read), [0], 0)
        results.append(tensor)
    assert torch.equal(*results)


def test_written_parts_of_a_storage_count_as_read() -> None:
    """The rest of the storage is part of the value that a slice or a gap leaves."""
    facts, base = facts_of(aten.bernoulli_.float), torch.zeros(4, 6)
    for part in (base[:2], base[:, ::2], base[1:], base.view(2, 12)[:, :6]):
        assert facts.made_anew((part, 0.5)) is None
        assert positions(effects(facts, (part, 0.5), {}, part)[0], [base]) == [0]
    for whole in (base.t(), base.view(-1), base.unsqueeze(1), base.to(memory_format=torch.contiguous_format)):
        assert facts.made_anew((whole, 0.5)) is not None
    assert facts_of(aten.bernoulli_.Tensor).made_anew((base, base)) is None
    assert facts_of(aten.add_.Tensor).made_anew((base, base)) is None


def test_facts_of_an_op_that_is_defined_anew() -> None:
    """An op that is taken away and defined again under its name, with another schema, has facts of its own."""
    found = []
    for schema in ("_lo_test_op(Tensor(a!) x) -> ()", "_lo_test_op(Tensor x) -> Tensor"):
        library = torch.library.Library("aten", "FRAGMENT")
        library.define(schema)
        found.append(facts_of(torch.ops.aten._lo_test_op.default))
        library._destroy()
    assert [facts.mutates for facts in found] == [True, False]


def test_kernels_whose_threads_meet_are_not_run_again_anywhere() -> None:
    """Two runs may add, or write, to one place in another order."""
    for op in (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten.put_.default):
        facts = facts_of(op)
        assert (facts.replayable, facts.replayable_on_cuda) == (False, False), op
    assert facts_of(aten.index_add.default).replayable
