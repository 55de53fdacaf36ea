"""`HttpBatches`: what the batch APIs of all providers have in common."""

from __future__ import annotations

from batchwright.inference.batches.file_client import FileClient
from batchwright.inference.batches.kinds import ProviderKind
from batchwright.inference.batches.provider import BatchProvider


class HttpBatches(BatchProvider):
    """Base class of batch APIs over HTTP, in which custom ids are the names of lines."""

    def __init__(self, client: FileClient, kind: ProviderKind) -> None:
        self.name = kind.name
        self.limits = kind.limits
        self._client = client
        self._kind = kind

    def custom_id(self, uuid: str, name: str) -> str:
        return name

    def line_name(self, custom_id: str) -> str:
        return custom_id

    async def close(self) -> None:
        await self._client.close()
