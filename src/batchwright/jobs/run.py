"""`batchwright.run`: a file of prompts through a model or an endpoint, resumably."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.clock import Clock, MonotonicClock
from batchwright.durable_files import is_same_file, require_writable
from batchwright.engine_config import EngineConfig, engine_options
from batchwright.errors import BatchwrightError, InputError, InvalidRequest, shown
from batchwright.inference.endpoint_keys import EndpointKey, find_key
from batchwright.inference.inference import Inference
from batchwright.inference.replicas.cores import ReplicaCount, parse_count
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.jobs.answer_tables import TableColumns
from batchwright.jobs.frames import as_files
from batchwright.jobs.input_names import STREAM, expanded
from batchwright.jobs.job_plan import JobPlan
from batchwright.jobs.job_run import JobRun, RunProgress
from batchwright.jobs.loading import ModelChoice, Via
from batchwright.jobs.report import RunReport
from batchwright.jobs.report_page.page import require_libraries
from batchwright.jobs.spec import JobSpec, RetryFailed, require_local
from batchwright.jobs.spending import SpendingTerms
from batchwright.models import fingerprint
from batchwright.pacing.limits import ConfiguredLimit, configured_limits
from batchwright.request import SamplingParams
from batchwright.wire.dialects import Dialect, dialect_for
from batchwright.wire.requests import OPENAI_DEFAULTS

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine

_ALWAYS_NAMED = ("dtype", "quantization", "deterministic", "max_model_len")
"""Options of the engine in the identity of every job; others that change results are in it only when chosen."""

_SAMPLING_NAMES = tuple(each.name for each in fields(SamplingParams))


def run(
    input: str | os.PathLike[str] | Sequence[Any] | Any,  # noqa: A002 - the name that users expect
    output: str | os.PathLike[str] | None = None,
    *,
    model: str | Engine | None = None,
    embedding_model: str | None = None,
    classifiers: Sequence[str] = (),
    backend: str | None = None,
    backend_api_key: str | EndpointKey | None = None,
    backend_dialect: str | None = None,
    also: Sequence[tuple[str, str | EndpointKey | None]] = (),
    backend_concurrency: int | None = None,
    rpm: float | None = None,
    tpm: float | None = None,
    replicas: ReplicaCount | None = None,
    ray: str | None = None,
    resources: Mapping[str, Any] | str | None = None,
    served_model_names: Sequence[str] = (),
    dedupe: bool = True,
    planned: bool = True,
    budget: float | str | None = None,
    price: str | None = None,
    prices: str | os.PathLike[str] | None = None,
    cost: bool = False,
    via: Via = "live",
    deadline: str | None = None,
    batch_window: str = "24h",
    defaults: SamplingParams | Mapping[str, Any] | None = None,
    input_format: str | None = None,
    prompt_template: str | None = None,
    system_template: str | None = None,
    messages_template: str | None = None,
    reorder_fields: bool = False,
    chat: bool = False,
    system: str | None = None,
    id_column: str | None = None,
    keep: Sequence[str] | None = None,
    output_column: str = "answer",
    limit: int | None = None,
    sample: int | None = None,
    sample_seed: int = 0,
    retry_failed: RetryFailed | bool = False,
    retry_invalid: int = 0,
    dry_run: bool = False,
    probe: bool = False,
    ordered: bool = False,
    overwrite: bool = False,
    max_line_bytes: int = 2**20,
    report: str | os.PathLike[str] | None = None,
    report_html: str | os.PathLike[str] | None = None,
    progress: Callable[[RunProgress], None] | None = None,
    inference: Inference | None = None,
    clock: Clock | None = None,
    engine: EngineConfig | None = None,
    **engine_options: Any,
) -> RunReport:
    """Answer every line of `input`, write the answers to `output`, and return a report.

    `input` is a path, several paths, a pattern such as `data/*.csv`, a folder of data, an address (`s3://…`,
    `https://…`), or a data frame. Lines are OpenAI batch lines for chats, completions and embeddings, `{"prompt": …}`
    or `{"messages": […]}` (`.jsonl`, or one array in `.json`), or plain prompts (`.txt`). Rows of a table (`.csv`,
    `.tsv`, `.parquet`, `.arrow`, and with a template any JSON objects) are turned into requests by templates. The text
    forms may be compressed (`.gz`, `.zst`). `-` is standard input or output.

    `output` may be an address too: then, and for any other name that ends in `/`, lines are written into a folder of
    parts; see docs/data.md. Its name says what it contains. For an input table, and in `.csv`, `.tsv` and `.parquet`,
    that is a table made when all lines are finished: the columns of the input, the answer, its finish reason, the error
    and the numbers of tokens. Otherwise results are written in the form of OpenAI's batch output as they finish, or in
    the order of the input when `ordered` (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`). A line that cannot be answered becomes
    a line with an error.

    A line may have `priority` (lower is sooner) and `deadline_ms` (or `deadline`, in seconds), counted from when the
    line is handed to the model: one that is not finished by then becomes a line with the error `request_timeout`.

    `expected_tokens` says how long the answer to a line is expected to be, which helps to plan.

    A run that was stopped at any moment and is called again with the same arguments continues after the lines that are
    finished. Lines that were appended to the input since then are computed too.

    - `model`: the model that generates: a name, a path, or an `Engine`, which is not closed and holds no request of
      this run afterwards. Default: smollm2-135m, or with `backend` the first that it lists.
    - `embedding_model`: the model for lines for `/v1/embeddings`. `classifiers`: the models for lines for `/v1/rerank`
      and `/v1/score`, which cross-encoders or else the embedding model answer, and for `/classify`; a line that names
      no model gets the first that can answer it.
    - `backend`: the address of an endpoint, such as `https://host/v1`, which computes in place of models in this
      process. `backend_dialect`: the form of its requests and answers, `"openai"` or `"anthropic"`; by default that of
      its host. `backend_api_key`: its key; by default the one in the environment, see docs/endpoints.md.
      `backend_concurrency`: how many requests it is given at once, by default as many as give the highest throughput.
      `rpm` and `tpm`: its limits of requests and tokens a minute; limits that its answers state or its refusals reveal
      are found and respected without being configured.
    - `also`: further endpoints with their keys, or further keys for the same one; lines are divided among them by what
      each has room for. They must have the same models and dialect.
    - `replicas`: how many processes compute on this machine, each with the whole model on its own GPU or group of
      cores; `"auto"`: one for each GPU, else for each NUMA node. By default this process computes.
    - `ray`: the address of a Ray cluster on whose nodes the replicas compute (by default one): `"auto"` for that of
      this machine, `"local"` to start one here, `"host:port"` or `"ray://host:port"`. `resources`: what each takes of
      its node, as JSON or a mapping of `num_cpus`, `num_gpus`, `memory`, `accelerator_type` and `resources`; by
      default one CPU. Replicas for which no node has room wait for one while the others compute.
    - `served_model_names`: further names that lines may give as `model`, `*` for any; otherwise a line that names an
      unknown model fails.
    - `dedupe`: computes identical requests once for all their lines, if their answer is always the same: text at
      temperature 0 or with a seed, and embeddings. False computes each one.
    - `planned`: computes lines in the order in which a local model computes the least and leaves the fewest places in
      its batches empty at the end: prompts that begin alike one after another, and answers that are sure to be short
      last; for a `backend`, lines with long prefixes in common one after another. False keeps the order of the input.
    - `budget`: the most dollars that all runs of the job with a `backend` may cost together, as a number or a text such
      as `"5.00"`.
    - `price`: what its models cost, in dollars per million tokens: `"input=2.50,cached=1.25,output=10.00"`, also
      `cache_write`, `cache_write_1h` and `batch` (the fraction of these prices that batches cost); or
      `"openai/gpt-4o-mini"` for published prices. By default the published prices of the provider at the address
      `backend`. `prices`: a file with such prices by model (TOML, JSON).
    - `cost`: states what each answer cost, in dollars, in its `usage`, or in a column `cost` of a table.
    - `via`: `"batch"` has the provider compute the lines in its own batches, at its price for these. `"auto"` does so
      for as many as will be done by `deadline`, a duration such as `"6h"` from the first start of the job, and sends
      the rest as requests; with `"batch"`, lines that are not done by `deadline` fail. `batch_window`: the completion
      window of the batches.
    - `defaults`: sampling parameters for lines that do not set them, all or some by name. The rest default to those of
      `SamplingParams`, or with `backend` to the endpoint's own.
    - `prompt_template`, `system_template`: texts with `{column}` in them, for the prompt and the system message before
      it; by default the prompt is the column `prompt`. `messages_template`: a Jinja template of the whole chat as JSON.
      An empty or null cell becomes empty text; a row in which all columns of the templates are empty fails.
    - `reorder_fields`: where two or more lines of the prompt template that name columns follow one another, reorders
      them in each row so that rows share the most: what is shared is computed once. It changes the prompts.
    - `id_column`: the column with the custom ids of rows.
    - `keep`: columns of the input that an output table keeps, instead of all; `output_column`: the column of the
      answers.
    - `limit`: computes only that many lines, the first ones; `sample`: only that many, drawn at random with
      `sample_seed`.
    - `retry_failed`: tries failed lines of earlier runs again: those whose error may be temporary (True), or `"all"`.
    - `retry_invalid`: requests an answer again, at most this many times, if it should be JSON and is not, for instance
      because `max_tokens` cut it short: with twice the tokens, and with the next seed if the line has one. If that does
      not help, the `finish_reason` of the last answer is `"invalid_json"`.
    - `dry_run`: writes no result. The report then has the lines that would fail, the tokens of all prompts and the
      first requests as they would be sent; `output` may be left out. With `probe`, a model on this machine is loaded
      for some seconds to predict how long the job takes: its steps are measured if they never were, and some lines are
      answered if no run shows how long answers to such lines are.
    - `chat`: makes plain prompts the user message of a chat, after `system` if that is given.
    - `overwrite`: starts over, in place of whatever `output` holds.
    - `max_line_bytes`: a longer line is an error line.
    - `report`: a file for the report as JSON; `-` is standard output. `report_html`: a file for a page of plots of it.
    - `progress`: called after lines have ended, and about ten times a second.
    - `engine`: how the engine computes; `engine_options` are fields of `EngineConfig` that override it.
    - `inference`: an object that computes in place of all of these; it is not closed.

    Raises `InputError` when the input cannot be read in the given form, `InputBroken` when that shows only after lines
    were answered, `ResumeRefused` when `output` belongs to another job or another run is writing it, whatever loading
    the model raises, OSError when results cannot be written, `RunFailed` when the endpoint did not answer for an hour,
    refuses the key or has nothing at its address, or when its quota is used up, `BudgetExhausted` when what is left of
    `budget` does not cover the next request, and `RunInterrupted` on KeyboardInterrupt. In each case the lines finished
    so far are kept.
    """
    _check_keywords(engine_options)
    try:
        config = (engine or EngineConfig()).with_options(**engine_options)
    except ValueError as error:
        raise InputError(str(error)) from error
    given = None if model is None or isinstance(model, str) else model
    if inference is not None or given is not None:
        whole = "an inference" if inference is not None else "an Engine as model"
        not_live = None if via == "live" else via
        others: dict[str, Any] = {"embedding_model": embedding_model, "classifiers": classifiers or None}
        others |= {"backend": backend, "via": not_live}
        others |= {"replicas": replicas, "ray": ray, "resources": resources, **config.chosen()}
        for name, value in ({"model": model} | others if inference is not None else others).items():
            if value is not None:
                raise InputError(f"{name}={shown(value)} has no effect beside {whole}: leave one of them out")
    dialect = dialect_for(backend_dialect, backend or "")
    choice = ModelChoice.of(
        model if isinstance(model, str) else None,
        embedding_model,
        backend,
        classifiers=tuple(classifiers),
        config=config,
        key=_key(backend, backend_api_key, dialect),
        others=tuple((address, _key(address, key, dialect)) for address, key in also),
        dialect=dialect,
        concurrency=backend_concurrency,
        limits=_limits(rpm, tpm),
        replicas=_replicas(replicas),
        ray=ray,
        resources=None if resources is None else RayResources.of(resources),
        served_model_names=tuple(served_model_names),
        via=via,
        deadline=deadline,
        batch_window=batch_window,
    )
    if inference is not None or given is not None:
        choice = replace(choice, model=None)  # it knows its names itself
    terms = SpendingTerms.of(
        backend, budget=budget, price=price, prices=None if prices is None else Path(prices), states_costs=cost
    )
    if terms is not None and choice.model is not None:
        terms.require_price(choice.model)
    if retry_invalid and via != "live":
        raise InputError(
            f"retry_invalid={retry_invalid}: a provider's batch computes each line once; leave it out, or via"
        )
    _check_run_kind(output, dry_run=dry_run, probe=probe)
    name = inference.models[0] if inference is not None else given.model_name if given is not None else choice.model
    with as_files(input) as names:
        spec = JobSpec(
            inputs=expanded(names, None if output is None else os.fspath(output)),
            output=STREAM if output is None else os.fspath(output),
            model=name,
            embedding_model=choice.embedding_model,
            classifiers=choice.classifiers,
            backend=backend,
            dialect=backend_dialect,
            served_model_names=choice.served_model_names,
            defaults=defaults if isinstance(defaults, SamplingParams) else sampling_defaults(backend, defaults or {}),
            input_format=input_format,
            prompt_template=prompt_template,
            system_template=system_template,
            messages_template=messages_template,
            reorder_fields=reorder_fields,
            chat=chat,
            system=system,
            id_column=id_column,
            limit=limit,
            sample=sample,
            sample_seed=sample_seed,
            columns=TableColumns(None if keep is None else tuple(keep), output_column),
            retry_failed="passing" if retry_failed is True else retry_failed or None,
            retry_invalid=retry_invalid,
            ordered=ordered,
            overwrite=overwrite,
            max_line_bytes=max_line_bytes,
            engine_parameters=_parameters(config),
            model_files=_model_files(choice) if given is None and inference is None else None,
        )
        if report is not None:
            require_local("report", os.fspath(report))
        report_path = None if report is None else Path(report)
        _check_report(report_path, spec, writes=not dry_run)
        page_path = _page_path(report_html, report_path, spec, dry_run)
        if cost and spec.writes_rows:
            spec = replace(spec, columns=replace(spec.columns, cost=True))
        show = progress or (lambda _: None)
        clock = clock or MonotonicClock()
        if dry_run:
            plan = JobPlan(
                spec, clock, choice, given, inference, terms, show, dedupe=dedupe, planned=planned, probes=probe
            ).report()
            if report_path is not None:
                plan.save(report_path)
            return plan
        return JobRun(
            spec,
            clock,
            choice,
            given,
            inference,
            show,
            report_path,
            terms,
            dedupe=dedupe,
            planned=planned,
            page_path=page_path,
        ).carry_out()


def _check_run_kind(output: object, *, dry_run: bool, probe: bool) -> None:
    if probe and not dry_run:
        raise InputError("probe is for a dry run, which predicts how long a job takes: add dry_run, or leave it out")
    if output is None and not dry_run:
        raise InputError("no output: name a file, such as answers.csv")


def _limits(rpm: float | None, tpm: float | None) -> tuple[ConfiguredLimit, ...]:
    try:
        return configured_limits(rpm, tpm)
    except ValueError as error:
        raise InputError(str(error)) from None


def _replicas(given: ReplicaCount | None) -> ReplicaCount | None:
    try:
        return None if given is None else parse_count(given)
    except ValueError as error:
        raise InputError(str(error)) from None


def _key(backend: str | None, given: str | EndpointKey | None, dialect: Dialect) -> EndpointKey:
    """The key of the endpoint; one that was not given is taken from the environment."""
    if backend is None or isinstance(given, EndpointKey):
        return given if isinstance(given, EndpointKey) else EndpointKey()
    return find_key(backend, dialect, os.environ) if given is None else EndpointKey(given)


def _check_keywords(given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that are sampling parameters rather than options of the engine."""
    options = [option.name for option in engine_options()]
    for name in given:
        meant = get_close_matches(name, [*_SAMPLING_NAMES, *options], 1, 0.8)
        if name not in options and meant and meant[0] in _SAMPLING_NAMES:
            raise TypeError(f"run() has no argument {name!r}: did you mean defaults={{{meant[0]!r}: …}}?")


def sampling_defaults(backend: str | None, given: Mapping[str, Any]) -> SamplingParams | Mapping[str, Any]:
    """The sampling parameters of lines that do not set them: those given, and the defaults for the rest.

    With `backend`, the rest is left to the endpoint. Raises `InvalidRequest`.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"defaults={shown(given)}: must be SamplingParams, or some of its fields by name")
    for name in given:
        if name not in _SAMPLING_NAMES:
            raise InvalidRequest(
                f"defaults have no {shown(name)}: choose from {', '.join(_SAMPLING_NAMES)}", param=name
            )
    params = replace(SamplingParams() if backend is None else OPENAI_DEFAULTS, **given)
    return params if backend is None else given


def _parameters(config: EngineConfig) -> dict[str, Any]:
    """Options of the engine that results depend on. A job may change the others, which only affect speed and place."""
    chosen = config.chosen()
    return {
        option.name: chosen.get(option.name)
        for option in engine_options()
        if option.changes_results and (option.name in _ALWAYS_NAMED or option.name in chosen)
    }


def _model_files(choice: ModelChoice) -> str | None:
    """The fingerprints of the models; None if they are elsewhere, or missing, which matters only if they are loaded."""
    if choice.backend is not None:
        return None
    try:
        names = (choice.model, choice.embedding_model, *choice.classifiers)
        return " ".join(fingerprint(name) for name in names if name is not None)
    except (BatchwrightError, OSError):
        return None


def _check_report(path: Path | None, spec: JobSpec, *, writes: bool) -> None:
    if path is None:
        return
    if str(path) == STREAM:
        if writes and spec.output == STREAM:
            raise InputError("report and output are both standard output: name a file for one of them")
        return
    _check_writable("report", path, spec)


def _check_writable(role: str, path: Path, spec: JobSpec) -> None:
    others = [Path(name) for name in (*spec.inputs, spec.output) if name != STREAM]
    require_writable(role, path, {"the input or the output": others})


def _page_path(given: str | os.PathLike[str] | None, report: Path | None, spec: JobSpec, dry_run: bool) -> Path | None:
    """The file for the page of the report, after checks that it can be made and written."""
    if given is None:
        return None
    if dry_run:
        raise InputError("report_html is the page of a run, and a dry run computes nothing: leave one of them out")
    require_local("report_html", os.fspath(given))
    path = Path(given)
    if str(path) == STREAM:
        raise InputError("report_html cannot be standard output: name a file, such as report.html")
    _check_writable("report_html", path, spec)
    if report is not None and is_same_file(path, report):
        raise InputError(f"report and report_html are both {path}: name another file for one of them")
    require_libraries()
    return path
