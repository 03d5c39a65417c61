"""Who submits what, how often, and what can go wrong: no I/O, no framework."""
