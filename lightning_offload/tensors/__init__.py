"""Facts about torch's tensors and ops that both capture and the runtime rest on; no policy, no state of a step."""
