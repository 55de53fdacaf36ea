"""Lengths of the answers of earlier runs, kept by model: what is known about a job's before it is computed.

`answers/KEY.json` below `cache_dir()` has a histogram of each of the latest runs of a model, at most a few hundred
numbers for each. A file that is broken, or of another form, is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchwright.durable_files import remove_oldest, write_shared
from batchwright.jobs.spec import JobSpec
from batchwright.lines.forecast import AnswerLengths, AnswerTally
from batchwright.models import cache_dir, fingerprint
from batchwright.planning.intervals import covering_error
from batchwright.request import FORM_FIELDS, SamplingParams

_log = logging.getLogger(__name__)

_SCHEMA = 1
_FOLDER = "answers"
_MOST_RUNS = 64
_MOST_FILES = 64
_LEAST_ANSWERS = 16
"""Least number of answers of a run for it to say something about other runs."""
_EXACT = 128
"""Tokens up to which lengths are kept exactly; beyond, in steps of less than 1%."""
_NOT_ABOUT_LENGTHS = frozenset({
    "classifiers", "embedding_model", "id_column", "logprobs", "max_line_bytes", "max_tokens", "model", "n", "ordered",
    "output", "prompt_logprobs", "prompt_logprobs_start", "seed", "served_model_names",
})  # fmt: skip
"""Parameters that the hash of a job leaves out, like options of its engine: they hardly change how long answers are, or
are accounted for elsewhere (limits by line, the model by the file that runs are kept in)."""
_WEIGHT = 100.0
"""Number of answers that those of each run count as."""
_RunSource: TypeAlias = Literal["same job", "same templates", "earlier runs"]
LengthSource: TypeAlias = Literal[_RunSource, "probe"]
_FIRST_ERRORS: Mapping[_RunSource, float] = {"same job": 0.1, "same templates": 0.3, "earlier runs": 0.7}
"""Errors of mean lengths assumed until there are enough runs to show them, by what these have in common."""


@dataclass(frozen=True, slots=True)
class JobSignature:
    """Hashes by which earlier runs of the same job, or of one with the same templates, are recognized."""

    job: str
    """Hash of what is asked: the lines of the input, and all parameters on which the lengths of answers depend."""
    template: str
    """Hash of how it is asked: the templates, and the required form of answers; empty without templates."""

    @classmethod
    def of(cls, spec: JobSpec, contents: Sequence[str]) -> JobSignature:
        """The signature of a job with an input of these `Job.contents`."""
        left_out = _NOT_ABOUT_LENGTHS | spec.engine_parameters.keys()
        asked = {name: value for name, value in spec.parameters().items() if name not in left_out}
        job = _hash([*contents, spec.limit, *sorted(asked.items())])
        templates = [spec.prompt_template, spec.system_template, spec.messages_template, spec.system]
        params = spec.defaults if isinstance(spec.defaults, SamplingParams) else SamplingParams()
        how = [*templates, spec.chat, params.stop, *(getattr(params, name) for name in FORM_FIELDS)]
        return cls(job, _hash(how) if any(each is not None for each in templates) else "")


class RunAnswers(msgspec.Struct, frozen=True):
    """Answers of one run."""

    job: str
    """As in the `JobSignature`, like `template`."""
    template: str
    ended: dict[int, int]
    """Numbers of answers that ended by themselves, by their tokens."""
    cut: dict[int, int]
    """Numbers of answers that were ended by their limit, in the same way."""

    @classmethod
    def of(cls, signature: JobSignature, answers: AnswerTally) -> RunAnswers:
        """The answers that a run of a job has counted."""
        return cls(signature.job, signature.template, _histogram(answers.ended), _histogram(answers.cut))

    def lengths(self, limits: Mapping[int, int]) -> AnswerLengths:
        """The lengths that answers would have if they were like its own; `limits`: number of lines with each limit."""
        return AnswerLengths(_counts(self.ended), _counts(self.cut), (), limits)

    def __len__(self) -> int:
        return sum(self.ended.values()) + sum(self.cut.values())


class _KeptAnswers(msgspec.Struct, frozen=True):
    """Content of a file."""

    schema: int
    runs: tuple[RunAnswers, ...]
    """The earliest first."""


@dataclass(frozen=True, slots=True)
class LikelyLengths:
    """What earlier runs, or answers to some lines of a job, say about the lengths of answers to come."""

    lengths: AnswerLengths
    errors: tuple[float, float]
    """Logarithms of the factors by which the true mean is smaller or larger at most, in nine cases of ten."""
    source: LengthSource
    """What the runs have in common with the job; `probe`: it is not known from runs, but from answers to some lines."""
    runs: int
    """Number of those runs, or of those lines."""
    by_limit: Mapping[int, AnswerLengths] = field(default_factory=dict)
    """Lengths of answers for each limit whose answers differ from all others."""
    beyond: int = 0
    """Tokens that answers of the job are known to exceed."""

    @property
    def is_of_others(self) -> bool:
        """Whether it is known only from jobs of any kind, none of which was like this one."""
        return self.source == "earlier runs"

    def drawn(self, limit: int, quantile: float, factor: float = 1.0) -> int:
        """Return the tokens of an answer with a limit; `quantile`, 0 to 1, chooses among the known lengths.

        `factor`: how many times as long as those all answers are.
        """
        return max(1, min(limit, round(factor * self.by_limit.get(limit, self.lengths).drawn(quantile, self.beyond))))


def likely_lengths(
    runs: Sequence[RunAnswers], signature: JobSignature, limits: Mapping[int, int]
) -> LikelyLengths | None:
    """Return what `runs` of a model say about a job whose lines have these `limits`; None if they say nothing.

    Only runs of the same job count if there are some, else those with the same templates, else all.
    """
    alike: tuple[tuple[_RunSource, list[RunAnswers]], ...] = (
        ("same job", [each for each in runs if each.job == signature.job]),
        ("same templates", [each for each in runs if signature.template and each.template == signature.template]),
        ("earlier runs", list(runs)),
    )
    for source, those in alike:
        if not those or not limits:
            continue
        means = [each.lengths(limits).mean for each in those]
        errors = [
            abs(math.log(mean / fmean([*means[:number], *means[number + 1 :]])))
            for number, mean in enumerate(means)
            if len(means) > 1
        ]
        error = covering_error(errors, _FIRST_ERRORS[source])
        return LikelyLengths(_together(those, limits), (error, error), source, len(those))
    return None


def _together(runs: Sequence[RunAnswers], limits: Mapping[int, int]) -> AnswerLengths:
    """The lengths of the answers of all runs, which count equally, however many answers each had."""
    ended, cut = defaultdict[int, float](float), defaultdict[int, float](float)
    for run in runs:
        for total, counts in ((ended, run.ended), (cut, run.cut)):
            for tokens, count in counts.items():
                total[tokens] += count * _WEIGHT / len(run)
    return AnswerLengths(_counts(ended), _counts(cut), (), limits)


def earlier_answers(model: str) -> Sequence[RunAnswers]:
    """Return what is kept for the runs of `model`, the earliest first.

    Raises what `fingerprint` raises for a model that does not exist.
    """
    path = _path(model)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_KeptAnswers)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("lengths of earlier answers are ignored: %s holds none: %s", path, error)
        return ()
    return kept.runs if kept.schema == _SCHEMA else ()


def keep_answers(model: str, signature: JobSignature, answers: AnswerTally) -> None:
    """Add the answers of a run of a job to what is kept for `model`.

    Too few answers are not kept. Nothing is raised: the work is done, and without the cache only less is known about
    the next job.
    """
    try:
        run = RunAnswers.of(signature, answers)
        if len(run) < _LEAST_ANSWERS:
            return
        path = _path(model)
        runs = (*earlier_answers(model), run)[-_MOST_RUNS:]
        write_shared(path, msgspec.json.encode(_KeptAnswers(_SCHEMA, runs)))
        remove_oldest(path.parent, "*.json", _MOST_FILES)
    except Exception as error:  # whatever the cache, the model's files or their system have
        _log.warning("lengths of answers are not kept: %s", error)


def _path(model: str) -> Path:
    return cache_dir() / _FOLDER / f"{hashlib.sha256(fingerprint(model).encode()).hexdigest()[:32]}.json"


def _hash(values: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(values, enc_hook=str)).hexdigest()[:16]


def _histogram(counts: Sequence[int]) -> dict[int, int]:
    """The numbers of answers by their tokens; large token counts are rounded."""
    found = Counter[int]()
    for tokens, count in enumerate(counts):
        if count:
            step = 1 << max(0, tokens.bit_length() - _EXACT.bit_length())
            found[tokens // step * step] += count
    return dict(found)


def _counts(histogram: Mapping[int, float]) -> NDArray[np.float64]:
    counts = np.zeros(max(histogram, default=-1) + 1)
    for tokens, count in histogram.items():
        counts[tokens] = count
    return counts
