"""The demo: a ResNet-50 on real data, trained plainly and then in half of the memory that can be saved.

`python -m examples.demo` runs it, on the plain model in `examples.models`. Parts, in the order in which they meet:

    data.py      scikit-learn's digits as images
    tracker.py   live bytes, counted without asking the library
    training.py  one run through Lightning's Trainer: losses, times, peak, saved state
    compare.py   a separate process that says whether two saved states are the same, bit for bit
    summary.py   the result as a table and as JSON
"""
