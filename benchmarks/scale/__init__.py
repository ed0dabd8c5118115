"""What 1 to 1024 devices would make of a step that one was planned for, simulated; docs/scale.md has the model.

`interconnects` are links, `collectives` what exchanging gradients over them costs, `gradients` what is exchanged and
when, and `cluster` puts these together. `command` shows it beside a plan.
"""
