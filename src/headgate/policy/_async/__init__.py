"""Limiters that follow a policy, for coroutines. `headgate.policy._sync` is generated from here by `tools/unasync.py`."""
