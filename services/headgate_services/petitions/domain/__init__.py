"""Petitions, counters and errors, without I/O."""
