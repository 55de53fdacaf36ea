"""A lower bound of the time of a job on one machine, and where the time above it went.

The bound is computed from countable amounts and measured rates, each of which `assumptions` names:

- *Matrix products* take the longer of two times, since the weights can be read while others are multiplied: all
  operations at the best rate, and the least time of a step times the number of steps needed: at least those of the
  longest chain, and enough to give all chains their turns in the available places.
- *Attention* takes the longer of two times as well: its operations at the best rate, and the keys that no other
  sequence shares, read once in each step of an answer, at the bandwidth of memory.
- Each core does one after the other, so the two add up.

Operations are multiplications and additions; products with 8 bits in a bfloat16 model count half their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Operations and bytes that a model needs per row, key and step."""

    layer_operations: float
    """Operations of the products of one row in all layers."""
    last_operations: float
    """The part of them that only rows with logits need: all of the last layer except queries, keys and values."""
    head_operations: float
    """Operations of the head for a row with logits."""
    likeliest_operations: float
    """Operations of the head for a row of which only the likeliest token is wanted."""
    pair_operations: float
    """Operations of a query and a key in one layer."""
    windows: tuple[tuple[int | None, int], ...]
    """How many keys a query sees at most (None: all), and in how many layers."""
    key_bytes: float
    """Bytes of the key and the value of a token in one layer."""

    @property
    def full_layers(self) -> int:
        """Number of layers whose queries see all keys."""
        return sum(layers for window, layers in self.windows if window is None)

    def pairs(self, first: int, end: int) -> int:
        """Return how many keys the queries at positions `first` to before `end` see, in all layers together."""
        return sum(layers * (_seen(end, window) - _seen(first, window)) for window, layers in self.windows)


def _seen(end: int, window: int | None) -> int:
    """Keys that the queries at positions 0 to before `end` see in a layer, each its own included."""
    grown = end if window is None else min(end, window)
    return grown * (grown + 1) // 2 + (end - grown) * (window or 0)


@dataclass(slots=True)
class Work:
    """Amounts of work, either of computed steps or of required answers."""

    rows: float = 0.0
    """Tokens that went through the layers."""
    logit_rows: float = 0.0
    """Rows whose logits were computed."""
    likeliest_rows: float = 0.0
    """Rows of which only the likeliest token was found."""
    pairs: float = 0.0
    """Pairs of a query and a key, in all layers."""
    unshared_prompt_keys: float = 0.0
    """Keys of prompts that no other sequence has, which single rows of answers read, counted for each such row, in one
    layer. Keys that several sequences share can be read for all of them at once."""
    unshared_answer_keys: float = 0.0
    """Keys of answers that such rows read."""

    def add(self, other: Work, times: float = 1.0) -> None:
        """Add `other`, multiplied by `times`."""
        self.rows += times * other.rows
        self.logit_rows += times * other.logit_rows
        self.likeliest_rows += times * other.likeliest_rows
        self.pairs += times * other.pairs
        self.unshared_prompt_keys += times * other.unshared_prompt_keys
        self.unshared_answer_keys += times * other.unshared_answer_keys

    @property
    def unshared_keys(self) -> float:
        """Keys that single rows read by themselves."""
        return self.unshared_answer_keys + self.unshared_prompt_keys

    def product_operations(self, model: ModelCosts) -> float:
        """Operations of all matrix products."""
        with_logits = self.logit_rows + self.likeliest_rows
        return (
            self.rows * model.layer_operations
            - max(0.0, self.rows - with_logits) * model.last_operations
            + self.logit_rows * model.head_operations
            + self.likeliest_rows * model.likeliest_operations
        )

    def read_bytes(self, model: ModelCosts) -> float:
        """Bytes of the keys and values that single rows read by themselves."""
        return self.unshared_keys * model.full_layers * model.key_bytes

    def attention_operations(self, model: ModelCosts, unshared_cost: float) -> float:
        """Operations of attention; those of keys that a single row reads count `unshared_cost` times."""
        unshared = self.unshared_keys * model.full_layers
        return model.pair_operations * (self.pairs + (unshared_cost - 1.0) * unshared)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Best rates that were measured on a machine with the kernels that compute there."""

    products: float
    """Operations per second of matrix products."""
    attention: float
    """Operations per second of attention, where many rows read the same keys."""
    unshared_cost: float
    """How many times as long an operation of attention takes where a single row reads its keys, all in the cache."""
    least_step: float
    """Seconds of the products of a step of one row, which reads all weights."""
    bandwidth: float
    """Bytes per second that are read from memory."""
    settled: bool = True
    """Whether repeated measurements agreed. They do not while others use the processors, which makes a machine slower
    than it can be."""

    def with_best(self, other: MachineRates) -> MachineRates:
        """Return these rates, or those of `other` where they are better."""
        return MachineRates(
            max(self.products, other.products),
            max(self.attention, other.attention),
            self.unshared_cost,
            min(self.least_step, other.least_step),
            max(self.bandwidth, other.bandwidth),
            self.settled or other.settled,
        )


@dataclass(frozen=True, slots=True)
class NeededSteps:
    """Lower bound on decoding steps, whatever the schedule: each chooses one token of a sequence, or some at once."""

    longest_chain: int = 0
    """Steps that the longest sequence takes, one after another."""
    of_all_chains: float = 0.0
    """Sum of the steps of all sequences."""

    def least(self, places: int) -> float:
        """Return the least number of steps with at most `places` sequences in each."""
        return max(float(self.longest_chain), self.of_all_chains / max(1, places))


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound in seconds, and its parts."""

    products_seconds: float
    """What matrix products take at least: `multiplying_seconds`, or `steps_seconds` if that is longer."""
    attention_seconds: float
    """What attention takes at least: `pairs_seconds`, or `keys_seconds` if that is longer."""
    multiplying_seconds: float
    steps_seconds: float
    pairs_seconds: float
    keys_seconds: float
    least_steps: float
    assumptions: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.products_seconds + self.attention_seconds


def bound_of(
    work: Work,
    steps: NeededSteps,
    model: ModelCosts,
    rates: MachineRates,
    *,
    places: int,
    block_size: int = 16,
    drafts: bool = False,
    sampled: bool = False,
) -> Bound:
    """Return the bound of the needed `work` on a machine with `rates`.

    - `places`: the most sequences in a step.
    - `drafts`: whether guesses at the next tokens made chains shorter; `sampled`: whether `work` is an estimate.
    """
    multiplying = work.product_operations(model) / rates.products
    pairs = work.attention_operations(model, rates.unshared_cost) / rates.attention
    least = steps.least(places)
    in_steps = least * rates.least_step
    keys = work.read_bytes(model) / rates.bandwidth
    return Bound(
        products_seconds=max(multiplying, in_steps),
        attention_seconds=max(pairs, keys),
        multiplying_seconds=multiplying,
        steps_seconds=in_steps,
        pairs_seconds=pairs,
        keys_seconds=keys,
        least_steps=least,
        assumptions=_assumptions(work, steps, model, rates, places, block_size, drafts=drafts, sampled=sampled),
    )


def _assumptions(
    work: Work,
    steps: NeededSteps,
    model: ModelCosts,
    rates: MachineRates,
    places: int,
    block_size: int,
    *,
    drafts: bool,
    sampled: bool,
) -> tuple[str, ...]:
    texts = [
        f"{work.rows:,.0f} tokens go through the layers, {model.layer_operations:,.0f} operations each: all tokens of "
        f"prompts and answers but the last of each answer; what several have in common in whole blocks of {block_size} "
        "tokens from the beginning counts once",
        f"{work.logit_rows:,.0f} of them need all logits, {model.head_operations:,.0f} operations of the head, and "
        f"{work.likeliest_rows:,.0f} only the likeliest token, {model.likeliest_operations:,.0f}; the others leave out "
        f"{model.last_operations:,.0f} operations of the last layer",
        f"matrix products run at {rates.products / 1e9:,.1f} Gop/s, the best of a measurement with many rows and of "
        "every step of this run",
        f"there are at least {steps.least(places):,.0f} steps, each with {rates.least_step * 1e3:,.2f} ms of products, "
        f"the least of a measurement with one row and of every step of this run: the longest answer takes "
        f"{steps.longest_chain:,} steps, and all together {steps.of_all_chains:,.0f} turns in {places:,} places "
        "(max_num_seqs)",
        "reading the weights can happen while others are multiplied: the longer of the two counts, not the sum",
        f"{work.pairs:,.0f} pairs of a query and a key, {model.pair_operations:,.0f} operations each, run at "
        f"{rates.attention / 1e9:,.1f} Gop/s, the best of a measurement and of every step of this run; the keys that "
        f"only one sequence has, which single rows read by themselves, {work.unshared_keys:,.0f} in each of "
        f"{model.full_layers} layers, take {rates.unshared_cost:.2f} times as long, though they lie in the cache",
        f"or these keys are read from memory, {model.key_bytes:,.0f} bytes each, at {rates.bandwidth / 1e9:,.1f} GB/s, "
        "if that takes longer",
        "each core computes attention and products one after the other, so their times add; nothing else takes time: "
        "no norms, no choice of tokens, no planning, reading and writing, no waiting of threads for each other",
    ]
    if not rates.settled:
        texts.append(
            "others used the processors while rates were measured: they are what this machine reached beside them"
        )
    if drafts:
        texts.append(
            "guesses at the next tokens are right as often as in this run: other company could let more of them be "
            "tried, and the chains be shorter"
        )
    if sampled:
        texts.append(
            "what prompts have in common was estimated from a sample of their blocks, four standard errors on the "
            "safe side"
        )
    return tuple(texts)


@dataclass(slots=True)
class SpentTime:
    """Seconds of a run by what they were spent on, as far as the engine knows it."""

    total: float = 0.0
    """From the first line to the last."""
    forward: float = 0.0
    """In the model, without the choice of tokens."""
    products: float = 0.0
    attention: float = 0.0
    tail_products: float = 0.0
    """Products of steps with free places and nothing left to start."""
    tail: Work = field(default_factory=Work)
    """Work of these steps."""


class NoBound(Exception):
    """The reason why the bound of a run is not known, worded to follow "not known: "."""


PART_NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "tail": "waiting for the tail",
    "host": "host",
    "recomputation": "computed again or in vain",
    "other": "rest of the model",
}
"""What time is spent on, and how it is shown to people. The tail is products of steps that nothing is left to fill; the
host is everything outside the model: reading, planning, sampling, writing."""
PARTS = tuple(PART_NAMES)
LEAST_SHARE_SHOWN = 0.005
"""Least share of the time that is shown to people."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of a run by `PARTS`."""

    spent: Mapping[str, float]
    """Where the time went: the shares add up to 1."""
    lost: Mapping[str, float]
    """What each part took beyond the bound: with the share of the bound, they add up to 1."""


def shares_of(
    bound: Bound,
    time: SpentTime,
    needed: Work,
    computed: Work,
    model: ModelCosts,
    rates: MachineRates,
) -> Shares:
    """Return where the time of a run went whose steps computed `computed` when `needed` was needed."""

    def attention(work: Work) -> float:
        return work.attention_operations(model, rates.unshared_cost)

    needless_products = _excess(computed.product_operations(model), needed.product_operations(model))
    needless_attention = _excess(attention(computed), attention(needed))
    tail = max(0.0, time.tail_products - time.tail.product_operations(model) / rates.products)
    tail = min(tail, time.products) * (1.0 - needless_products)
    spent = {
        "products": time.products * (1.0 - needless_products) - tail,
        "attention": time.attention * (1.0 - needless_attention),
        "tail": tail,
        "host": max(0.0, time.total - time.forward),
        "recomputation": time.products * needless_products + time.attention * needless_attention,
        "other": max(0.0, time.forward - time.products - time.attention),
    }
    whole = sum(spent.values())
    if not whole:
        none = dict.fromkeys(PARTS, 0.0)
        return Shares(none, none)
    lost = dict(spent)
    # Steps at the end that read the weights for few rows are needed as far as the bound includes them.
    for names, needed_seconds in (
        (("products", "tail"), bound.products_seconds),
        (("attention",), bound.attention_seconds),
    ):
        left = needed_seconds
        for name in (*names, "other", "recomputation", "host"):  # the last three in case of rounding only
            taken = min(left, lost[name])
            lost[name] -= taken
            left -= taken
    return Shares(*({part: seconds / whole for part, seconds in each.items()} for each in (spent, lost)))


def _excess(computed: float, needed: float) -> float:
    """Share of `computed` that was not needed."""
    return min(1.0, max(0.0, 1.0 - needed / computed)) if computed else 0.0
