"""Views are rebuilt bit by bit on another storage, and bits are compared as bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_offload.tensors.geometry import Geometry, same_bits

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def filled(num_bytes: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of arbitrary bits, NaNs among them (bools hold 0 and 1)."""
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return data.view(dtype)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a storage at another address."""
    copy = storage.clone()
    assert copy.data_ptr() != storage.data_ptr() or storage.nbytes() == 0
    return copy


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of a flat tensor: strided, overlapping, offset, expanded, transposed, conjugated, negated."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [draw(st.integers(0, 5)) for _ in sizes]
    offset = draw(st.integers(0, 7))
    reach = offset + sum(max(n - 1, 0) * stride for n, stride in zip(sizes, strides, strict=True)) + 1
    base = filled(reach * dtype.itemsize * 2, dtype)
    view = base.as_strided(sizes, strides, offset)
    if view.dim() and draw(st.booleans()):
        view = view.transpose(0, -1)
    if draw(st.booleans()):
        view = view.unsqueeze(0).expand(3, *view.shape)
    if dtype.is_complex and draw(st.booleans()):
        view = view.conj()
    if dtype.is_complex and draw(st.booleans()):
        view = view.imag
    elif dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans()):
        view = torch._neg_view(view)
    return view


@given(views())
def test_view_is_rebuilt_on_a_copied_storage(view: Tensor) -> None:
    """Size, stride, offset, dtype, conj and neg bits and every bit are those of the original."""
    geometry = Geometry.of(view)
    storage = copied(view.untyped_storage())
    again = geometry.view(storage)
    assert Geometry.of(again) == geometry
    assert (again.stride(), again.storage_offset(), again.dtype) == (view.stride(), view.storage_offset(), view.dtype)
    assert (again.is_conj(), again.is_neg()) == (view.is_conj(), view.is_neg())
    assert again.untyped_storage() is storage
    assert same_bits(again, view)


def test_rebuilt_view_shares_memory_and_no_graph() -> None:
    """It is detached, writes through it are seen in the storage, and nothing is copied."""
    leaf = torch.ones(4, 3, requires_grad=True)
    result = leaf * 2
    again = Geometry.of(result.t()[1:]).view(result.untyped_storage())
    assert not again.requires_grad
    assert again.data_ptr() == result.t()[1:].data_ptr()
    again.zero_()
    assert result.detach()[:, 1:].abs().sum() == 0
    assert result.detach()[:, 0].tolist() == [2.0] * 4


def test_one_storage_has_many_geometries() -> None:
    """A tensor, its transpose and its slice differ in geometry alone."""
    a = torch.arange(6.0).view(2, 3)
    found = {Geometry.of(view) for view in (a, a.t(), a[:1], a[:, 1:], a.expand(5, 2, 3))}
    assert len(found) == 5
    assert Geometry.of(a) == Geometry.of(torch.zeros(2, 3))


def test_empty_tensor_is_rebuilt() -> None:
    """A storage of no bytes holds tensors too."""
    empty = torch.empty(0, 7)
    assert Geometry.of(empty).view(copied(empty.untyped_storage())).shape == (0, 7)


def test_geometry_is_frozen() -> None:
    """A geometry is a value, safe as a key."""
    with pytest.raises(AttributeError):
        Geometry.of(torch.ones(1)).offset = 3  # type: ignore[misc]


def test_same_bits_holds_for_a_copy_and_fails_for_one_bit(subtests: pytest.Subtests) -> None:
    """Arbitrary bits equal themselves; any single bit that flips is noticed."""
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            a = filled(16 * dtype.itemsize, dtype)
            assert same_bits(a, a.clone())
            for byte in range(0, 16 * dtype.itemsize, 5):
                b = a.clone()
                b.view(torch.uint8)[byte] ^= 1
                assert not same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_same_bits_of_special_numbers(dtype: torch.dtype) -> None:
    """NaN equals NaN of the same bits, zero differs from minus zero."""
    nan, zero = torch.full((3,), math.nan, dtype=dtype), torch.zeros(3, dtype=dtype)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(nan, zero)
    assert same_bits(-zero, zero.neg())


def test_same_bits_of_complex_numbers() -> None:
    """Both parts count, signs of zero included."""
    a = torch.tensor([complex(0.0, 0.0), complex(math.nan, 1.0)])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([complex(0.0, -0.0), complex(math.nan, 1.0)]))


@pytest.mark.parametrize("make", [Tensor.conj, lambda a: a.conj().imag, lambda a: torch._neg_view(a.real)])
def test_same_bits_of_lazy_views(make: object) -> None:
    """Conjugated and negated views of equal storages are equal, of unequal ones not."""
    a = filled(64, torch.complex64)
    b = a.clone()
    assert same_bits(make(a), make(b))  # type: ignore[operator]
    b.view(torch.uint8)[5] ^= 1
    b.view(torch.uint8)[1] ^= 1
    assert not same_bits(make(a), make(b))  # type: ignore[operator]


def test_same_bits_needs_one_shape_and_dtype() -> None:
    """Tensors of other shapes or dtypes are not the same, whatever they hold."""
    zero = torch.zeros(4)
    assert not same_bits(zero, torch.zeros(2, 2))
    assert not same_bits(zero, torch.zeros(4, dtype=torch.int32))


def test_same_bits_looks_through_strides() -> None:
    """It is contents that count, not how they lie; scalars and empty tensors have contents too."""
    a = torch.randn(4, 6)
    assert same_bits(a.t(), a.t().contiguous())
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))


def test_same_bits_leaves_no_trace() -> None:
    """Comparing tensors that require gradients builds no graph and changes nothing."""
    a = torch.randn(3, requires_grad=True)
    assert same_bits(a, a.detach().clone())
    assert a.grad_fn is None
    assert a._version == 0
