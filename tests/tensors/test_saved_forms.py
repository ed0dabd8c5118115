"""What saved tensors look like."""

from __future__ import annotations

import pytest
import torch

from lightning_offload.tensors.op_facts import facts_of
from lightning_offload.tensors.saved_forms import OPEN, SavedForm, form_of, opened, sizes_that_vary


def _form(*shape: int, dtype: torch.dtype = torch.float32) -> SavedForm:
    return SavedForm(dtype, shape)


def test_form_of_a_tensor() -> None:
    """Type and sizes of what is plain; the rest looks all alike."""
    assert form_of(torch.zeros(2, 3, dtype=torch.bfloat16), is_plain=True) == _form(2, 3, dtype=torch.bfloat16)
    assert form_of(torch.eye(3).to_sparse(), is_plain=False) == SavedForm(None, ())


def test_open_sizes_admit_any(subtests: pytest.Subtests) -> None:
    """And nothing else does."""
    for other, admits in [
        (_form(2, 3), True),
        (_form(2, 4), False),
        (_form(9, 3), True),
        (_form(2, 3, 1), False),
        (_form(2, 3, dtype=torch.float64), False),
    ]:
        with subtests.test(other=other):
            assert _form(OPEN, 3).admits(other) == admits


def test_sizes_are_opened_wherever_they_are() -> None:
    """Those given, and no others."""
    assert opened([_form(7, 3), _form(3, 5)], {7, 5}) == (_form(OPEN, 3), _form(3, OPEN))
    assert opened([_form(7)], ()) == (_form(7),)


def test_sizes_vary_between_steps_of_one_structure() -> None:
    """All that are seen at places where two steps differ; nothing where they are of two structures."""
    one, other = [_form(7, 3), _form(4)], [_form(9, 3), _form(4)]
    assert sizes_that_vary(one, other) == {7, 9}
    assert sizes_that_vary(one, one) == set()
    assert sizes_that_vary(one, other[:1]) == set()
    assert sizes_that_vary(one, [_form(9), _form(4)]) == set()


def test_ops_whose_results_depend_on_data_are_known() -> None:
    """By torch's own tags."""
    aten = torch.ops.aten
    assert all(facts_of(op).makes_any_size(()) for op in (aten.nonzero.default, aten.masked_select.default))
    assert not any(facts_of(op).makes_any_size(()) for op in (aten.add.Tensor, aten.topk.default))
    x, facts = torch.zeros(3, 3), facts_of(aten.index.Tensor)
    assert facts.makes_any_size((x, [None, x.bool()]))
    assert not facts.makes_any_size((x, [torch.zeros(4, dtype=torch.long)]))
