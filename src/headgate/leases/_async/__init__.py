"""Gates that decide from chunks, for coroutines. `headgate.leases._sync` is generated from here by `tools/unasync.py`."""
