"""PostgreSQL: the store, and counters in a table of the application."""

from headgate._extras import needing

with needing("headgate.stores.postgres", "postgres"):
    from headgate.stores.postgres.bucket_table import AsyncBucketTable, BucketTable
    from headgate.stores.postgres.buckets import BucketDecision, Cleanup, Usage
    from headgate.stores.postgres.migrations import migrate
    from headgate.stores.postgres.store import PostgresStore

__all__ = [
    "AsyncBucketTable",
    "BucketDecision",
    "BucketTable",
    "Cleanup",
    "PostgresStore",
    "Usage",
    "migrate",
]
