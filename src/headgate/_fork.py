"""Placeholder until the real one is merged."""


def watch(target: object) -> None:
    """Do nothing."""
