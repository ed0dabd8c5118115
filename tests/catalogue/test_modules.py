"""The modules of torch's `module_db` give the same bits under a plan."""

from __future__ import annotations

import pytest

from tests.catalogue.samples import Entry, module_entries, share_of
from tests.catalogue.steps import check


@pytest.mark.parametrize("entry", share_of(module_entries()), ids=str)
def test_modules(entry: Entry) -> None:
    """Outputs, loss, gradients, buffers and random state of a few steps are those of plain PyTorch."""
    check(entry)
