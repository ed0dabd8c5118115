"""Where a step is in a plan for another structure."""

from __future__ import annotations

import random

import torch

from lightning_offload.graph import StepGraph
from lightning_offload.runtime.follow import ByForm
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.runtime.routes import FormRoute
from lightning_offload.tensors.saved_forms import OPEN, SavedForm
from tests.graph.building import GraphBuilder, chain
from tests.runtime.executing import plan_of


def _form(letter: str) -> SavedForm:
    """One kind of tensor a letter; "?" is of the first kind with any size."""
    return SavedForm(torch.float32, (OPEN, 1) if letter == "?" else (ord(letter), 1))


def _program(graph: StepGraph, letters: str) -> tuple[Program, FormRoute]:
    program = compile_plan(graph, plan_of(graph), forms=[_form(letter) for letter in letters])
    assert program.form_route is not None
    return program, program.form_route


def _places(planned: str, *, seen: str) -> list[int]:
    graph = chain(*range(100, 100 + len(planned)))
    assert len(graph.saves) == len(planned)
    follower = ByForm(*_program(graph, planned))
    return [follower.place_of(_form(letter)) for letter in seen]


def test_a_step_of_the_same_structure_follows_it() -> None:
    """Each save takes its own place."""
    assert _places("abcabc", seen="abcabc") == [0, 1, 2, 3, 4, 5]


def test_a_missing_layer_shows_where_the_stack_ends() -> None:
    """Layers look alike, so those that are there take the first places; what comes after them is found again."""
    assert _places("abcabcabcxyz", seen="abcabcxyz") == [0, 1, 2, 3, 4, 5, -1, 10, 11]


def test_an_inserted_part_is_unmatched() -> None:
    """The step goes on in its plan after it."""
    assert _places("abcxyz", seen="abcqqqqxyz") == [0, 1, 2, -1, -1, -1, -1, 3, 4, 5]


def test_one_save_that_looks_like_a_later_place_does_not_skip_what_lies_between() -> None:
    """Two that are unique, or three, are needed for that."""
    assert _places("abcabcx", seen="axbcabcx") == [0, -1, 1, 2, 3, 4, 5, 6]


def test_two_that_come_more_than_once_are_not_enough() -> None:
    """Three are, and the nearest place is taken."""
    assert _places("kabcabdabc", seen="kzabc")[:5] == [0, -1, 1, 2, 3]
    assert _places("kqqabcqqabc", seen="kabc") == [0, -1, -1, 5]


def test_open_sizes_are_followed_whatever_they_are() -> None:
    """An expert gets as many tokens as it gets; one that gets none is missing."""
    assert _places("w?w?w?xyz", seen="wawbwcxyz") == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert _places("w?w?w?xyz", seen="wawbxyz") == [0, 1, 2, 3, -1, 7, 8]


def test_places_move_forward_only() -> None:
    """Whatever a step saves: no place twice, none before another."""
    rng = random.Random(5)
    for _ in range(300):
        planned = "".join(rng.choices("abc?x", k=rng.randrange(1, 30)))
        seen = "".join(rng.choices("abcdx", k=rng.randrange(30)))
        taken = [place for place in _places(planned, seen=seen) if place >= 0]
        assert taken == sorted(set(taken))


def test_what_is_kept_adds_up() -> None:
    """By pack: what the plan keeps of what the step made; what was there before is no part of it."""
    graph = chain(100, 200, 300)
    program, route = _program(graph, "a" * len(graph.saves))
    made = [not graph.storages[graph.values[save.value].storage].is_persistent for save in graph.saves]
    assert [place in program.made_packs for place in range(len(made))] == made
    sizes = [graph.storages[graph.values[save.value].storage].num_bytes for save in graph.saves]
    total, expected = 0, []
    for size, is_made in zip(sizes, made, strict=True):
        total += size * is_made
        expected.append(total)
    assert list(route.kept_bytes) == expected
    assert [storage >= 0 for storage in route.storages] == made


def _bordered(planned: str, seen: str) -> tuple[FormRoute, list[int]]:
    """A plan and a step in which a backward lies at each "|"."""
    parts = planned.split("|")
    builder = GraphBuilder()
    for part in parts:
        saves = []
        for _ in part:
            made = builder.op((), (100,))
            saves.append(builder.pack(*made))
        builder.phase = "backward"
        for save in reversed(saves):
            builder.unpack(save)
            builder.release(save)
        builder.phase = "forward"
    program, route = _program(builder.build(), "".join(parts))
    follower, places = ByForm(program, route), []
    for number, part in enumerate(seen.split("|")):
        places += [follower.place_of(_form(letter), is_border=number > 0 and not i) for i, letter in enumerate(part)]
    return route, places


def test_a_backward_is_a_border() -> None:
    """What comes after one in the step is after one in the plan, whatever was missing before; and before, before."""
    _, places = _bordered("aaaa|aaaa|b", "aa|aaa|b")
    assert places == [0, 1, 4, 5, 6, 8]
    _, places = _bordered("aaaa|aaaa", "aaaaaaa|aa")
    assert places == [0, 1, 2, 3, -1, -1, -1, 4, 5]
    _, places = _bordered("aaaa|aaaa|bcd", "aa|bcd")
    assert places == [0, 1, 8, 9, 10]


def test_what_backward_is_done_with_is_not_kept_any_more() -> None:
    """So that there is no room for it afterwards."""
    route, _ = _bordered("aaa|aa|aaaa", "a")
    assert list(route.kept_bytes) == [100, 200, 300, 100, 200, 100, 200, 300, 400]
    assert route.borders == (3, 5)
