"""The tuner on real training steps: what it chose, whether that was right, and what it was good for.

jobs.py      what is trained: models, data, budgets, targets
text.py      the text that the language model learns
finding.py   the finder in a real Trainer, under a budget at which the memory plan matters
grid.py      throughput and peak over batch sizes, measured apart from the finder, in interleaved rounds
judging.py   whether a choice is right on a curve
racing.py    time to a training loss, with the found size and rate and with the configured ones
sleeping.py  modules that sleep for known times, on which right answers are known
contests.py  the finder against the configured values and the best of a grid, tuning included; jobs in contest_jobs.py
contest_rows.py  their rows and their part of the page
records.py   what one job gave, as plain data, and its rows
pictures.py  the plots of the documentation
page.py      docs/tuner.md
"""
