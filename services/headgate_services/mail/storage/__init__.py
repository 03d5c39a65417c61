"""Storage of inboxes, threads and messages in SQLite or PostgreSQL."""
