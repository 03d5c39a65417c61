"""Adapters of the ports."""
