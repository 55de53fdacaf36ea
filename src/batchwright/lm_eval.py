"""A model for lm-evaluation-harness: its tasks, computed by an engine in this process.

    python -m batchwright.lm_eval --model batchwright --model_args pretrained=smollm2-135m,dtype=float32 --tasks piqa

takes the arguments of the command `lm_eval`. From Python, with the engine's options by name:

    lm_eval.simple_evaluate(model=batchwright.lm_eval.Model("smollm2-135m", dtype="float32"), tasks=["piqa"])

Needs lm-eval 0.4.9 or later: `pip install lm-eval`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from batchwright.engine.engine import Engine
from batchwright.errors import InvalidRequest, MissingExtra, UnsupportedModel
from batchwright.models import DEFAULT_MODEL
from batchwright.request import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    missing = MissingExtra(f"batchwright.lm_eval needs {error.name}; install it: pip install lm-eval")
    if __name__ == "__main__":
        raise SystemExit(str(missing)) from None
    raise missing from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

__all__ = ["Model"]

_log = logging.getLogger(__name__)

_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for the limit of an answer in a task; the first one that is given counts."""
_SAMPLING = frozenset({"top_p", "top_k", "min_p", "repetition_penalty", "seed"})


@register_model("batchwright")
class Model(TemplateLM):  # type: ignore[misc]
    """A generating model as lm-evaluation-harness asks for it; `--model batchwright` once this module is imported.

    `pretrained` is what `Engine` takes as `model`, or an open `Engine`; `options` are fields of `EngineConfig`. The
    engine makes its own batches, so `batch_size` and `max_batch_size` change nothing. A text that is too long loses its
    beginning, with a warning: first the context, except for one token, then the continuation, the rest of which is
    scored. Raises what `Engine` raises, ValueError for options beside an open `Engine`, and `UnsupportedModel` for a
    model without a tokenizer.
    """

    def __init__(
        self,
        pretrained: str | Engine = DEFAULT_MODEL,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **options: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            options["device"] = device
        if isinstance(pretrained, Engine):
            if max_length is not None:
                options["max_length"] = max_length
            if options:
                raise ValueError(f"{next(iter(options))}: the engine that is given has its own; leave it out")
            self.engine = pretrained
        else:
            self.engine = Engine(pretrained, max_model_len=max_length, **options)
        inner = self.engine.core.tokenizer.inner
        if inner is None or self.engine.core.tokenizer.first_token_id is None:
            raise UnsupportedModel(f"{self.engine.model_name} has no tokenizer, or none with a token that ends a text")
        self.tokenizer = inner
        self.max_gen_toks = max_gen_toks

    @property
    def max_length(self) -> int:
        """Most tokens that the model takes."""
        return self.engine.max_model_len

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return cast("int", self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without a context."""
        return cast("int", self.engine.core.tokenizer.first_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Name by which the harness caches its requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text. A text that begins with the name of the first token gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return cast(
            "list[int]", self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as the text that the model's template makes of it."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the greatest length."""
        windows: list[tuple[list[int], list[int]]] = []
        ends: list[int] = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += map(make_disjoint_window, rolling)
            ends.append(len(windows))
        found = self._loglikelihood_tokens([(None, *window) for window in windows], disable_tqdm)
        sums = []
        for request, start, end in zip(requests, [0, *ends], ends, strict=False):
            sums.append(sum(logprob for logprob, _ in found[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to the first of its stop texts."""
        prompts, params, rooms = [], [], []
        for request in requests:
            context, settings = request.args
            params.append(_params(settings, self.max_gen_toks))
            room = self.max_length - params[-1].max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={params[-1].max_tokens}: must be less than the {self.max_length} tokens of the model"
                )
            prompts.append(self.tok_encode(context))
            rooms.append(room)
        _warn_of_loss("contexts", [len(prompt) - room for prompt, room in zip(prompts, rooms, strict=True)])
        prompts = [prompt[-room:] for prompt, room in zip(prompts, rooms, strict=True)]
        texts = []
        for request, response in zip(
            requests, self.engine.generate(prompts, params, progress=not disable_tqdm), strict=True
        ):
            if response.error is not None:
                raise response.error
            texts.append(response.output)
            self.cache_hook.add_partial("generate_until", request.args, response.output)
        return texts

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is greedy; requests: key, context, tokens."""
        # The last token is only scored, so it needs no place of its own; the first one is only context.
        most = self.max_length
        _warn_of_loss("contexts", [len(context) + min(len(tokens), most) - most - 1 for _, context, tokens in requests])
        _warn_of_loss("continuations", [len(tokens) - most for *_, tokens in requests])
        contexts, continuations = [], []
        for _, context, tokens in requests:
            text = [*context, *tokens][-most - 1 :]
            begin = max(1, len(text) - len(tokens))
            contexts.append(text[:begin])
            continuations.append(text[begin:])
        scores = self.engine.score(contexts, continuations, progress=not disable_tqdm)
        answers = []
        for request, score in zip(requests, scores, strict=True):
            if score.error is not None:
                raise score.error
            answers.append((score.logprob, score.is_greedy))
            if (key := request[0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers


def _warn_of_loss(what: str, tokens: Sequence[int]) -> None:
    """Warn about texts that lose their beginning; `tokens`: how many each has too many."""
    if lost := [each for each in tokens if each > 0]:
        _log.warning(
            "%d of %d %s are longer than the model takes: they lose their first tokens, up to %d",
            len(lost), len(tokens), what, max(lost),
        )  # fmt: skip


def _params(settings: dict[str, Any], limit: int) -> SamplingParams:
    """Return the sampling parameters for the settings of a task. Raises `InvalidRequest` for an unknown one."""
    rest = dict(settings)
    stop = rest.pop("until", None) or ()
    limits = [rest.pop(name, None) for name in _LIMITS]
    does_sample, temperature = rest.pop("do_sample", False), rest.pop("temperature", None)
    if unknown := rest.keys() - _SAMPLING:
        name = min(unknown)
        raise InvalidRequest(f"{name}={rest[name]!r} among the settings of a task is not supported", param=name)
    return SamplingParams(
        max_tokens=next((int(each) for each in limits if each is not None), limit),
        temperature=(1.0 if temperature is None else temperature) if does_sample else 0.0,
        stop=(stop,) if isinstance(stop, str) else tuple(each for each in stop if each),
        **rest,
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
