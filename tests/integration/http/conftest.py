"""Django wants its settings before parts of it are imported."""

from __future__ import annotations

import django
from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    LOGGING_CONFIG=None,
    REST_FRAMEWORK={"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []},
)
django.setup()
