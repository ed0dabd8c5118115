"""Modelled step times against public measurements: what the catalogue's devices are calibrated by."""
