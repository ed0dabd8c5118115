"""One rank of several searches: `search_ranks.py RANK NUM_RANKS STORE`; prints what it found as JSON."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
from torch import distributed

from lightning_offload.errors import TuningError
from lightning_offload.tuning.acquisition import Space
from lightning_offload.tuning.ranks import GlooCoordinator, agreed
from lightning_offload.tuning.search import find_batch_size
from lightning_offload.tuning.trial import Prediction, Trial
from tests.shares import is_all
from tests.tuning.curves import FakeMachine, draw_case, right_sizes, saturating

EDGES = (3000, 300)
"""Largest size that fits on each rank: the second runs out of memory first."""
NUM_SEEDS = 20 if is_all() else 4


def run_one(machine: FakeMachine, size: int) -> Trial:
    """What an adapter does: memory runs out as an exception, on this rank alone."""
    try:
        if size > machine.edge:
            raise torch.OutOfMemoryError(f"CUDA out of memory at {size}")
        return machine.run(size)
    except torch.OutOfMemoryError as error:
        return Trial(batch_size=size, is_ok=False, reason=str(error))


def search(group: GlooCoordinator, rank: int) -> object:
    """Ranks differ in speed, noise and memory, and in what their clock and their model say."""
    machine = FakeMachine(curve=saturating(2000, top=1000.0 - 200 * rank), edge=EDGES[rank], seed=rank)

    def predict(size: int) -> Prediction:
        assert rank == 0, "only rank 0 decides"
        return Prediction(batch_size=size, is_feasible=size <= 2000, samples_per_second=saturating(1000)(size))

    found = find_batch_size(
        lambda size: agreed(run_one(machine, size), group),
        Space(high=4096),
        predict=predict,
        max_seconds=1e6 if rank == 0 else 1e-6,
        clock=machine.clock,
        agreement=group,
    )
    speeds = [trial.samples_per_second for trial in found.trials]
    reasons = [trial.reason for trial in found.trials if not trial.is_ok]
    sizes = [trial.batch_size for trial in found.trials]
    return {"size": found.batch_size, "sizes": sizes, "speeds": speeds, "reasons": reasons, "largest": found.largest}


def many(group: GlooCoordinator, rank: int) -> object:
    """Noisy curves of all the usual shapes; each rank has noise of its own, and the second the smaller memory."""
    found = []
    for seed in range(NUM_SEEDS):
        for shape in ("saturating", "peaked", "stepped"):
            case = draw_case(shape, seed)
            is_predicted = seed % 2 == 0
            machine = FakeMachine(
                curve=case.curve, edge=case.edge if rank == 1 else 2 * case.edge, seed=NUM_SEEDS * rank + seed
            )
            result = find_batch_size(
                lambda size, machine=machine: agreed(run_one(machine, size), group),
                Space(high=case.max_size),
                predict=case.predict if is_predicted else None,
                clock=machine.clock,
                agreement=group,
            )
            is_right = result.batch_size in right_sizes(case.curve, min(case.edge, case.max_size))
            found.append(
                {"shape": shape, "seed": seed, "size": result.batch_size, "is_right": is_right,
                 "is_predicted": is_predicted, "num_trials": len(result.trials)}
            )  # fmt: skip
    return found


def values(group: GlooCoordinator, rank: int) -> object:
    return {
        "smallest": [group.smallest(rank), group.smallest(5)],
        "largest": [group.largest(1 - rank), group.largest(5)],
        "all": [group.is_true_on_all(rank == 0), group.is_true_on_all(True)],
        "first": group.broadcast({"from": rank}),
        "gathered": group.gather(f"rank {rank}"),
        "num_ranks": group.num_ranks,
    }


def failing_model(group: GlooCoordinator, rank: int) -> object:
    def predict(size: int) -> Prediction:
        raise KeyError("no such op")

    try:
        find_batch_size(lambda size: Trial.from_steps(size, (1.0,)), Space(), predict=predict, agreement=group)
    except (TuningError, KeyError) as error:
        return [type(error).__name__, str(error), error is group.told]
    return "no error"


def failing_rank(group: GlooCoordinator, rank: int) -> object:
    """Rank 1 fails in what is done together, and then leaves while rank 0 waits; the seconds that took."""
    found = []
    begin = time.monotonic()
    try:
        group.together(lambda: {0: "done"}[rank], "the work")
    except (KeyError, TuningError) as error:
        found.append(f"{type(error).__name__}: {error}")
    with GlooCoordinator(timeout_seconds=60) as another:
        another.gather(0)
        if rank == 0:
            try:
                another.gather(1)
            except TuningError:
                found.append("told")
    return {"errors": found, "was_quick": time.monotonic() - begin < 30}


def lost_rank(group: GlooCoordinator, rank: int) -> object:
    """Rank 1 never comes to the second agreement."""
    group.gather(0)
    if rank == 1:
        return "left"
    try:
        group.gather(1)
    except TuningError as error:
        return str(error)
    return "no error"


def main() -> None:
    rank, num_ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    found = {}
    for scenario in (search, many, values, failing_model, failing_rank, lost_rank):  # after the last they are apart
        with GlooCoordinator(timeout_seconds=3 if scenario is lost_rank else 60) as group:
            found[scenario.__name__] = scenario(group, rank)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
