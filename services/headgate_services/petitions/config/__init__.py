"""What operators set."""

from headgate_services.petitions.config.environment import SettingsError
from headgate_services.petitions.config.petition_config import (
    PetitionQueueConfig,
    PetitionRateLimitConfig,
    load_petition_config,
)
from headgate_services.petitions.config.settings import Settings, load_settings

__all__ = [
    "PetitionQueueConfig",
    "PetitionRateLimitConfig",
    "Settings",
    "SettingsError",
    "load_petition_config",
    "load_settings",
]
