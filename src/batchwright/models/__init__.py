"""Models: built-in names, local folders, GGUF files and hub ids, all resolved to a folder that can be loaded.

`resolve` is the single entry point: it returns a local folder in transformers format for any name that a user may type.
Built-in models and GGUF files are converted once and kept in `cache_dir()`.
"""

from batchwright.models.cache import ModelStatus, cache_dir, inventory
from batchwright.models.catalog import BUILTIN, DEFAULT_MODEL, BuiltinModel, Kind
from batchwright.models.resolution import fingerprint, require_generating, resolve, served_name

__all__ = [
    "BUILTIN",
    "DEFAULT_MODEL",
    "BuiltinModel",
    "Kind",
    "ModelStatus",
    "cache_dir",
    "fingerprint",
    "inventory",
    "require_generating",
    "resolve",
    "served_name",
]
