"""`ApiModel`, the base of the objects that the HTTP API accepts and returns."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """An object of the API, whose fields are described by the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)
