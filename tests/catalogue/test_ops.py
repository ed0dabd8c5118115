"""The differentiable ops of torch's `op_db`, called plainly and in place, give the same bits under a plan."""

from __future__ import annotations

import pytest

from tests.catalogue.samples import Entry, op_entries, share_of
from tests.catalogue.steps import check


@pytest.mark.parametrize("entry", share_of(op_entries()), ids=str)
def test_ops(entry: Entry) -> None:
    """Outputs, loss, gradients and random state of five steps are those of plain PyTorch."""
    check(entry)
