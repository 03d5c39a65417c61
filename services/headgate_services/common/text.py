"""Text that every database and mail server takes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def check_storable(text: str) -> str:
    """Return a text, if PostgreSQL can keep it and UTF-8 can encode it; for pydantic.

    Raises:
        ValueError: It cannot be stored.
    """
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    if _SURROGATE.search(text):
        raise ValueError("must not contain half of a surrogate pair")
    return text


STORABLE = AfterValidator(check_storable)
"""For text with a length: `Annotated[str, Field(min_length=1), STORABLE]`. In another order, errors speak of items."""

Text = Annotated[str, STORABLE]
"""Text that can be stored; anything else is a 422."""
