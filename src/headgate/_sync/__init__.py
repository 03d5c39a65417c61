# Generated from src/headgate/_async/__init__.py by tools/unasync.py. Do not edit.
"""What users call, for threads."""
