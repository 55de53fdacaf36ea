"""Choosing and loading the models that compute a job, in this process or at an endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InputError
from batchwright.inference.batches.provider import BatchProvider
from batchwright.inference.batches.provider_batches import BatchJob, ProviderBatchInference
from batchwright.inference.batches.times import duration_seconds
from batchwright.inference.calls import LEAVE_OUT_MODEL, chosen_model
from batchwright.inference.endpoint_keys import EndpointKey
from batchwright.inference.inference import Call, Inference
from batchwright.inference.loading import (
    load_classifiers,
    load_models,
    load_text_tokenizer,
    load_tokenizer,
    local_inference,
    open_endpoints,
    system_fingerprint,
)
from batchwright.inference.metering import Meter
from batchwright.inference.replicas.cores import ReplicaCount
from batchwright.inference.replicas.opening import open_replicas
from batchwright.inference.replicas.ray_opening import open_ray_replicas, ray_count
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.inference.routing import ANY_MODEL, StandIn, not_found, not_served
from batchwright.jobs.lines import check_body, check_form, check_sent_body
from batchwright.models import BUILTIN, DEFAULT_MODEL, Kind, served_name
from batchwright.models.cache import Progress
from batchwright.pacing.limits import ConfiguredLimit
from batchwright.request import Prompt, SamplingParams
from batchwright.wire.dialects import OPENAI, Dialect
from batchwright.wire.requests import CLASSIFIER_URLS, EMBEDDINGS_URL, ENCODER_URLS, PAIR_URLS, read_model

Via: TypeAlias = Literal["live", "batch", "auto"]

if TYPE_CHECKING:
    from batchwright.encoder.classifier import Classifier
    from batchwright.encoder.encoder import Encoder
    from batchwright.encoder.texts import TextTokenizer
    from batchwright.engine.engine import Engine
    from batchwright.engine.tokenizer import Tokenizer


_EMBEDDED = PAIR_URLS | {EMBEDDINGS_URL}
"""Endpoints whose lines an embedding model answers."""
_LIVE_AT_ONCE = 64
"""Concurrent live requests that the forecast of a deadline assumes, if their number is only found as they run."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Choice of the models that compute a job. Raises `InputError` for a choice that contradicts itself."""

    model: str | None = None
    """Name of the model; None: the first of the endpoint, or in this process no model that generates."""
    embedding_model: str | None = None
    classifiers: tuple[str, ...] = ()
    """Sequence classifiers, such as cross-encoders, for lines that are ranked, scored or classified."""
    config: EngineConfig = field(default_factory=EngineConfig)
    backend: str | None = None
    """Address of an OpenAI-compatible endpoint; None: models in this process."""
    key: EndpointKey = field(default_factory=EndpointKey)
    """API key for the endpoint."""
    others: tuple[tuple[str, EndpointKey], ...] = ()
    """Further endpoints, or further keys for the same one, that share the calls."""
    dialect: Dialect = OPENAI
    """Form of the requests and answers of the endpoint."""
    concurrency: int | None = None
    """Most requests under way at the endpoint; None: as many as give the highest throughput."""
    limits: tuple[ConfiguredLimit, ...] = ()
    """Rate limits of the endpoint."""
    replicas: ReplicaCount | None = None
    """Number of processes, each with the models, that compute here or on a cluster; None: this process computes."""
    ray: str | None = None
    """Address of the Ray cluster on which replicas compute; None: this machine."""
    resources: RayResources | None = None
    """What each replica takes of a node of that cluster; None: one CPU."""
    served_model_names: tuple[str, ...] = ()
    via: Via = "live"
    """Whether the endpoint computes lines as requests, in its batches, or in batches as far as the deadline allows."""
    deadline: str | None = None
    """Duration such as `6h` within which all lines must be done; None: any time."""
    batch_window: str = "24h"
    """Completion window of batches."""

    def __post_init__(self) -> None:
        if self.limits and self.backend is None:
            raise InputError("rpm and tpm are limits of an endpoint elsewhere: name it with backend")
        if self.others and self.backend is None:
            raise InputError(f"also={self.others[0][0]!r}: further endpoints are given beside backend")
        if self.backend is not None and self.embedding_model is not None:
            raise InputError(
                f"embedding_model={self.embedding_model!r} with backend={self.backend!r}: lines say which of the "
                "endpoint's models they mean; leave it out"
            )
        if self.backend is not None and self.classifiers:
            raise InputError(
                f"classifiers={self.classifiers[0]!r} with backend={self.backend!r}: they are models in this process"
            )
        if self.backend is not None and (chosen := self.config.chosen()):
            name, value = next(iter(chosen.items()))
            raise InputError(f"{name}={value!r} with backend={self.backend!r}: it is for models in this process")
        if self.backend is not None and self.replicas is not None:
            raise InputError(
                f"replicas={self.replicas} with backend={self.backend!r}: they are for models on this machine"
            )
        self._check_ray()
        self._check_addresses()
        self._check_others()
        self._check_batches()

    def _check_ray(self) -> None:
        if self.ray is None:
            if self.resources is not None:
                raise InputError(f"resources ({self.resources}): they are of a Ray cluster; name it with ray")
            return
        if self.backend is not None:
            raise InputError(f"ray={self.ray!r} with backend={self.backend!r}: leave one of them out")
        if not self.ray.strip():
            raise InputError(f"ray={self.ray!r}: must be auto, local, or an address such as ray://host:10001")
        ray_count(self.replicas)

    def _check_addresses(self) -> None:
        try:
            from batchwright.inference.endpoint_address import endpoint_url
        except ModuleNotFoundError:
            return  # which is reported when the endpoint is opened
        for name, address in [("backend", self.backend), *(("also", each) for each, _ in self.others)]:
            try:
                if address is not None:
                    endpoint_url(address)
            except ValueError as error:
                raise InputError(f"{name} {error}") from None

    def _check_others(self) -> None:
        known: set[tuple[str | None, str | None]] = set()
        for address, key in ((self.backend, self.key), *self.others):
            found = None if address is None else address.rstrip("/").lower(), key.value
            if found in known:
                raise InputError(
                    f"also={address!r}: this address is given twice with the same key, which has its limits only once; "
                    "name another address, or the variable with another key"
                )
            known.add(found)

    def _check_batches(self) -> None:
        if self.via not in ("live", "batch", "auto"):
            raise InputError(f"via={self.via!r}: must be live, batch or auto")
        if self.via == "live" and self.deadline is not None:
            raise InputError(f"deadline={self.deadline!r} with via='live': requests are made as fast as they can be")
        if self.via != "live" and self.backend is None:
            raise InputError(f"via={self.via!r}: name the provider whose batches are meant, as backend")
        if self.via == "auto" and self.deadline is None:
            raise InputError("via='auto' needs a deadline, such as 6h: without one, batches are the cheapest")
        if self.via != "live" and self.others:
            raise InputError(
                f"also={self.others[0][0]!r} with via={self.via!r}: a job's batches are at one provider; leave it out"
            )
        if self.deadline is not None:
            duration_seconds("deadline", self.deadline)
        duration_seconds("batch_window", self.batch_window)

    @property
    def processes(self) -> ReplicaCount | None:
        """Number of replicas. With tensor parallelism there is at least one, which starts again when a rank dies."""
        return 1 if self.replicas is None and self.config.tensor_parallel > 1 else self.replicas

    @property
    def is_live_elsewhere(self) -> bool:
        """Whether an endpoint elsewhere computes the lines as requests, so that their order matters to its cache."""
        return self.backend is not None and self.via == "live"

    @classmethod
    def of(cls, model: str | None, embedding_model: str | None, backend: str | None, **rest: object) -> ModelChoice:
        """The choice with defaults for models that are not given; `rest` are further fields."""
        known = None if model is None else BUILTIN.get(model)
        if backend is None and embedding_model is None and known is not None and known.kind is Kind.EMBED:
            model, embedding_model = None, model
        elif backend is None and model is None:
            model = DEFAULT_MODEL
        return cls(model=model, embedding_model=embedding_model, backend=backend, **rest)  # type: ignore[arg-type]

    @property
    def separate_endpoints(self) -> frozenset[str]:
        """Endpoints for whose lines there are models of their own."""
        embeds = _EMBEDDED if self.embedding_model is not None else set()
        return frozenset(embeds | (CLASSIFIER_URLS if self.classifiers else set()))

    def prompts_of(
        self, endpoint: str, body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any]
    ) -> Sequence[Prompt]:
        """The prompts in a body, after the checks that can be made here.

        Raises `InvalidRequest`, or `ModelNotFound` for a body that names a model other than the job's.
        """
        if self.backend is None:
            if not self._serves(endpoint):
                raise not_served(endpoint)
            prompts = check_body(endpoint, body, defaults)
            check_form(endpoint, body)
            self._require_served(endpoint, read_model(body))
            return prompts
        if self.model is not None:
            chosen_model(read_model(body), self.served_model_names or (self.model,), remedy=LEAVE_OUT_MODEL)
        return check_sent_body(self.dialect, endpoint, body, defaults)

    def _require_served(self, endpoint: str, asked: str | None) -> None:
        """Raise `ModelNotFound` for a model that is not in this process, unless the models here have no names."""
        if asked is None:
            return
        generating = () if self.model is None else (self.model,)
        embedding = () if self.embedding_model is None else (self.embedding_model,)
        serving = [
            *(generating if endpoint not in ENCODER_URLS else ()),
            *(self.classifiers if endpoint in CLASSIFIER_URLS else ()),
            *(embedding if endpoint in _EMBEDDED else ()),
        ]
        names = [served_name(name) for name in serving]
        if not names or {asked, served_name(asked)} & {*names}:
            return
        if not {asked, ANY_MODEL} & {*self.served_model_names}:
            models = [served_name(name) for name in (*generating, *self.classifiers, *embedding)]
            raise not_found(endpoint, asked, names, models)

    def _serves(self, endpoint: str) -> bool:
        """Whether a model in this process answers lines for `endpoint`; True if none was chosen by name."""
        if self.model is None and not self.separate_endpoints:
            return True
        return endpoint in self.separate_endpoints or (self.model is not None and endpoint not in ENCODER_URLS)

    def load(
        self, endpoints: Collection[str], progress: Progress = lambda text: None, *, forms: bool = False
    ) -> LoadedModels:
        """Load the models that lines for `endpoints` need. Takes seconds; raises what `load_models` raises.

        `forms`: whether answers of a given form are expected.
        """
        if self.backend is not None:
            return LoadedModels(None, None)
        model = self.model if not self.separate_endpoints or {*endpoints} - self.separate_endpoints else None
        embedding_model = self.embedding_model if _EMBEDDED & {*endpoints} else None
        classifiers = self.classifiers if CLASSIFIER_URLS & {*endpoints} else ()
        if self.processes is not None or self.ray is not None:
            return LoadedModels(None, None, replicas_of=(model, embedding_model), classifiers_of=classifiers)
        loaded = LoadedModels(*load_models(model, embedding_model, self.config, progress, forms=forms))
        if not classifiers:
            return loaded
        return replace(loaded, classifiers=load_classifiers(classifiers, self.config.device, progress))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model that generates; None if that is elsewhere. Takes seconds; raises as `load`."""
        return None if self.backend is not None or self.model is None else load_tokenizer(self.model, self.config)

    def text_tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of the embedding model; None if there is none here. Takes seconds; raises as `load`."""
        return None if self.embedding_model is None else load_text_tokenizer(self.embedding_model)

    @property
    def embedded(self) -> frozenset[str]:
        """Endpoints whose lines the embedding model computes, if there is one."""
        return _EMBEDDED - CLASSIFIER_URLS if self.classifiers else _EMBEDDED

    @asynccontextmanager
    async def opened(
        self,
        loaded: LoadedModels,
        meter: Meter | None = None,
        batches: BatchJob | None = None,
        progress: Progress = lambda text: None,
    ) -> AsyncIterator[Inference]:
        """The inference, for the duration of the block; at its end, models that were loaded here are closed.

        `meter` counts what calls to an endpoint cost; `batches`: the job, for `via` batch and auto. Raises what
        `open_endpoint`, `open_replicas` and `open_ray_replicas` raise, which report their `progress`.
        """
        if loaded.replicas_of is not None:
            inference: Inference = await self._opened_replicas(*loaded.replicas_of, loaded.classifiers_of, progress)
        elif self.backend is None:
            inference = loaded.inference()
        else:
            from batchwright.inference.batches.opening import open_provider

            models = None if self.model is None else {self.model: self.model}
            provider = None
            if batches is not None:
                provider = open_provider(self.backend, self.key, dialect=self.dialect, window=self.batch_window)
            inference = await open_endpoints(
                [(self.backend, self.key), *self.others],
                models,
                max_concurrency=self.concurrency,
                max_waiting=self.concurrency or 1,
                limits=self.limits,
                dialect=self.dialect,
                meter=meter,
            )
            if batches is not None and provider is not None:
                inference = self._in_batches(provider, inference, batches, meter)
        try:
            yield self.renamed(inference)
        finally:
            await inference.close()

    async def _opened_replicas(
        self, model: str | None, embedding_model: str | None, classifiers: Sequence[str], progress: Progress
    ) -> Inference:
        if self.ray is None:
            assert self.processes is not None
            return await open_replicas(
                self.processes, model, embedding_model, self.config, progress, classifiers=classifiers, stepped=True
            )
        return await open_ray_replicas(
            self.ray,
            ray_count(self.replicas),
            self.resources or RayResources(),
            model,
            embedding_model,
            self.config,
            progress,
            classifiers=classifiers,
            stepped=True,
        )

    def _in_batches(self, provider: BatchProvider, live: Inference, job: BatchJob, meter: Meter | None) -> Inference:
        return ProviderBatchInference(
            provider,
            live,
            job,
            dialect=self.dialect,
            window=self.batch_window,
            deadline=None if self.deadline is None else duration_seconds("deadline", self.deadline),
            moves=self.via == "auto",
            concurrency=self.concurrency or _LIVE_AT_ONCE,
            meter=meter,
        )

    def renamed(self, inference: Inference) -> Inference:
        """`inference` under its own names and `served_model_names`."""
        return StandIn(inference, self.served_model_names) if self.served_model_names else inference


class NoModel(Inference):
    """An inference without a model, for a job none of whose lines is valid: it returns what is wrong with each."""

    models = ()
    wants = 1

    async def answer(self, call: Call) -> dict[str, Any]:
        check_body(call.endpoint, call.body, call.defaults)
        check_form(call.endpoint, call.body)
        raise EngineClosed("no model is loaded")

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise EngineClosed("no model is loaded")

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class LoadedModels:
    """Models on this machine that compute a job."""

    engine: Engine | None
    encoder: Encoder | None
    owned: bool = True
    """Whether the engine is closed at the end of the job."""
    replicas_of: tuple[str | None, str | None] | None = None
    """Names of the models, generating and embedding, that replicas load; None: there are no replicas."""
    classifiers: tuple[Classifier, ...] = ()
    classifiers_of: tuple[str, ...] = ()
    """Names of the classifiers that replicas load."""

    @property
    def has_generating_replicas(self) -> bool:
        """Whether replicas load a model that generates."""
        return self.replicas_of is not None and self.replicas_of[0] is not None

    def inference(self) -> Inference:
        """The inference with these models. Must be called on the event loop on which it is used."""
        if self.engine is None:
            return local_inference(None, self.encoder, classifiers=self.classifiers)
        from batchwright.inference.stepped_engine import SteppedEngine

        engine = SteppedEngine(self.engine, owned=self.owned)
        fingerprint = system_fingerprint(self.engine)
        return local_inference(engine, self.encoder, fingerprint=fingerprint, classifiers=self.classifiers)
