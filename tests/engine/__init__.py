"""Exactness, budgets and faults of the engine, over the zoo."""
