"""The demo: a ResNet-50 on real data, trained plainly and then in half of the memory that can be saved.

`python -m examples.demo` runs it, and so does `lightning-offload demo`. It is a user of the library that measures it
from outside. Parts, in the order in which they meet:

    program.py      what is run one after the other, and whether it showed what it is there to show
    data.py         scikit-learn's digits as images
    training.py     one run through Lightning's Trainer, of the ResNet in examples/models
    tracker.py      live bytes, counted without asking the library
    measurement.py  losses, peak and the saved state of a run
    turns.py        times of plain steps and of those within the budget, in turns
    pairs.py        what such times say
    state.py        what a run leaves on disk
    compare.py      a separate process that says whether two saved states are the same, bit for bit
    summary.py      the result as a table and as JSON
"""
