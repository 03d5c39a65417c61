"""What a service shows of what it keeps."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict


class RowView(BaseModel):
    """What is shown of a row of a table, or of another object with such attributes."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, row: object) -> Self:
        """Return the view of a row."""
        return cls.model_validate(row)
