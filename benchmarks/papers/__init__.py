"""The published systems' own figures, derived again without a GPU.

`layers`, `route`, `cache` and `layrub` follow the papers' rules on a network of layers: whole tensors, no kernels, so
that their figures come out to the byte. `captures` and `searches` record our models under FakeTensorMode and ask our
planner instead; `figures` says how a claim and our figure are put side by side.
"""
