"""What the batch APIs of known providers do differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from yarl import URL

from batchwright.submitting.drafts import BatchLimits

_USUAL = BatchLimits()
Form: TypeAlias = Literal["openai", "mistral", "anthropic"]


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """A provider, or all that have no differences of their own."""

    name: str
    hosts: tuple[str, ...]
    """Ends of the names of its hosts."""
    form: Form = "openai"
    limits: BatchLimits = _USUAL
    windows: tuple[str, ...] | None = ("24h",)
    """Completion windows that it takes; None: any."""
    purpose: str = "batch"
    """Purpose of uploaded input files."""
    upload_path: str = "/files"
    strips_version: bool = False
    """Whether the URLs of lines and the endpoint of a batch lack `/v1`."""
    has_metadata: bool = True
    """Whether it keeps metadata of a batch. Where it does not, a batch is found again by its input file."""


_MB = 1_000_000

ANTHROPIC_KIND = ProviderKind(
    "Anthropic", ("api.anthropic.com",), form="anthropic", limits=BatchLimits(100_000, 250 * _MB)
)
KINDS = (
    ProviderKind("OpenAI", ("api.openai.com",)),
    ProviderKind(
        "Azure",
        (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com"),
        limits=BatchLimits(100_000, 200 * _MB),
        strips_version=True,
    ),
    ProviderKind("Groq", ("api.groq.com",), limits=BatchLimits(50_000, 200 * _MB), windows=None),
    ProviderKind(
        "Together",
        ("api.together.xyz", "api.together.ai"),
        limits=BatchLimits(50_000, 100 * _MB),
        purpose="batch-api",
        upload_path="/files/upload",
        has_metadata=False,
    ),
    ProviderKind("Mistral", ("api.mistral.ai",), form="mistral", limits=BatchLimits(100_000, 200 * _MB), windows=None),
    ProviderKind("Doubleword", ("api.doubleword.ai",), windows=("1h", "24h")),
    ANTHROPIC_KIND,
)
OTHERS = ProviderKind("an OpenAI-compatible provider", (), windows=None)
"""All others, batchwright's own service among them."""


def kind_of(base_url: str) -> ProviderKind:
    """Return the kind of the provider at an address."""
    host = URL(base_url).host or ""
    return next((kind for kind in KINDS if any(host == end or host.endswith(end) for end in kind.hosts)), OTHERS)
