"""Executing plans."""
