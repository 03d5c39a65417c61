"""Text fields that every database and mail server accepts."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def check_storable(text: str) -> str:
    """Return the text if it can be stored in PostgreSQL and encoded as UTF-8; a pydantic validator.

    Raises:
        ValueError: The text has a NUL character or an unpaired surrogate.
    """
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    if _SURROGATE.search(text):
        raise ValueError("must not contain half of a surrogate pair")
    return text


STORABLE = AfterValidator(check_storable)
"""For text with a length: `Annotated[str, Field(min_length=1), STORABLE]`. The order matters for the error message."""

Text = Annotated[str, STORABLE]
"""Text that can be stored."""
