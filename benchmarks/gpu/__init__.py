"""The GPU suite: many cases, the most valuable first, each in a process of its own, within a limit of minutes.

cases.py       what there is to measure, in order of value
runner.py      runs cases until the minutes are over, and keeps what was measured
store.py       the result file, from which an interrupted run is resumed
process.py     one job in a fresh process, which may fail or hang without harm to the others
child.py       what that process does
models.py      the models with their batches
contest.py     one model in several ways, side by side
max_batch.py   one size of batch within a cap on the device's memory
search.py      the largest batch that fits, from few trials
links.py       how fast bytes leave the device and come back
memory.py      the peak of a step
"""
