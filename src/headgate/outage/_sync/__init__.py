# Generated from src/headgate/outage/_async/__init__.py by tools/unasync.py. Do not edit.
"""Gates that survive outages, for threads."""
