"""Converting a GGUF file to a folder in transformers format.

The work is done by a child process (`batchwright.models.convert_gguf`): it can set up transformers and gguf without
touching the caller's settings or terminal, and all of its memory is freed afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from batchwright.errors import MissingExtra, ModelCacheError, UnsupportedModel
from batchwright.models.cache import Progress, cache_dir, require_free

_NEEDED = ("torch", "transformers", "gguf", "tokenizers", "safetensors")
_CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class Message(msgspec.Struct, frozen=True):
    """One line that the child writes to stdout: progress, the space that it needs, or the reason why it gave up.

    `kind` is "progress", "room", "write" (the output cannot be written) or "unsupported" (the file cannot be
    converted).
    """

    text: str
    kind: str = "progress"
    needs_bytes: int = 0
    """Bytes that the output takes while it is written, if `kind` is "room"."""


def require_converter() -> None:
    """Raise MissingExtra unless the libraries that convert GGUF files are installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"converting a GGUF model needs {', '.join(missing)}: install it with pip install 'batchwright[engine]'"
        )


def require_gguf(source: Path) -> None:
    """Raise UnsupportedModel unless `source` can be read and begins as a GGUF file does."""
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UnsupportedModel(f"{source} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise UnsupportedModel(f"{source} is not a GGUF file: it does not begin with 'GGUF'")


def convert_gguf(source: Path, model: Path, work: Path, progress: Progress, *, as_numbers: bool = False) -> None:
    """Convert the GGUF file `source` into the existing folder `model`; the child's log goes into `work`.

    The weights are stored in bfloat16: rounding to it moves a quantized weight by at most 1/256 of its value, far less
    than the quantization itself did. A file that holds float16 or float32 weights keeps them exactly. With
    `as_numbers`, the layers' weights of Llamas and similar models remain the numbers in the file (`gguf_numbers.py`),
    which take a third of the space, and which only the fused body reads.

    Raises UnsupportedModel if transformers cannot convert this file correctly, ModelCacheError if the cache has too
    little space, the result cannot be written or the child was killed.
    """
    # -P: a file in the current folder must not shadow one of the libraries.
    command = [sys.executable, "-P", "-m", "batchwright.models.convert_gguf", str(source), str(model)]
    command.append("numbers" if as_numbers else "values")
    log = work / "converter.log"
    refusal: Message | None = None
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # stays open while we live: the child exits when it closes
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | _CHILD_ENVIRONMENT,
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                message = msgspec.json.decode(line, type=Message)
                if message.kind == "progress":
                    progress(message.text)
                elif message.kind == "room":
                    require_free(cache_dir(), message.needs_bytes)
                else:
                    refusal = message
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        return
    if refusal is not None and refusal.kind == "write":
        raise ModelCacheError(f"cannot write the converted {source.name}: {refusal.text}")
    if child.returncode < 0:
        raise ModelCacheError(
            f"the conversion of {source} was ended by signal {-child.returncode}; if nobody sent it, the memory ran"
            " out: the whole model must fit in it"
        )
    last = [f"exit {child.returncode}", *log.read_text(errors="replace").strip().splitlines()][-1]
    raise UnsupportedModel(f"{source} cannot be converted: {last if refusal is None else refusal.text}")
