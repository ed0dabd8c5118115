"""Functions with a backward of their own, and custom ops, give the same bits under a plan."""

from __future__ import annotations

import pytest

from tests.catalogue.samples import Entry, function_entries, share_of
from tests.catalogue.steps import check


@pytest.mark.parametrize("entry", share_of(function_entries()), ids=str)
def test_functions(entry: Entry) -> None:
    """Outputs, loss, gradients and random state of a few steps are those of plain PyTorch."""
    check(entry)
