"""One training a module, as users of its package would write it.

A module has `train(budget, folder)`, which trains on synthetic data from random weights and returns what was trained;
the folder is for what it writes. Without a budget nothing of ours is there. All take forty optimizer steps.
Those that find their batch size take callbacks too, and so many times the data and the steps; or have a `search`.
"""
