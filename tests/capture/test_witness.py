"""Calls of custom ops are watched: what they do beside what their schemas say shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_offload.capture.witness import Witness, checksum
from lightning_offload.tensors import custom_ops
from lightning_offload.tensors.custom_ops import BELIEVED, Standing
from lightning_offload.tensors.op_facts import facts_of
from tests.extension_ops import HONEST, LIARS, forget_cache, ops


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test is a process of its own."""
    custom_ops.forget()
    forget_cache()
    yield
    custom_ops.forget()
    forget_cache()


def watched(name: str, *args: object, there: tuple[Tensor, ...] = ()) -> Standing:
    """What one call of an op shows."""
    op = getattr(ops, name).default
    witness = Witness(facts_of(op), args, {})
    known = {tensor.untyped_storage()._cdata for tensor in there}
    return witness.judge(op(*args), lambda storage: storage._cdata in known)


def given(*shape: int) -> tuple[Tensor, Tensor]:
    """What most of the ops take."""
    return torch.randn(shape or (5, 7)), torch.randn((shape or (5, 7))[-1])


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 70_001)])
def test_an_honest_op_is_believed(shape: tuple[int, ...]) -> None:
    """Whatever the sizes of what it is given."""
    assert watched(HONEST, *given(*shape)) == BELIEVED


@pytest.mark.parametrize("name", [name for name in LIARS if name != "cached"])
@pytest.mark.parametrize("shape", [(5, 7), (3, 70_001)])
def test_what_an_op_writes_past_its_schema_shows(name: str, shape: tuple[int, ...]) -> None:
    """By a version counter, or by a checksum where no counter tells; the same numbers in another order, too."""
    standing = watched(name, *given(*shape))
    assert not standing.keeps_to_writes
    assert not standing.may_replay
    assert standing.why.startswith(LIARS[name])


def test_memory_that_was_there_is_no_result() -> None:
    """An op that returns what it keeps overwrites what it returned before."""
    x, w = given()
    kept = ops.cached(x, w)
    assert watched("cached", x, w, there=(kept,)).why.startswith(LIARS["cached"])


def test_a_view_of_an_argument_is_no_memory_of_its_own() -> None:
    """It is told by its storage, whatever the schema says."""
    x, _ = given()
    assert watched("half", x, there=(x,)) == BELIEVED


def test_what_a_schema_declares_may_be_written() -> None:
    """That, and nothing else."""
    x, w = given()
    assert watched("into", torch.empty_like(x), x, w) == BELIEVED


def test_an_op_that_draws_is_not_run_again() -> None:
    """A replay would draw other numbers; what it is given is safe."""
    standing = watched("noisy", *given())
    assert standing == Standing(keeps_to_writes=True, may_replay=False, why="it draws random numbers")


def test_tensors_without_contents_show_nothing() -> None:
    """Fake ones, and those of the meta device."""
    x, w = given()
    assert Witness.can_watch((x, [w]), {})
    assert not Witness.can_watch((x, w.to("meta")), {})
    with FakeTensorMode():
        assert not Witness.can_watch((torch.ones(3),), {})


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 4096, 32_768, 40_003, 300_001])
def test_a_checksum_changes_with_each_byte(num_bytes: int) -> None:
    """Anywhere, and where two of them change places."""
    memory = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    before = checksum(memory.untyped_storage())
    assert torch.equal(before, checksum(memory.clone().untyped_storage()))
    for place in sorted({0, num_bytes // 3, num_bytes // 2, num_bytes - 1}):
        other = memory.clone()
        other[place] += 1
        assert not torch.equal(before, checksum(other.untyped_storage())), place
    if num_bytes > 16 and memory[0] != memory[-1]:
        other = memory.clone()
        other[0], other[-1] = memory[-1], memory[0]
        assert not torch.equal(before, checksum(other.untyped_storage()))


def test_a_checksum_of_memory_that_is_not_aligned() -> None:
    """A file that is mapped may begin anywhere."""
    whole = torch.randint(0, 255, (50_001,), dtype=torch.uint8).numpy()
    part = torch.from_numpy(whole[3:])
    before = checksum(part.untyped_storage())
    whole[20_000] += 1
    assert not torch.equal(before, checksum(part.untyped_storage()))


def test_standings_get_worse_and_never_better() -> None:
    """And tell why; what they were at first is no demotion."""
    op = custom_ops.identity_of(ops.gelu.default)
    broken = Standing(keeps_to_writes=False, may_replay=False, why="it changed an argument")
    assert custom_ops.learn({op: BELIEVED})
    assert facts_of(ops.gelu.default).replayable
    assert not custom_ops.learn({op: BELIEVED})
    assert custom_ops.demoted() == []
    assert custom_ops.learn({op: broken})
    assert custom_ops.demoted() == ["offload_tests.gelu.default"]
    assert not custom_ops.learn({op: BELIEVED})
    assert facts_of(ops.gelu.default).writes_all
    assert not facts_of(ops.gelu.default).replayable
    assert custom_ops.not_believed(["offload_tests.gelu.default", "aten.add.Tensor"]) == {
        "offload_tests.gelu.default": "it changed an argument"
    }
    other = custom_ops.identity_of(ops.scales.default)
    assert not custom_ops.learn({other: broken}), "it was not believed before"


def test_ops_that_no_watching_shows() -> None:
    """Those that talk to other ranks, those with side effects, and those of torch's own collectives."""
    assert not custom_ops.may_be_believed(ops.exchange.default)
    assert not custom_ops.may_be_believed(torch.ops._c10d_functional.all_reduce.default)
    assert custom_ops.may_be_believed(ops.gelu.default)


def test_what_is_known_is_handed_on() -> None:
    """As text that is checked when it is read."""
    custom_ops.learn({custom_ops.identity_of(ops.gelu.default): BELIEVED})
    rows = custom_ops.to_rows()
    custom_ops.forget()
    assert facts_of(ops.gelu.default).writes_all
    custom_ops.learn(custom_ops.from_rows(rows))
    assert facts_of(ops.gelu.default).replayable
    for wrong in ([{"op": 1}], "x", [{**rows[0], "may_replay": "yes"}]):
        with pytest.raises(ValueError, match="malformed"):
            custom_ops.from_rows(wrong)
