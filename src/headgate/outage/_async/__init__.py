"""Gates that survive outages, for coroutines. `headgate.outage._sync` is generated from here by `tools/unasync.py`."""
