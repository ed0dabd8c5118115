"""Which steps share a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload.plugins.devices import first_device
from lightning_offload.plugins.plan_cache import step_signature

X = torch.zeros(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 7), torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).t(),
        torch.zeros(4, 6, requires_grad=True), torch.zeros(24), X.to_sparse(), [X], (X, X), {"x": X}, None,
    ],
    ids=["columns", "rows", "dtype", "strides", "grad", "flat", "sparse", "list", "pair", "dict", "none"],
)  # fmt: skip
def test_other_inputs_are_another_kind_of_step(other: Any) -> None:
    """Shape, dtype, strides, requires_grad, layout and structure tell steps apart."""
    assert step_signature(X) != step_signature(other)


def test_contents_do_not_count() -> None:
    """Other numbers in tensors, and other plain values, are the same kind of step."""
    assert step_signature((X, 3, "train")) == step_signature((torch.ones(4, 6), 4, "again"))
    assert step_signature({"x": X, "index": 1}) == step_signature({"x": X + 1, "index": 2})
    assert step_signature((X, 3)) != step_signature((X, 3.0))


def test_signature_is_short_text_and_stable() -> None:
    """It can be a key in a file."""
    assert step_signature((X,)) == step_signature((X,))
    assert len(step_signature((X,))) == 32


def test_autocast_is_another_kind_of_step() -> None:
    """The same inputs under autocast, or under another dtype of it, are other steps."""
    plain = step_signature(X)
    with torch.autocast("cpu", torch.bfloat16):
        low = step_signature(X)
    with torch.autocast("cpu", torch.float16):
        half = step_signature(X)
    assert len({plain, low, half}) == 3
    assert step_signature(X) == plain


@pytest.mark.filterwarnings("ignore:.*in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_have_a_signature(layout: torch.layout) -> None:
    """Nested tensors, whose sizes cannot be asked for, are inputs like others."""
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    assert step_signature(nested) == step_signature(nested)
    assert step_signature(nested) != step_signature(X)


def test_wrapping_tensors_have_a_signature() -> None:
    """Subclasses that wrap other tensors are inputs like others."""
    from torch.testing._internal.two_tensor import TwoTensor

    assert step_signature(TwoTensor(X, X)) == step_signature(TwoTensor(X + 1, X))


def test_first_device() -> None:
    """The first tensor that is not on the CPU decides, else the first one, else nothing does."""
    assert first_device((1, {"x": X})) == torch.device("cpu")
    assert first_device((X, torch.zeros(2, device="meta"))) == torch.device("meta")
    assert first_device((1, "a", None)) is None


def test_empty_inputs_have_a_signature() -> None:
    """A step may be told nothing of its inputs."""
    inputs: tuple[Tensor, ...] = ()
    assert step_signature((inputs, {})) == step_signature(((), {}))
