"""PostgreSQL, metrics, and stubs for tests."""
