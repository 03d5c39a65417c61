# Generated from src/headgate/leases/_async/__init__.py by tools/unasync.py. Do not edit.
"""Gates that decide from chunks, for threads."""
