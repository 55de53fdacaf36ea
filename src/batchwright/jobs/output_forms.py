"""The forms of an output, chosen by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from batchwright.errors import InputError
from batchwright.jobs.compression import COMPRESSED, without_compression

OutputContent: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet"]

_CONTENT: dict[str, OutputContent] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What an output contains."""

    content: OutputContent = "jsonl"
    compression: str = ""
    """Extension of the compression; empty for none."""

    @property
    def is_table(self) -> bool:
        """Whether it can only hold a table."""
        return self.content != "jsonl"

    @property
    def is_plain(self) -> bool:
        """Whether lines can be appended to it."""
        return self.content == "jsonl" and not self.compression


def output_form_of(path: Path) -> OutputForm:
    """The form that the name of an output selects; JSON Lines if it has no extension. Raises `InputError`."""
    name = path.name.lower()
    if not path.suffix:
        return OutputForm()
    content = _CONTENT.get(Path(without_compression(name)).suffix)
    compression = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    if content is None or (content == "parquet" and compression):
        known = ", ".join([*_CONTENT, *(f".jsonl{suffix}" for suffix in COMPRESSED)])
        raise InputError(f"output {path}: its extension stands for no form that can be written; use one of {known}")
    return OutputForm(content, compression)
