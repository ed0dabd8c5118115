"""Has a step on fake CPU tensors call the kernels that it would call on an NVIDIA GPU.

A CPU build of torch has no device guard for CUDA, so autograd cannot run on fake CUDA tensors there: the process
aborts. What differs between the devices is little, however. Functions that torch composes of others ask where their
input lies and choose a kernel by that: :mod:`~.choices` chooses as CUDA does. Kernels that are CUDA's alone, or save
something else there, are given results of CUDA's sizes by :mod:`~.kernels`. All else is the same on both.
"""
