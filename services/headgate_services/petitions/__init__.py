"""Petitions with a limit per submitter, counted in PostgreSQL.

`headgate run petitions` starts it; `create_app` returns the application for another server or a test.
"""

from headgate_services.common.settings import SettingsError
from headgate_services.petitions.app import (
    cleanup,
    create_app,
    halt,
    inspect_submitter,
    main,
    reset_submitter,
    resume,
)
from headgate_services.petitions.config import PetitionsSettings

__all__ = [
    "PetitionsSettings",
    "SettingsError",
    "cleanup",
    "create_app",
    "halt",
    "inspect_submitter",
    "main",
    "reset_submitter",
    "resume",
]
