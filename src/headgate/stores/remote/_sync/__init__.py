# Generated from src/headgate/stores/remote/_async/__init__.py by tools/unasync.py. Do not edit.
"""Gates of network stores, for threads."""
