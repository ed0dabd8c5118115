"""What backward needs under a choice of actions: the static passes of a simulation.

``walk`` goes through the unpacks in order and does what the runtime would: what is still alive is used, swapped
storages are brought back, recomputed ones are replayed from what is at hand, and values made on the way stay for
their own unpack if they are memoised. ``hold_inputs`` then extends the stay of what replays read.

Columns are those of :class:`~lightning_offload.planning.arrays.StepArrays`.
"""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Needs, Scratch


def walk(step: StepArrays, codes: Any, no_memo: Any, needs: Needs, scratch: Scratch, max_replay_seconds: float) -> bool:
    """Fill :class:`Needs` for all unpacks of the step; False, and not all of it, where replays take too long."""
    wanted, ticks, values, live_until = step.wanted, step.wanted_tick, step.value, step.live_until
    needed, held = needs.needed, needs.held
    replay_seconds = 0.0
    for k in range(len(wanted)):
        s = wanted[k]
        tick = ticks[k]
        if codes[s] != KEEP and tick >= live_until[values[s]]:
            if held[s] <= tick:
                held[s] = tick + 1
            if needed[s] < 0:
                if codes[s] == SWAP:
                    needed[s] = tick
                else:
                    num_calls = find_calls(step, codes, values[s], tick, k + 1, needs, scratch)
                    replay(step, codes, no_memo, k, num_calls, needs, scratch)
                    replay_seconds += needs.seconds[k]
                    if replay_seconds > max_replay_seconds:
                        return False
    return True


def find_calls(step: StepArrays, codes: Any, value: int, tick: int, mark: int, needs: Needs, scratch: Scratch) -> int:
    """List the ops to replay, in order, for a value that is not at hand; their number.

    What is alive in the program, and saved storages that are kept, swapped or already back, are at hand; the latter
    stay until after the tick.
    """
    producers, in_begin, inputs, live_until, saved = (
        step.producer, step.in_begin, step.inputs, step.live_until, step.saved
    )  # fmt: skip
    needed, held = needs.needed, needs.held
    seen, stack, calls = scratch.seen, scratch.stack, scratch.calls
    num_calls = 0
    stack[0] = value
    top = 1
    while top > 0:
        top -= 1
        current = stack[top]
        if current < 0:
            calls[num_calls] = ~current
            num_calls += 1
            continue
        op = producers[current]
        if op < 0 or seen[op] == mark or tick < live_until[current]:
            continue
        s = saved[current]
        if s >= 0:
            if held[s] <= tick:
                held[s] = tick + 1
            if needed[s] < 0 and codes[s] == SWAP:
                needed[s] = tick
            if codes[s] != RECOMPUTE or needed[s] >= 0:
                continue
        seen[op] = mark
        stack[top] = ~op
        top += 1
        for i in range(in_begin[op + 1] - 1, in_begin[op] - 1, -1):
            stack[top] = inputs[i]
            top += 1
    return num_calls


def replay(step: StepArrays, codes: Any, no_memo: Any, k: int, num_calls: int, needs: Needs, scratch: Scratch) -> None:
    """Count the time and memory of a chain of replays, freeing what nobody in it reads any more.

    A value made on the way stays if it is saved, is to be recomputed too, and has an unpack of its own ahead.
    """
    in_begin, inputs, out_begin, outputs = step.in_begin, step.inputs, step.out_begin, step.outputs
    saved, storage, size, release = step.saved, step.storage, step.made_bytes, step.release
    calls, readers, own, writer = scratch.calls, scratch.readers, scratch.own, scratch.writer
    needed, tick, wanted = needs.needed, step.wanted_tick[k], step.value[step.wanted[k]]
    for n in range(num_calls):
        for i in range(in_begin[calls[n]], in_begin[calls[n] + 1]):
            readers[inputs[i]] += 1
    readers[wanted] += 1
    seconds = 0.0
    own_bytes = 0
    staying_bytes = 0
    peak = 0
    for n in range(num_calls):
        op = calls[n]
        seconds += step.op_seconds[op]
        made_bytes = 0
        for i in range(out_begin[op], out_begin[op + 1]):
            made_bytes += size[outputs[i]]
            writer[storage[outputs[i]]] = op + 1
        for i in range(in_begin[op], in_begin[op + 1]):
            v = inputs[i]
            readers[v] -= 1
            if readers[v] == 0 and writer[storage[v]] == op + 1:  # else it is copied, and written there
                own_bytes -= own[v]
                own[v] = 0
        peak = max(peak, staying_bytes + own_bytes + made_bytes + step.op_workspace[op])
        for i in range(out_begin[op], out_begin[op + 1]):
            v = outputs[i]
            s = saved[v]
            if v == wanted or (
                s >= 0 and codes[s] == RECOMPUTE and not no_memo[s] and release[s] > tick and needed[s] < 0
            ):
                needed[s] = tick
                staying_bytes += size[v]
            elif readers[v] > 0:
                own[v] = size[v]
                own_bytes += own[v]
        for i in range(in_begin[op], in_begin[op + 1]):
            v = inputs[i]
            if readers[v] == 0:
                own_bytes -= own[v]
                own[v] = 0
    readers[wanted] -= 1
    needs.seconds[k] = seconds
    needs.num_calls[k] = num_calls
    needs.transient[k] = max(0, peak - staying_bytes)


def hold_inputs(step: StepArrays, codes: Any, needs: Needs, scratch: Scratch) -> None:
    """A recorded call holds what it reads until its result is there again, or is not wanted any more.

    Through values that are not saved this reaches the saved storages behind them. On a tier, what was read may be
    read again until the result itself is dropped.

    Args:
        step: The step.
        codes: Actions.
        needs: What :func:`walk` found; ``held`` and ``stored`` are raised.
        scratch: Buffers.
    """
    held_through, stored_through = scratch.held_through, scratch.stored_through
    saved, needed, held, stored = step.saved, needs.needed, needs.held, needs.stored
    in_begin, inputs, out_begin, outputs = step.in_begin, step.inputs, step.out_begin, step.outputs
    release = step.release
    for op in step.replayed:
        held_until = 0
        stored_until = 0
        for i in range(out_begin[op], out_begin[op + 1]):
            v = outputs[i]
            s = saved[v]
            if s < 0:
                held_until = max(held_until, held_through[v])
                stored_until = max(stored_until, stored_through[v])
            elif codes[s] == RECOMPUTE:
                held_until = max(held_until, needed[s] if needed[s] >= 0 else release[s])
                stored_until = max(stored_until, stored[s])
        if stored_until == 0:
            continue
        for i in range(in_begin[op], in_begin[op + 1]):
            v = inputs[i]
            s = saved[v]
            if s < 0:
                held_through[v] = max(held_through[v], held_until)
                stored_through[v] = max(stored_through[v], stored_until)
            else:
                stored[s] = max(stored[s], stored_until)
                if codes[s] == KEEP or (codes[s] == SWAP and needed[s] >= 0):
                    held[s] = max(held[s], held_until)
