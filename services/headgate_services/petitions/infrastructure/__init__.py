"""The outside world: PostgreSQL, metrics, stand-ins for tests."""
