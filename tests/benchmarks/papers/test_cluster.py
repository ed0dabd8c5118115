"""AccUDNN's eight GPUs: what the exchange leaves of a factor of eight."""

from __future__ import annotations

import pytest

from benchmarks.papers import captures, cluster, searches
from examples.models import MODELS


def test_eight_gpus_by_hand() -> None:
    """Without overlap the speed-up is 8 T / (T + exchange), the exchange being that of the algorithm; DDP beats it."""
    spec = captures.device("k40c")
    recorded = captures.record(MODELS["resnet50"], 4, spec)
    plan = searches.planned(recorded.graph, spec, None)
    found = list(cluster.eight_gpus(recorded.graph, plan, spec, 4, 0.5))
    alone = plan.predicted_step_seconds + 0.5
    passing = recorded.parameter_bytes / spec.h2d_bytes_per_second
    hop = cluster.machine(spec).intra.latency_seconds
    tree, ring, server, ddp = (figure.ours for figure in found)
    assert tree == pytest.approx(8 * alone / (alone + 6 * (passing + hop)), rel=1e-6)
    assert ring == pytest.approx(8 * alone / (alone + 14 / 8 * passing + 14 * hop), rel=1e-6)
    assert server == pytest.approx(8 * alone / (alone + 16 * passing + 2 * hop), rel=1e-6)
    assert server < tree < ring < ddp < 8
    assert all("a simulated cluster" in figure.note for figure in found)
    assert [figure.claim for figure in found] == [7.7, 7.7, 7.7, None]
    (alone_figure,) = cluster.eight_gpus(recorded.graph, plan, spec, 4, 0.5, (cluster.CAFFE,))
    assert alone_figure == found[0]
