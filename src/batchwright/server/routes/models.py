"""`/v1/models`: what may stand as `model` in a body."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from batchwright.errors import ModelNotFound
from batchwright.server.http.context import ServicesOf
from batchwright.service.composition import Services

router = APIRouter(tags=["Online"])


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When its files were made; of a model elsewhere, when this service was started."""
    owned_by: str = "batchwright"


class ModelList(BaseModel):
    """All of them, the default one first."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def list_models(services: ServicesOf) -> ModelList:
    """The models that are served here."""
    return ModelList(data=[_model(services, name) for name in services.inference.models])


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, services: ServicesOf) -> Model:
    """One of them. A name may have slashes in it."""
    if model not in services.inference.models:
        raise ModelNotFound(f"model {model!r} is not served here: GET /v1/models lists those that are")
    return _model(services, model)


def _model(services: Services, name: str) -> Model:
    return Model(id=name, created=int(services.models_made_at.get(name, services.started_at)))
