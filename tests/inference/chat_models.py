"""Tiny random models whose chat templates take tools, and whose answers a test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.support import TINY, tiny_model
from torch import Tensor

from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.sampling import Sampled, SamplingState
from batchwright.engine.step import launcher
from batchwright.engine.tokenizer import Tokenizer

_START, _END = "<|im_start|>", "<|im_end|>"
_SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[unrelated]", "<|tool_call|>")
_MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip

PLAIN = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template without tools and thoughts."""

HERMES = """{% if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": …, "arguments": …}</tool_call> to call one.<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING = HERMES.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
"""A template that opens the thought itself."""

MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for message in messages %}\
{% for call in message.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}\
{% endif %}[TOOL_CALLS]{{ call.function.name }}{% endfor %}{{ message.content }}{% endfor %}"""


BARE = """{% if tools %}{{ tools | tojson }}{% endif %}""" + PLAIN
"""A template that says nothing of how a tool is called."""


GRANITE = """{% if tools %}Respond with <|tool_call|> followed by a JSON list of tools.
{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"""

DEEPSEEK = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}\
{% for tool in message.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + \
'<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' + \
'<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}{% endfor %}{{ message.content }}{% endfor %}"""
"""A template that takes the arguments of calls as texts."""


def chat_model(folder: Path, template: str) -> Path:
    """Save a tiny model with this chat template, whose tokens are bytes and markers, to `folder`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True) for each in (_START, _END, *_SPECIAL)])
    backend.add_tokens([AddedToken(each, special=False) for each in _MARKS])
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=backend, eos_token=_END)
    tokenizer.chat_template = template
    size = backend.get_vocab_size()
    tiny_model(folder, "llama", **{
        **TINY, "vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": backend.token_to_id(_END),
    })  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


class Script:
    """Answers of a model, one after the other, whatever its logits say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: deque[str] = deque()
        self._under_way: dict[SamplingState, list[int]] = {}
        monkeypatch.setattr(launcher, "sample", self._sample)
        monkeypatch.setattr(LlamaBody, "has_multi_step", False)  # which would choose tokens without it

    def say(self, *answers: str) -> None:
        """Say what the next answers are."""
        self._answers.extend(answers)

    def _sample(self, logits: Tensor, states: Sequence[SamplingState], *more: Any) -> list[Sampled]:
        return [Sampled(self._token(state)) for state in states]

    def _token(self, state: SamplingState) -> int:
        tokens = self._under_way.get(state)
        if tokens is None:
            end = next(iter(self._tokenizer.eos_token_ids))
            tokens = self._under_way[state] = [*self._tokenizer.encode(self._answers.popleft()), end]
        return tokens[state.generated]
