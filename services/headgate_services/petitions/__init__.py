"""Petitions with a limit per submitter, counted in PostgreSQL.

`headgate run petitions` starts it; `create_app` returns the application for another server or a test.
"""

from headgate_services.common.settings import SettingsError
from headgate_services.petitions.app import create_app, main
from headgate_services.petitions.config import PetitionsSettings

__all__ = [
    "PetitionsSettings",
    "SettingsError",
    "create_app",
    "main",
]
