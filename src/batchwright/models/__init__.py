"""Where models come from: built-in names, local folders, GGUF files and hub ids, all made ready to load.

`resolve` is the one entry point: whatever the user typed, it answers with a local folder in
transformers format. Built-in models and GGUF files are kept, converted once, in `cache_dir()`.
"""

from batchwright.models.cache import cache_dir
from batchwright.models.catalog import BUILTIN, DEFAULT_MODEL, BuiltinModel, Kind
from batchwright.models.listing import ModelStatus, inventory
from batchwright.models.resolution import fingerprint, resolve

__all__ = [
    "BUILTIN",
    "DEFAULT_MODEL",
    "BuiltinModel",
    "Kind",
    "ModelStatus",
    "cache_dir",
    "fingerprint",
    "inventory",
    "resolve",
]
