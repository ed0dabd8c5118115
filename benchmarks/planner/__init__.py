"""How good plans are: the planner against a proven bound and against every published policy, all on one simulator."""
