"""Where inboxes, threads and messages are kept: SQLite or PostgreSQL."""
