"""Models from the model hub, through huggingface_hub and its cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from batchwright.errors import BatchwrightError, DownloadError, MissingExtra, ModelNotFound, UnsupportedModel
from batchwright.models.cache import Progress
from batchwright.models.model_files import missing_files

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_UNWANTED = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]
"""Second copies of the same weights in other layouts."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_REACH_TIMEOUT_S = 10.0


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id, `org/name`."""
    return _ID.fullmatch(name) is not None and ".." not in name


def cached_snapshot(model_id: str) -> Path | None:
    """Return the folder of `model_id` in the hub cache if it has everything that `download` would fetch, else None.

    Never uses the network.
    """
    hub = _import_hub()
    try:
        folder = Path(
            hub.snapshot_download(model_id, local_files_only=True, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
        )
    except (OSError, ValueError):  # the hub's errors for "absent" and "incomplete" are OSErrors
        return None
    return None if missing_files(folder) else folder


def loadable_snapshot(model_id: str) -> Path | None:
    """Return the folder of `model_id` in the hub cache if it can be loaded, else None.

    Other programs may have fetched fewer files than `download` does. For use if the hub cannot be reached.
    """
    config = _import_hub().try_to_load_from_cache(model_id, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZERS)
    return folder if has_tokenizer and not missing_files(folder) else None


def download(model_id: str, progress: Progress) -> Path:
    """Fetch `model_id` into the hub cache and return the folder of its snapshot.

    Before anything is fetched, the hub is asked once, with a short timeout, whether it has the model.

    Raises ModelNotFound if the hub does not have the model, UnsupportedModel if the model has no safetensors weights,
    DownloadError if the hub cannot be reached or refuses.
    """
    hub = _import_hub()
    try:
        info = hub.HfApi().model_info(model_id, timeout=_REACH_TIMEOUT_S, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = list(hub.utils.filter_repo_objects(files, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
        if not any(name.endswith(".safetensors") for name in wanted):
            raise UnsupportedModel(f"{model_id} has no safetensors weights on the hub, only {', '.join(sorted(files))}")
        size = sum(files[name] for name in wanted)
        progress(f"downloading {model_id} from the model hub ({size / 1e6:.0f} MB)")
        with _no_progress_bars():
            folder = Path(hub.snapshot_download(model_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except BatchwrightError:
        raise
    except Exception as error:  # the hub client passes on the errors of its HTTP library
        raise _explained(model_id, error) from error
    if missing := missing_files(folder):
        raise DownloadError(f"the download of {model_id} is not complete: {', '.join(missing)} not there; try again")
    return folder


def _explained(model_id: str, error: Exception) -> BatchwrightError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return DownloadError(f"{model_id} is gated: accept its terms on the hub, then set HF_TOKEN to your token")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(f"the hub has no model {model_id}, or it is private: for a private one, set HF_TOKEN")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return DownloadError(f"{model_id} is not in the hub cache, and HF_HUB_OFFLINE forbids fetching it")
    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadError(
        f"cannot fetch {model_id} from the model hub: {reason}. There is no local folder of that name either"
    )


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    if not before:
        disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "models from the hub need huggingface_hub: install it with pip install 'batchwright[engine]'"
        ) from error
    return huggingface_hub
