"""What all stores over a network have in common: how calls leave together, and for how long they are waited for.

- `batching` decides which calls leave when, on which connection, and what becomes of them. It does no I/O and has no clock.
- `tasks` and `threads` are the two drivers: they carry messages for it, for coroutines and for threads.
- `peer` says what a store has to bring: how to connect, what to send for some calls, and how to read the replies.
- `gates` are the gates of limiters on such a store.
"""
