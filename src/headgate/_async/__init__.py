"""What users call, for coroutines. `headgate._sync` is generated from here by `tools/unasync.py`."""
