"""Work that a job's answers required of a machine, counting each shared prefix once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from batchwright.planning.bound import MachineRates, ModelCosts, NeededSteps, Work

_MOST_KNOWN = 2**18
"""Most blocks that are remembered; of more, a sample is."""
_SAFE = 4.0
"""Standard errors by which an estimate is lowered."""


class NeededWork:
    """The sum of the work that the answers of a job needed, in bounded memory.

    A block of tokens is identified by a digest of it and of all before it, so only equal prefixes match. Once there are
    more than `most_known` blocks, a part of them is remembered, chosen by their digests, and each of these counts for
    those that were left out: the sums are then unbiased estimates.
    """

    def __init__(self, model: ModelCosts, block_size: int, *, most_known: int = _MOST_KNOWN) -> None:
        self._model = model
        self._block_size = block_size
        self._most_known = most_known
        self._known: dict[int, int] = {}
        """For each block, how many keys of a prompt the rows of the only answer with it read; 0 if several have it."""
        self._sampling = 0
        """One in 2 to this power is remembered."""
        self._work = Work()
        self._variance = 0.0
        """Variance of the rows."""
        self._longest_chain = 0
        self._chains = 0.0

    @property
    def sampled(self) -> bool:
        """Whether the work is an estimate."""
        return self._sampling > 0

    @property
    def steps(self) -> NeededSteps:
        return NeededSteps(self._longest_chain, self._chains)

    @property
    def work(self) -> Work:
        """The work that was needed; of an estimate, what is certain."""
        found = Work()
        certain = 1.0 - _SAFE * math.sqrt(self._variance) / self._work.rows if self._variance else 1.0
        found.add(self._work, max(0.0, certain))
        found.unshared_prompt_keys += self._unshared_keys_of_blocks()
        found.logit_rows, found.likeliest_rows = self._work.logit_rows, self._work.likeliest_rows
        return found

    def add(
        self,
        tokens: Sequence[int],
        *,
        prompt: int,
        chain: int,
        turns: int,
        chosen: int,
        likeliest: bool,
        scored: range = range(0),
    ) -> None:
        """Count a sequence that was answered.

        - `tokens`: those that had to be computed; the first `prompt` are its prompt.
        - `chain`: steps that chose tokens for it; `turns`: those of them that computed nothing of it but the latest
          choice. `chosen`: the tokens that they chose, including right guesses, except those about which a form left no
          choice. `likeliest`: whether these are found without all logits.
        - `scored`: positions of the prompt whose logits were wanted: from the first one on, nothing is shared.
        """
        self._longest_chain = max(self._longest_chain, chain)
        self._chains += chain
        if likeliest:
            self._work.likeliest_rows += chosen
        else:
            self._work.logit_rows += chosen
        self._work.logit_rows += len(scored)
        size, end = self._block_size, len(tokens)
        blocks = end // size
        sharable = scored.start // size if scored else blocks
        values = array("I", tokens[: blocks * size])
        digest, first = b"", 0
        mask = (1 << self._sampling) - 1
        for block in range(blocks):
            digest = blake2b(digest + values[block * size : (block + 1) * size].tobytes(), digest_size=8).digest()
            number = int.from_bytes(digest, "little")
            begin, after = block * size, (block + 1) * size
            keys = max(0, min(after, prompt) - begin) * turns
            if block >= sharable:
                # It is computed in any case; that others can reuse it is recorded all the same.
                if number & mask == 0:
                    self._known[number] = 0 if number in self._known else keys
            elif number & mask:
                first = after
            elif number in self._known:
                self._known[number] = 0
                first = after
            else:
                self._known[number] = keys
                if self._sampling:
                    self._count(begin, after, prompt, turns)
                    first = after
        self._work.add(self._span(first, end, prompt, turns))
        self._work.unshared_prompt_keys += max(0, prompt - blocks * size) * turns
        while len(self._known) > self._most_known:
            self._sampling += 1
            mask = (1 << self._sampling) - 1
            self._known = {number: keys for number, keys in self._known.items() if number & mask == 0}

    def _unshared_keys_of_blocks(self) -> float:
        """Keys of prompts in blocks that only one answer needed; of a sample, what is certain."""
        times = float(1 << self._sampling)
        found = times * sum(self._known.values())
        variance = times * (times - 1.0) * sum(keys**2 for keys in self._known.values())
        return max(0.0, found - _SAFE * math.sqrt(variance))

    def _count(self, first: int, end: int, prompt: int, turns: int) -> None:
        """Count a block that was not known, for all that were not looked at."""
        times = float(1 << self._sampling)
        work = self._span(first, end, prompt, turns)
        self._work.add(work, times)
        self._variance += (times - 1.0) * times * work.rows**2

    def _span(self, first: int, end: int, prompt: int, turns: int) -> Work:
        """Work of the tokens at positions `first` to before `end` of a sequence, without the keys of its prompt.

        Each of its turns reads the keys so far. If there are fewer turns than tokens of its answer, some computed
        several, and the fewest keys were read if that was as late as possible.
        """
        answered, begin = prompt + turns, max(first, prompt)
        return Work(
            rows=end - first,
            pairs=self._model.pairs(first, end),
            unshared_answer_keys=_falling(answered - begin) - _falling(answered - max(begin, end)),
        )


def _falling(most: int) -> int:
    """Return `most` + (`most` - 1) + … + 1."""
    return most * (most + 1) // 2 if most > 0 else 0


@dataclass(frozen=True, slots=True)
class Answered:
    """Sums over the lines of a job that were answered."""

    lines: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens of prompts that were found in a cache."""
    generated_tokens: int


def least_work(answered: Answered) -> Work:
    """Return the least matrix products that lines took, where only their sums are known.

    All tokens except the last of each line went through the layers, and at least one token of each line was chosen. How
    many more were chosen, and what attention took, depends on unknowns: forced tokens, and lengths. For a line with
    several answers, the last tokens of all but one are counted in excess.
    """
    computed = answered.prompt_tokens - answered.cached_tokens + answered.generated_tokens
    rows = max(0, computed - answered.lines)
    return Work(rows=rows, likeliest_rows=min(rows, answered.lines))


def least_seconds(model: ModelCosts, rates: MachineRates, answered: Answered) -> float | None:
    """Return the least time of the matrix products of what was answered; None if nothing was generated.

    It is less than the bound of a run, since only sums are known: see `least_work`.
    """
    if not answered.generated_tokens:
        return None
    return least_work(answered).product_operations(model) / rates.products
