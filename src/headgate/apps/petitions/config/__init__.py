"""What operators set."""

from headgate.apps.petitions.config.environment import SettingsError
from headgate.apps.petitions.config.petition_config import (
    PetitionQueueConfig,
    PetitionRateLimitConfig,
    load_petition_config,
)
from headgate.apps.petitions.config.settings import Settings, load_settings

__all__ = [
    "PetitionQueueConfig",
    "PetitionRateLimitConfig",
    "Settings",
    "SettingsError",
    "load_petition_config",
    "load_settings",
]
