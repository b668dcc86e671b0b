"""What every part of the configuration is made of.

Invariant: a section is immutable and refuses keys that it does not know.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

type Positive = Annotated[int, Field(ge=1)]
type Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: immutable, with no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
