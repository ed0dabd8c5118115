"""What a size would do on more devices is simulated from its measured step, where that says anything."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.interconnects import usual_interconnects
from lightning_offload.planning.cluster import Cluster, profile_step, scaling
from lightning_offload.planning.step_model import StepModel
from lightning_offload.tuning.predictor import Predictor
from lightning_offload.tuning.scaling import Scaling, simulate_scaling
from tests.tuning.steps import A100, recorded_family

MODEL = StepModel.fit({n: recorded_family("resnet50")(n) for n in (2, 4)})


def predictor_on(device: DeviceSpec, *, fixed_seconds: float = 0.0) -> Predictor:
    return Predictor(MODEL, device, None, fixed_seconds=fixed_seconds)


def test_one_device_is_as_measured_and_more_of_them_exchange() -> None:
    """From 1 to 1024 devices, on the links of machines with an A100; what the cluster model says of that step."""
    found = simulate_scaling(predictor_on(A100), 4, step_seconds=0.02, accumulation=1)
    assert found is not None
    assert [step.num_devices for step in found.steps] == [2**power for power in range(11)]
    assert found.steps[0].samples_per_second == pytest.approx(4 / 0.02)
    assert not found.are_links_assumed
    assert found.links == "NVLink 3, 12 links within nodes of 8, InfiniBand HDR, 200 Gbit/s between them"
    within, between = usual_interconnects("a100")
    graph = MODEL.at(4)
    profile = profile_step(graph, predictor_on(A100).plan(4), A100, batch_size=4).lasting(0.02)
    assert profile.gradient_bytes > 4 * 25_000_000
    assert found.steps == scaling(profile, Cluster(intra=within, inter=between))
    assert all(step.efficiency < 1 for step in found.steps[1:])
    assert found.rows[0] == ("1", "4", "200.0", "100.0%")


def test_the_update_comes_once_for_all_micro_batches() -> None:
    """With 4 micro-batches one device does as measured, and more of them wait for a quarter of the exchanges."""
    one, four = (
        simulate_scaling(predictor_on(A100, fixed_seconds=0.005), 4, step_seconds=0.02, accumulation=num)
        for num in (1, 4)
    )
    assert one is not None
    assert four is not None
    assert four.steps[0].samples_per_second == pytest.approx(one.steps[0].samples_per_second)
    assert four.steps[-1].effective_batch == 4 * 1024 * 4
    assert four.steps[-1].exposed_seconds == pytest.approx(one.steps[-1].exposed_seconds)
    assert four.steps[-1].efficiency > one.steps[-1].efficiency


def test_a_fixed_part_longer_than_the_step_is_none() -> None:
    """What was recorded slowly cannot be more than what was measured."""
    found = simulate_scaling(predictor_on(A100, fixed_seconds=1.0), 4, step_seconds=0.02, accumulation=1)
    assert found is not None
    assert found.steps[0].step_seconds == pytest.approx(0.02)


def test_where_there_is_nothing_to_say() -> None:
    """A CPU has no links to others of its kind; ranks that talk within the step are not modelled."""
    cpu = dataclasses.replace(A100, kind="cpu", name="cpu")
    assert simulate_scaling(predictor_on(cpu), 4, step_seconds=0.02, accumulation=1) is None

    def talking(graph: StepGraph) -> StepGraph:
        first = dataclasses.replace(graph.ops[0], name="c10d.allreduce_.default")
        return dataclasses.replace(graph, ops=(first, *graph.ops[1:]))

    model = StepModel.fit({n: talking(recorded_family("resnet50")(n)) for n in (2, 4)})
    assert simulate_scaling(Predictor(model, A100, None), 4, step_seconds=0.02, accumulation=1) is None


def test_links_that_are_not_known_are_said_to_be_assumed() -> None:
    """A device that nothing is known of gets the oldest links, and the caption says so."""
    found = simulate_scaling(
        predictor_on(dataclasses.replace(device_spec("a100"), name="abacus")), 4, step_seconds=0.02, accumulation=1
    )
    assert found is not None
    assert found.are_links_assumed
    assert "assumed" in found.caption
    assert found.caption.startswith("Simulated")


def test_it_survives_its_state() -> None:
    """Plain containers, and back."""
    found = simulate_scaling(predictor_on(A100), 4, step_seconds=0.02, accumulation=1)
    assert found is not None
    assert Scaling.from_state_dict(json.loads(json.dumps(found.state_dict()))) == found
