"""Local folders in transformers format: is everything there that loading needs?"""

from __future__ import annotations

from pathlib import Path

import msgspec

from batchwright.errors import ModelNotFound, UnsupportedModel

_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def require_complete(folder: Path) -> Path:
    """Return `folder`, absolute, when it holds a configuration and all its safetensors weights.

    Raises ModelNotFound naming what is missing, UnsupportedModel when the weights are in another format.
    """
    folder = folder.absolute()
    missing = missing_files(folder)
    if not missing:
        return folder
    other = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if missing == ["*.safetensors"] and other:
        raise UnsupportedModel(
            f"{folder} holds its weights as {other[0]}, not as safetensors; "
            + (
                f"give the path of the file itself: {folder / other[0]}"
                if other[0].endswith(".gguf")
                else "load it with transformers and write it again with save_pretrained"
            )
        )
    raise ModelNotFound(f"{folder} is not a model in transformers format: it lacks {', '.join(missing)}")


def missing_files(folder: Path) -> list[str]:
    """Names of the needed files that `folder` lacks: empty when the model in it is complete."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / _INDEX
    if index.is_file():
        try:
            shards = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.DecodeError:
            return [*missing, f"a readable {_INDEX}"]
        return missing + [name for name in sorted(shards) if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing
