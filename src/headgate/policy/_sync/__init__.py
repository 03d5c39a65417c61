# Generated from src/headgate/policy/_async/__init__.py by tools/unasync.py. Do not edit.
"""Limiters that follow a policy, for threads."""
