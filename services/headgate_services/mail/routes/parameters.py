"""Parameters that several endpoints share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from headgate_services.mail.schemas import Text

Id = Annotated[Text, Path()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]

PAGE = 50
"""How many things a list shows unless asked for another number."""
