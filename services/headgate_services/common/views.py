"""Response models of stored rows."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict


class RowView(BaseModel):
    """Response model that is read from the attributes of a row."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, row: object) -> Self:
        """Return the response for a row."""
        return cls.model_validate(row)
