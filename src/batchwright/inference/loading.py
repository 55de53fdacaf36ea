"""Opening what computes requests: models in this process, or a remote endpoint."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.engine_config import EngineConfig
from batchwright.errors import BatchwrightError, EndpointError, InputError, MissingExtra
from batchwright.inference.endpoint_keys import EndpointKey
from batchwright.inference.endpoint_retries import is_outage
from batchwright.inference.inference import Route
from batchwright.inference.routing import RoutedInference
from batchwright.models import fingerprint, resolve
from batchwright.models.cache import Progress
from batchwright.pacing.concurrency import FIRST_LEVEL
from batchwright.pacing.limits import ConfiguredLimit
from batchwright.version import __version__
from batchwright.wire.dialects import OPENAI, Dialect

if TYPE_CHECKING:
    from batchwright.encoder.classifier import Classifier
    from batchwright.encoder.encoder import Encoder
    from batchwright.encoder.texts import TextTokenizer
    from batchwright.engine.engine import Engine
    from batchwright.engine.tokenizer import Tokenizer
    from batchwright.inference.endpoint import EndpointInference
    from batchwright.inference.engine_inference import GeneratingEngine
    from batchwright.inference.metering import Meter
    from batchwright.kept_costs import KeptCosts

_OTHER_DESCRIPTORS = 64
"""File descriptors reserved for the database, files and listening sockets."""
_MOST_FOUND = 1000
"""Most requests in progress at an endpoint, if their number is not set."""


def load_models(
    model: str | None,
    embedding_model: str | None,
    config: EngineConfig,
    progress: Progress = lambda text: None,
    *,
    forms: bool = False,
) -> tuple[Engine | None, Encoder | None]:
    """Load a generating model, an embedding model, or both. Takes seconds, since it imports torch.

    `progress` is called with a line of text at each step that may take long; `forms` is as in `Engine`.

    Raises `InputError` for an option that does not fit the model or the machine, `MissingExtra`, and the errors of
    loading a model.
    """
    with _translated_errors("running a model", ", or have an endpoint elsewhere compute: --backend http://host/v1"):
        # Importing torch takes seconds, so a wrong name is reported first.
        if model is not None:
            resolve_generating(model, config, progress)
        if embedding_model is not None:
            resolve(embedding_model, progress=progress, weights="values")
        if model is not None and _is_on_cpu(config.device):
            prepare_kernels(progress)
        progress("reading the weights")
        from batchwright.encoder.encoder import Encoder
        from batchwright.engine.engine import Engine

        encoder = None if embedding_model is None else Encoder(embedding_model, device=config.device)
        return None if model is None else Engine(model, config, forms=forms), encoder


@contextmanager
def _translated_errors(what: str, remedy: str = "", *, of: str = "") -> Iterator[None]:
    """Raise `MissingExtra` for a module that `what` needs and is not installed, and `InputError` for a ValueError.

    `remedy` is added to the advice about a missing module, `of` is put before the message of a ValueError.
    """
    try:
        yield
    except BatchwrightError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{what} needs {error.name}; install it: pip install 'batchwright[engine]'{remedy}"
        ) from error
    except ValueError as error:
        raise InputError(f"{of}{error}") from error


def _is_on_cpu(device: str) -> bool:
    """Whether `device` is the CPU. Imports torch for other names. Raises ValueError for one that does not exist."""
    if device == "cpu":
        return True
    from batchwright.engine.bodies.load import choose_device

    return choose_device(device).type == "cpu"


def resolve_generating(model: str, config: EngineConfig, progress: Progress = lambda text: None) -> Path:
    """Return the folder of a generating model, with weights in the form that an engine with `config` reads.

    torch is imported only for a GGUF file, if the device is not "cpu". Raises the errors of `resolve`, and `InputError`
    for a device that does not exist.
    """
    if not Path(model).expanduser().is_file():
        return resolve(model, progress=progress)
    with _translated_errors("converting a GGUF file"):
        weights = config.weights_form(on_cpu=_is_on_cpu(config.device))
    return resolve(model, progress=progress, weights=weights)


def load_engine(model: str, config: EngineConfig, progress: Progress = lambda text: None) -> Engine:
    """Load a generating model. Raises the errors of `load_models`."""
    engine, _ = load_models(model, None, config, progress)
    assert engine is not None
    return engine


def measure_costs(engine: Engine, progress: Progress = lambda text: None) -> KeptCosts:
    """Measure the steps of an idle engine for some seconds, and save and return their costs.

    Raises `BatchwrightError` if too few steps were measured, or they could not be saved.
    """
    from batchwright.engine.cost_probe import probe

    progress("measuring what steps take, once")
    probe(engine)
    if (measured := engine.keep_costs(is_run=False)) is None:
        raise BatchwrightError("the probe measured too few steps: give --costs FILE, or run a job first")
    return measured


def load_classifiers(
    names: Sequence[str], device: str, progress: Progress = lambda text: None
) -> tuple[Classifier, ...]:
    """Load sequence classifiers, such as cross-encoders. Raises the errors of `load_models`."""
    for name in names:
        resolve(name, progress=progress, weights="values")
    if not names:
        return ()
    with _translated_errors("running a model"):
        from batchwright.encoder.classifier import Classifier

        return tuple(Classifier(name, device=device) for name in names)


def prepare_kernels(progress: Progress) -> None:
    """Compile the engine's kernels if they are not in the cache. Raises ModuleNotFoundError without torch."""
    from batchwright.engine.native.build import prepare_library

    prepare_library(progress=progress)


def load_tokenizer(model: str, config: EngineConfig | None = None) -> Tokenizer:
    """Load only the tokenizer of a generating model, which an engine with `config` will run; None: no engine will.

    Takes up to seconds; raises the errors of `load_models`.
    """
    with _translated_errors("counting tokens", of=f"the tokenizer of {model} cannot be loaded: "):
        folder = resolve(model, weights="either") if config is None else resolve_generating(model, config)
        from batchwright.engine.tokenizer import Tokenizer

        vocab_size, context = _text_sizes(folder)
        return Tokenizer(folder, vocab_size, context=context)


def load_text_tokenizer(model: str) -> TextTokenizer:
    """Load only the tokenizer of an embedding model. Takes seconds, since it imports torch; raises as `load_models`."""
    folder = resolve(model, weights="values")
    with _translated_errors("counting tokens", of=f"the tokenizer of {model} cannot be loaded: "):
        from batchwright.encoder.encoder import tokenizer_of
        from batchwright.inference.encoder_inference import REMEDY

        tokenizer = tokenizer_of(folder)
    tokenizer.remedy = REMEDY
    return tokenizer


def _text_sizes(folder: Path) -> tuple[int, int | None]:
    """Return the size of a model's vocabulary, and of its context, if it has one."""
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_bytes())
        sizes = config.get("vocab_size"), config.get("max_position_embeddings")
        if "text_config" not in config and all(type(each) is int for each in sizes):
            return sizes
    from transformers import AutoConfig  # takes seconds, as it imports torch

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    return config.vocab_size, getattr(config, "max_position_embeddings", None)


def system_fingerprint(engine: Engine) -> str | None:
    """Return a fingerprint of the weights, of the implementation and its precision, and of this version.

    Reads model files that have changed. None if the model's files no longer exist.
    """
    try:
        weights = fingerprint(engine.model_name)
    except (BatchwrightError, OSError):
        return None
    parts = (__version__, weights, engine.stats.implementation)
    return f"fp_{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]}"


def local_inference(
    engine: GeneratingEngine | None,
    encoder: Encoder | None,
    aliases: Mapping[str, str] | None = None,
    *,
    fingerprint: str | None = None,
    classifiers: Sequence[Classifier] = (),
) -> RoutedInference:
    """Return an `Inference` of loaded models, which are closed with it. `fingerprint` is that of the engine."""
    from batchwright.inference.embedding_inference import EmbeddingInference
    from batchwright.inference.engine_inference import EngineInference

    routes: list[Route] = []
    if engine is not None:
        routes.append(EngineInference(engine, system_fingerprint=fingerprint))
    if classifiers:
        from batchwright.inference.classifier_inference import ClassifierInference

        # A request to classify that names no model goes to a model with several labels, if there is one.
        routes += map(ClassifierInference, sorted(classifiers, key=lambda each: each.scores_pairs))
    if encoder is not None:
        routes.append(EmbeddingInference(encoder))  # it scores pairs that name no model if nothing else does
    return RoutedInference(routes, aliases)


def make_endpoint(
    address: str,
    key: EndpointKey,
    models: Mapping[str, str] | None = None,
    *,
    max_concurrency: int | None,
    max_waiting: int,
    first_concurrency: int | None = None,
    limits: Sequence[ConfiguredLimit] = (),
    dialect: Dialect = OPENAI,
    meter: Meter | None = None,
) -> EndpointInference:
    """Return an endpoint, without sending anything yet. `meter` counts what calls cost.

    `max_concurrency`: most concurrent requests; None: as many as turn out to deliver the most. That number is also
    searched for below `max_concurrency` if `first_concurrency` sets the number to begin with. `limits`: rate limits of
    the endpoint, which are obeyed.

    Raises `InputError` for an address or setting that cannot be used, and `MissingExtra`.
    """
    try:
        from batchwright.inference.endpoint import EndpointInference
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"an endpoint elsewhere needs {error.name}; install it: pip install 'batchwright[remote]'"
        ) from error

    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = sys.maxsize
    if max_concurrency is not None and max_concurrency > descriptors - _OTHER_DESCRIPTORS:
        raise InputError(
            f"backend_concurrency={max_concurrency}: each request takes a file descriptor, of which this process may "
            f"have {descriptors}, {_OTHER_DESCRIPTORS} of them for other uses; lower it, or raise the limit (ulimit -n)"
        )
    try:
        return EndpointInference(
            address,
            key,
            models,
            dialect=dialect,
            max_concurrency=max_concurrency or max(1, min(_MOST_FOUND, descriptors - _OTHER_DESCRIPTORS)),
            first_concurrency=first_concurrency or max_concurrency or FIRST_LEVEL,
            limits=limits,
            max_waiting=max_waiting,
            meter=meter,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


async def open_endpoint(
    address: str,
    key: EndpointKey,
    models: Mapping[str, str] | None = None,
    *,
    waits: bool = True,
    **options: Any,
) -> EndpointInference:
    """Open an endpoint and ask for its models. With `waits`, it need not answer yet. `options`: see `make_endpoint`.

    Raises what `make_endpoint` raises, and `EndpointError` for an answer that no endpoint gives.
    """
    endpoint = make_endpoint(address, key, models, **options)
    try:
        await endpoint.discover(waits=waits)
    except BaseException:
        await endpoint.close()
        raise
    return endpoint


async def open_endpoints(
    addresses: Sequence[tuple[str, EndpointKey]], models: Mapping[str, str] | None = None, **options: Any
) -> Route:
    """Open several endpoints, each with its key, that share the calls; otherwise like `open_endpoint`.

    One has to answer now. The models of the others are known when they answer. If none answers, the first one's error
    is raised.
    """
    opened: list[EndpointInference] = []
    silence: EndpointError | None = None
    one_answers = False
    try:
        for address, key in addresses:
            endpoint = make_endpoint(address, key, models, **options)
            opened.append(endpoint)
            try:
                await endpoint.discover(waits=one_answers)
                one_answers = True
            except EndpointError as error:
                if one_answers or not is_outage(error):
                    raise
                silence = silence or error
        if silence is not None and not one_answers:
            raise silence
        for endpoint in opened:
            if endpoint.why_not_ready is not None:
                await endpoint.discover()  # this keeps asking it
    except BaseException:
        for endpoint in opened:
            await endpoint.close()
        raise
    if len(opened) == 1:
        return opened[0]
    from batchwright.inference.endpoint_pool import EndpointPool

    return EndpointPool(opened)
