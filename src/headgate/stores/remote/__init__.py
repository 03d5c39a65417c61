"""The engine of all stores over a network: batches of calls, and deadlines.

- `batching` decides which calls are sent together, and what a passed deadline means. It does no I/O and reads no clock.
- `tasks` and `threads` are the two drivers: they send and receive messages for coroutines and for threads.
- `peer` is the interface of a store: connect, encode calls, read replies.
- `_async/gate` and `_sync/gate` are the gates of limiters on such a store.
"""
