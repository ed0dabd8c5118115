"""vDNN: offload inputs of layers in forward, prefetch them a layer ahead in backward.

Rhu, Gimelshein, Clemons, Zulfiqar, Keckler, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient
Neural Network Design", MICRO 2016, arXiv 1602.08124. A layer's input is copied out while its last consumer runs, and
the end of that layer waits for the copy. When a layer's backward begins, the nearest preceding layer with an
offloaded input that is not on its way is prefetched, unless that is past the next convolution. Three variants choose
the inputs: those of all layers, those of convolutions, or (dynamic) the fastest configuration that fits.

Departures. We decide about saved storages: what backward never reads is freed by autograd and is nobody's offload.
The copy begins at the first save instead of the last consumer, which is the same op in a chain. The wait at the end
of a layer's backward is made at the first op that reads the data; it is never later than in the paper's next layer.
``vdnn-all`` covers fully connected layers too, which the paper leaves alone for their small inputs, since in other
networks they are most of the step. Convolution algorithms belong to cuDNN here, so the dynamic variant chooses
among: no offload, convolutions, all, and, which the paper leaves out, as many of either from the first layer on as is
fastest within the budget. A storage that backward needs before the layer could end stays, and so does one
that a host of limited size has no room for, later layers first.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Tried, fit_host, swap
from lightning_offload.planning.policies.kinds import Kind
from lightning_offload.planning.policies.layers import Layers, layers_of
from lightning_offload.planning.policies.schedules import nearest_ahead, releases
from lightning_offload.planning.request import PlanRequest


def vdnn_all(request: PlanRequest) -> MemoryPlan:
    """Offload the input of every layer."""
    layers = layers_of(request.problem)
    return Fitting(request, "vdnn-all").one(_offload(layers, _read_by(request, layers, None))).plan()


def vdnn_conv(request: PlanRequest) -> MemoryPlan:
    """Offload the inputs of convolutions."""
    layers = layers_of(request.problem)
    return Fitting(request, "vdnn-conv").one(_offload(layers, _read_by(request, layers, Kind.CONV))).plan()


def vdnn_dyn(request: PlanRequest) -> MemoryPlan:
    """Take the fastest that fits of: no offload, convolutions, all, and what lies between."""
    layers, fitting = layers_of(request.problem), Fitting(request, "vdnn-dyn")
    for only in (Kind.CONV, None):
        read = _read_by(request, layers, only)
        fitting.scan(len(read), lambda num, read=read: _offload(layers, read[:num]))  # type: ignore[misc]
    return fitting.plan()


def _read_by(request: PlanRequest, layers: Layers, only: Kind | None) -> list[int]:
    """What layers of a kind read, or what any layer reads, as far as the host has room."""
    read = [
        s for s in layers.swappable()
        if (kinds := layers.reader_kinds(layers.by_storage[s])) and (only is None or only in kinds)
    ]  # fmt: skip
    return fit_host(request, read)


def _offload(layers: Layers, storages: list[int]) -> Tried:
    release = releases(layers, storages, {})
    actions = swap(release)
    return Tried(actions=actions, schedule=nearest_ahead(layers, release, actions, stop=Kind.CONV))
