"""Modules grouped into rows that can be read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.graph import Action
from lightning_offload.report.plan_view import Stored
from lightning_offload.report.rows import module_rows


def stored(*rows: tuple[str, int] | tuple[str, int, Action]) -> list[Stored]:
    return [
        Stored(
            storage=i, num_bytes=row[1], action=row[2] if len(row) == 3 else "keep", decision=None, module=row[0],
            op="aten.op.default", pack_tick=i, release_tick=100,
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip


def labels(*rows: tuple[str, int], max_rows: int = 24) -> list[str]:
    return [row.label for row in module_rows(stored(*rows), max_rows)]


def test_modules_come_in_forward_order() -> None:
    """Not by name, and each once."""
    assert labels(("b", 1), ("a", 1), ("b", 1)) == ["b", "a"]


def test_small_nets_are_shown_in_full() -> None:
    """Down to the innermost module, and what a module saves itself beside its children."""
    assert labels(("m.0.conv", 1), ("m.0", 1), ("m.1.conv", 1)) == ["m.0.conv", "m.0", "m.1.conv"]


def test_siblings_are_opened_together() -> None:
    """Where two layers of two modules each do not fit, none of the layers is opened."""
    rows = [(f"net.{i}.{part}", 1) for i in range(4) for part in ("a", "b")]
    assert labels(*rows, max_rows=7) == ["net.0", "net.1", "net.2", "net.3"]


def test_heavy_module_may_be_opened_alone() -> None:
    """One that holds most of the bytes, where there is no room for its siblings' children."""
    rows = [("net.0.a", 50), ("net.0.b", 50), *((f"net.{i}.{part}", 1) for i in (1, 2, 3) for part in "abc")]
    assert labels(*rows, max_rows=5) == ["net.0.a", "net.0.b", "net.1", "net.2", "net.3"]


def test_many_flat_modules_are_put_in_runs() -> None:
    """Evenly, and named by their first and last."""
    assert labels(*((str(i), 1) for i in range(100)), max_rows=3) == ["0 … 32", "33 … 65", "66 … 99"]


def test_what_no_module_saved_is_named_so() -> None:
    """A loss function's, say."""
    assert labels(("", 1)) == ["(no module)"]


def test_bytes_are_summed_by_action() -> None:
    """With the number of storages."""
    (row,) = module_rows(stored(("m", 1, "keep"), ("m", 2, "swap"), ("m", 4, "recompute"), ("m", 8, "swap")))
    assert row.num_bytes == {"keep": 1, "swap": 10, "recompute": 4}
    assert (row.total_bytes, row.num_storages) == (15, 4)


def test_nothing_saved_gives_no_row() -> None:
    """A step without saved tensors."""
    assert module_rows([]) == []


names = st.lists(st.sampled_from("abc"), max_size=4).map(".".join)


@given(st.lists(st.tuples(names, st.integers(0, 9)), max_size=60), st.integers(1, 12))
def test_no_byte_is_lost_and_rows_are_few(rows: list[tuple[str, int]], max_rows: int) -> None:
    """Whatever the names are."""
    found = module_rows(stored(*rows), max_rows)
    assert len(found) <= max_rows
    assert sum(row.total_bytes for row in found) == sum(size for _, size in rows)
    assert sum(row.num_storages for row in found) == len(rows)
