"""Gates of network stores, for coroutines. `headgate.stores.remote._sync` is generated from here by `tools/unasync.py`."""
