"""Differences between the batch APIs of known providers, with the page that documents each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from yarl import URL

from batchwright.submitting.drafts import BatchLimits

_USUAL = BatchLimits()
Form: TypeAlias = Literal["openai", "mistral", "anthropic", "fireworks"]


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """A provider, or all providers without known differences."""

    name: str
    hosts: tuple[str, ...]
    """Suffixes of the names of its hosts."""
    form: Form = "openai"
    limits: BatchLimits = _USUAL
    windows: tuple[str, ...] | None = ("24h",)
    """Completion windows that it accepts; None: any."""
    window_span: tuple[str, str] | None = None
    """Shortest and longest completion window, in place of `windows`, if it accepts any in between."""
    purpose: str = "batch"
    """Purpose of uploaded input files."""
    upload_path: str = "/files"
    strips_version: bool = False
    """Whether the URLs of lines and the endpoint of a batch lack `/v1`."""
    has_metadata: bool = True
    """Whether it keeps the metadata of a batch. If not, a batch is found again by its input file."""


_MB = 1_000_000

# Unless stated otherwise, a batch costs half of what its requests would cost, and the amount that may be enqueued
# depends on the customer: it is learned from acceptances and refusals.

# https://docs.anthropic.com/en/docs/build-with-claude/batch-processing: 100,000 requests, 256 MB, 24 hours.
ANTHROPIC_KIND = ProviderKind(
    "Anthropic", ("api.anthropic.com",), form="anthropic", limits=BatchLimits(100_000, 250 * _MB)
)
KINDS = (
    # https://platform.openai.com/docs/api-reference/batch/create: 50,000 requests, 200 MB, 24h. Prompt tokens that may
    # be enqueued are limited by model and usage tier.
    ProviderKind("OpenAI", ("api.openai.com",)),
    # https://learn.microsoft.com/azure/ai-foundry/openai/quotas-limits#batch-limits: 100,000 requests, 200 MB, 500
    # files; how-to/batch: aims at 24 hours, and a batch does not expire. Enqueued tokens are limited by deployment.
    ProviderKind(
        "Azure",
        (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com"),
        limits=BatchLimits(100_000, 200 * _MB),
        strips_version=True,
    ),
    # https://console.groq.com/docs/batch: 50,000 lines, 200 MB, windows from 24h to 7d, any number of batches. Half the
    # price, also for prompt cache hits.
    ProviderKind("Groq", ("api.groq.com",), limits=BatchLimits(50_000, 200 * _MB), window_span=("24h", "7d")),
    # https://docs.together.ai/docs/batch-inference: 50,000 requests, 100 MB, 24h, 30 billion tokens enqueued for each
    # model. Only some models are cheaper in batches.
    ProviderKind(
        "Together",
        ("api.together.xyz", "api.together.ai"),
        limits=BatchLimits(50_000, 100 * _MB),
        purpose="batch-api",
        upload_path="/files/upload",
        has_metadata=False,
    ),
    # https://docs.mistral.ai/resources/known-limitations: 100,000 requests, 512 MB; `timeout_hours` is 24 unless given.
    ProviderKind("Mistral", ("api.mistral.ai",), form="mistral", limits=BatchLimits(100_000, 512 * _MB), windows=None),
    # https://docs.doubleword.ai/inference-api/batch-inference: 50,000 requests, 200 MB; docs/src/batches.md of
    # https://github.com/doublewordai/dw: 24h and, dearer, 1h.
    ProviderKind("Doubleword", ("api.doubleword.ai",), windows=("1h", "24h")),
    # https://docs.fireworks.ai/guides/batch-inference: any number of requests, 24 hours; api-reference/
    # upload-dataset-files: 150 MB in one upload. One refused line fails the whole batch, so we set limits.
    ProviderKind("Fireworks", ("api.fireworks.ai",), form="fireworks", limits=BatchLimits(50_000, 150 * _MB)),
    ANTHROPIC_KIND,
)
OTHERS = ProviderKind("an OpenAI-compatible provider", (), windows=None)
"""All others, batchwright's own service among them."""


def kind_of(base_url: str) -> ProviderKind:
    """Return the kind of the provider at an address."""
    host = URL(base_url).host or ""
    return next((kind for kind in KINDS if any(host == end or host.endswith(end) for end in kind.hosts)), OTHERS)
