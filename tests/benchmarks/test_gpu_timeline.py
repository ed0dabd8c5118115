"""A step is taken apart into what its kernels take, when no kernel runs, and what the host takes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.timeline import Gap, Span, taken_apart, timeline

MARKS = [Span(at, at + 0.001, "void spin_kernel(long)") for at in (1.0, 4.0, 9.0)]


def test_idle_is_where_no_kernel_runs() -> None:
    """Kernels of two streams may overlap; copies from and to the host run beside, one on the device is a kernel."""
    spans = [
        Span(2.0, 3.0, "gemm"), Span(2.5, 3.5, "other stream"), Span(3.0, 8.0, "Memcpy DtoH (Device -> Pinned)"),
        Span(4.5, 6.0, "norm"), Span(6.5, 9.5, "Memcpy DtoD (Device -> Device)"), Span(0.0, 0.9, "before"),
        Span(9.6, 9.9, "after"),
    ]  # fmt: skip
    busy = taken_apart([*spans, *MARKS])
    assert busy is not None
    assert busy.seconds == pytest.approx(8.0)
    assert busy.idle == pytest.approx({"forward": 0.999 + 0.5, "backward": 0.499 + 0.5})
    assert busy.kernels == pytest.approx({"forward": 3 - 1.499, "backward": 5 - 0.999})
    assert busy.copies == pytest.approx(5.0)
    assert [gap[1:] for gap in busy.gaps] == [
        ("forward", "void spin_kernel(long)", "gemm"),
        ("forward", "other stream", ""),
        ("backward", "norm", "Memcpy DtoD (Device -> Device)"),
        ("backward", "void spin_kernel(long)", "norm"),
    ]
    assert busy.gaps[0] == Gap(pytest.approx(0.999), *busy.gaps[0][1:])


def test_a_kernel_that_spans_the_mark_counts_in_both_parts() -> None:
    """As far as it runs in each of them."""
    busy = taken_apart([Span(3.0, 5.0, "long"), *MARKS])
    assert busy is not None
    assert busy.kernels == pytest.approx({"forward": 1.001, "backward": 1.0})


@pytest.mark.parametrize(
    "marks", [[], MARKS[:2], [*MARKS, Span(10.0, 11.0, "spin_kernel")]], ids=["none", "two", "four"]
)
def test_without_its_marks_nothing_is_told(marks: list[Span]) -> None:
    """A profiler that saw no kernels, or not all."""
    assert taken_apart([Span(2.0, 3.0, "gemm"), *marks]) is None


def test_a_device_without_a_profiler_gives_the_hosts_figures() -> None:
    """Of the plain step and of the planned one; the parts do not exceed the whole."""
    measured = timeline(torch.device("cpu"), quick=True, model="resnet50", title="R", budget="h=0.5", num_rounds=2)
    found = {(row.case, row.metric): row.value for row in measured.rows}
    cases = ["R, plain, taken apart", "R, h = 0.5, taken apart"]
    assert set(found) == {(c, f"{m}_seconds") for c in cases for m in ("host_forward", "host_backward", "step")}
    for case in cases:
        parts = found[case, "host_forward_seconds"] + found[case, "host_backward_seconds"]
        assert 0 < parts <= 1.5 * found[case, "step_seconds"]  # medians of two steps need not be of the same one
    assert measured.notes == {}
