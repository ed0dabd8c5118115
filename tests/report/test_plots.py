"""The plots as data: what is drawn where."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lightning_offload.graph import DeviceSpec
from lightning_offload.report import MeasuredStep, PolicyOutcome
from lightning_offload.report.bar_plots import measured_plot, modules_plot, policies_plot
from lightning_offload.report.page_parts import in_words
from lightning_offload.report.plan_view import PlanView, view_plan
from lightning_offload.report.timeline_plots import lanes_plot, memory_plot
from tests.graph.building import GraphBuilder
from tests.report.steps import CARD, DISK, MIXED, SIX, moved, net, plan_of


def view(budget_bytes: int | None = 600, device: DeviceSpec = CARD, **options: Any) -> PlanView:
    return view_plan(SIX, plan_of(SIX, MIXED, device, budget_bytes=budget_bytes), device, **options)


def texts(plot: dict[str, Any]) -> list[str]:
    return [note["text"] for note in plot["layout"]["annotations"]]


def test_memory_is_drawn_in_steps_to_the_end() -> None:
    """Both curves in bytes over seconds, from the first tick to the end of the step, with the layer at each point."""
    shown = view()
    plain, planned, *_ = memory_plot(shown)["data"]
    assert (plain["name"], planned["name"]) == ("everything kept", "under the plan")
    assert max(planned["y"]) == shown.planned.peak_bytes
    assert max(plain["y"]) == shown.plain.peak_bytes
    assert (planned["x"][0], planned["x"][-1]) == (0, pytest.approx(shown.planned.step_seconds, abs=1e-4))
    assert plain["x"][-1] == 12.0
    assert plain["text"][0] == "stem<br>aten.m.default"
    assert plain["text"][-1] == "end of the step"
    assert all(len(curve["x"]) == len(curve["y"]) == len(curve["text"]) for curve in (plain, planned))


def test_budget_floor_and_phases_are_marked() -> None:
    """Two horizontal lines across the axis, which the legend names with their sizes, and where backward begins."""
    shown = view()
    plot = memory_plot(shown)
    lines = {curve["name"]: curve for curve in plot["data"][2:]}
    assert list(lines) == ["budget 600 B", f"floor {shown.plan.floor_bytes} B"]
    assert lines["budget 600 B"]["y"] == [600, 600]
    assert all(line["x"] == plot["layout"]["xaxis"]["range"] for line in lines.values())
    (boundary,) = plot["layout"]["shapes"]
    assert boundary["x0"] == pytest.approx(shown.planned.backward_seconds)
    assert texts(plot) == ["forward", "backward"]  # above the curves, which end below the axis' top
    assert plot["layout"]["yaxis"]["range"][1] > 1.1 * shown.plain.peak_bytes


def test_budget_far_above_does_not_flatten_the_curve() -> None:
    """It is named, and the axis ends above the peak; without a budget there is no word of one."""
    plot = memory_plot(view(budget_bytes=1 << 40))
    assert "budget 1.0 TiB: far above" in texts(plot)
    assert plot["layout"]["yaxis"]["range"][1] < 2000
    assert "budget" not in json.dumps(memory_plot(view(budget_bytes=None)))


def test_lanes_share_the_time_axis_of_memory() -> None:
    """Same range and same margins, so that they stand under one another, on a narrow screen too."""
    memory, lanes = memory_plot(view()), lanes_plot(view())
    assert memory["layout"]["xaxis"]["range"] == lanes["layout"]["xaxis"]["range"]
    for kind in ("layout", "narrow"):
        assert all(memory[kind]["margin"][side] == lanes[kind]["margin"][side] for side in "lr")


def test_each_lane_in_use_has_a_row() -> None:
    """Replays have one of their own; the disk's lanes are there where something goes to disk."""
    assert lanes_plot(view())["layout"]["yaxis"]["ticktext"] == ["compute", "replay", "D2H", "H2D"]
    with_disk = lanes_plot(view(device=DISK, budget_bytes=None))["layout"]["yaxis"]["ticktext"]
    assert with_disk == ["compute", "replay", "D2H", "H2D", "disk write", "disk read"]


def test_bars_are_the_spans() -> None:
    """Begin, length, row and words of each: two swaps of 100 bytes, which take a second each way."""
    shown = view()
    plot = lanes_plot(shown)
    bars = {bars["name"]: bars for bars in plot["data"]}
    out = bars["swap-out"]
    assert out["y"] == [2, 2]
    assert out["base"] == [span.start_seconds for span in shown.planned.of("d2h")]
    assert out["x"] == [1.0, 1.0]
    assert out["text"][0] == "<b>swap-out</b>: 100 B, 1.00 s<br>stem<br>aten.m.default"
    assert len(bars["forward ops"]["x"]) == 6
    assert bars["forward ops"]["y"] == [4] * 6
    assert bars["replay"]["y"] == [3, 3]
    seconds = sum(sum(bars[name]["x"]) for name in bars if name not in ("swap-out", "swap-in"))
    assert seconds == pytest.approx(shown.planned.step_seconds, abs=1e-3)


def test_modules_are_stacked_by_action() -> None:
    """Six modules of 100 bytes, the first on top."""
    plot = modules_plot(view())
    assert plot is not None
    assert plot["layout"]["yaxis"]["ticktext"][0] == "stem"
    assert plot["layout"]["yaxis"]["tickvals"] == [6, 5, 4, 3, 2, 1]
    assert {bars["name"]: bars["x"] for bars in plot["data"]} == {
        "kept": [0, 0, 0, 100, 0, 100],
        "swapped": [100, 0, 100, 0, 0, 0],
        "recomputed": [0, 100, 0, 0, 100, 0],
    }


def test_names_of_modules_take_the_room_that_they_need() -> None:
    """The margin is that of the longest; on a narrow screen long ones are cut at their beginning."""
    for module, wide, narrow in (("a.b", "a.b", "a.b"), ("m" * 40, "…" + "m" * 31, "…" + "m" * 15)):
        graph = net(module)
        plot = modules_plot(view_plan(graph, plan_of(graph, {}), CARD))
        assert plot is not None
        assert plot["layout"]["yaxis"]["ticktext"] == [wide]
        assert plot["narrow"]["yaxis"]["ticktext"] == [narrow]
        assert plot["layout"]["margin"]["l"] == 14 + 7 * len(wide)
        assert plot["narrow"]["margin"]["l"] == 14 + 7 * len(narrow)


def test_measured_bars_stand_beside_predicted_ones() -> None:
    """Peaks above, times below, with a gap for what is not known.

    The host's page of 4 KiB makes the unit KiB; there is no plot where nothing is measured.
    """
    shown = view(measured=MeasuredStep(step_seconds=15.0, optimizer_peak_bytes=300))
    plot = measured_plot(shown)
    assert plot is not None
    by_name = {(bars["name"], bars["xaxis"]): dict(zip(bars["y"], bars["x"], strict=True)) for bars in plot["data"]}
    assert by_name["measured", "x"]["optimizer peak"] == 300 / 1024
    assert by_name["predicted", "x"]["optimizer peak"] is None
    assert by_name["measured", "x2"]["step time"] == 15.0
    assert by_name["predicted", "x2"]["step time"] == pytest.approx(shown.planned.step_seconds)
    assert by_name["predicted", "x"]["forward peak"] == shown.forward_peak_bytes / 1024
    assert measured_plot(view()) is None
    assert measured_plot(view(measured=MeasuredStep())) is None


def test_policies_are_sorted() -> None:
    """The fastest on top; last, those that are infeasible, with their floor and no bar. The plan's own is marked."""
    outcomes = [
        PolicyOutcome(policy="keep-all", floor_bytes=2048),
        PolicyOutcome(policy="all-swap", step_seconds=24.0, plain_step_seconds=12.0, peak_bytes=400),
        PolicyOutcome(policy="auto", step_seconds=13.2, plain_step_seconds=12.0, peak_bytes=500),
    ]
    plot = policies_plot(view(comparison=outcomes))
    assert plot is not None
    feasible, infeasible = plot["data"]
    assert plot["layout"]["yaxis"]["tickvals"] == [3, 2, 1]
    assert plot["layout"]["yaxis"]["ticktext"] == ["auto", "all-swap", "keep-all"]
    assert (feasible["y"], feasible["x"]) == ([3, 2], [10.0, 100.0])
    assert feasible["marker"]["color"] == ["var(--accent)", "var(--predicted)"]
    assert (infeasible["y"], infeasible["x"]) == ([1], [0.0])
    assert infeasible["text"] == [" needs 2.0 KiB"]
    assert policies_plot(view()) is None


def test_only_infeasible_policies_can_be_drawn() -> None:
    """And a policy that is infeasible for a reason other than memory."""
    plot = policies_plot(view(comparison=[PolicyOutcome(policy="x")]))
    assert plot is not None
    assert [bars["text"] for bars in plot["data"]] == [[" infeasible"]]


def test_decisions_are_told_in_words() -> None:
    """Tier, release, return and memo of each."""
    plan = moved(plan_of(SIX, MIXED), 5, memo=False)
    plan = moved(plan, 3, release_op=-1, prefetch_unpack=-1)
    plan = moved(plan, 1, release_op=3, prefetch_unpack=1)
    rows = [in_words(stored) for stored in view_plan(SIX, plan, CARD).stored]
    assert rows == [
        ("swapped to host", "released before op 3, brought back at unpack 1"),
        ("recomputed", "replayed, then kept for its own reads"),
        ("swapped to host", "released at its pack, brought back on demand"),
        ("kept", ""),
        ("recomputed", "replayed at each read"),
        ("kept", ""),
    ]


def test_step_without_duration_backward_or_saves_is_drawn() -> None:
    """Edges: all ops take no time, there is no backward, nothing is saved; every number is finite."""
    b = GraphBuilder()
    b.op((b.given(0),), (0,), seconds=0.0)
    graph = b.build()
    shown = view_plan(graph, dataclasses.replace(plan_of(graph, {}), bound_seconds=0.0), CARD)
    assert modules_plot(shown) is None
    assert shown.overhead is None
    for plot in (memory_plot(shown), lanes_plot(shown)):
        json.dumps(plot, allow_nan=False)
        assert not [shape for shape in plot["layout"]["shapes"] if shape["line"]["color"] == "var(--rule)"]
