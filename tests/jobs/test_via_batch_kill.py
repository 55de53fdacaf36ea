"""`run --via batch`, killed at requests, at notes in the journal and at any moment: each line one result, paid once.

What the job's journal says was spent is what the provider's ledger says, to the last digit.

`BATCHWRIGHT_BATCH_KILLS=200` makes more kills than the usual ones, `BATCHWRIGHT_BATCH_LINES=5000` longer jobs.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.inference.batch_provider import PRICE, BatchServer, Fault, provider
from tests.inference.fireworks_provider import FireworksServer
from tests.jobs.fakes import by_id, text_of
from tests.long_form import examples

from batchwright import crash_points
from batchwright.backoff import Backoff
from batchwright.inference.batches import anthropic_batches, kinds, opening, provider_batches
from batchwright.inference.batches.times import BatchTimes
from batchwright.jobs.run import run
from batchwright.jobs.spend_journal import SpendJournal
from batchwright.submitting.drafts import BatchLimits
from batchwright.submitting.looking import LookPauses

KILLS = int(os.environ.get("BATCHWRIGHT_BATCH_KILLS", examples(18, long=30)))
LINES = int(os.environ.get("BATCHWRIGHT_BATCH_LINES", "60"))
OF_A_BATCH = max(20, LINES // 20)
BATCHES = -(-LINES // OF_A_BATCH)
FORMS: tuple[kinds.Form, ...] = ("openai", "anthropic", "fireworks")
STAGES = ("sealed", "uploading", "uploaded", "creating", "created", "collected")
LONGEST = 60.0


class Same(anthropic_batches.Translation):
    """Bodies as they are."""

    def request(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return body

    def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)


def work(source: str, output: str, url: str, form: kinds.Form, crash_at: str | None, times: int) -> None:
    """A run in a process of its own, which dies when it passes the place `crash_at` for the `times`-th time."""
    crash_points._name, crash_points._left = crash_at or "", times
    # What was on its way at a kill has arrived long before a batch counts as not created.
    quick = BatchTimes(
        patience=0.02,
        looks=LookPauses(0.01, 0.02, 0.02),
        retries=Backoff(0.01, 0.05),
        settles_in=1.5,
    )
    kind = kinds.ProviderKind("here", (), form=form, limits=BatchLimits(OF_A_BATCH))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_batches, "BatchTimes", lambda: quick)
        patch.setattr(opening, "kind_of", lambda url: kind)
        patch.setattr(opening, "_Messages", Same)
        # Nearly all that the lines may cost at most: what is reserved twice, or never given back, does not fit.
        run(source, output, backend=url, via="batch", price=PRICE, budget=str(LINES / 12) if form == "openai" else None)


def asked(prompt: str, form: kinds.Form) -> dict[str, Any]:
    if form == "fireworks":
        return {"id": prompt, "messages": [{"role": "user", "content": prompt}]}
    return {"id": prompt, "prompt": prompt}


def killing(process: Any, nth: int, chance: random.Random) -> Callable[[str, int], Fault]:
    """Faults of a provider that kills its client at the `nth` request, which it carries out or not."""
    seen = count(1)

    def fault(step: str, number: int) -> Fault:
        if next(seen) != nth:
            return None
        os.kill(process.pid, signal.SIGKILL)
        return "lost" if chance.random() < 0.7 else "deaf"

    return fault


@pytest.mark.parametrize("form", FORMS)
def test_killed_and_resumed(tmp_path: Path, form: kinds.Form) -> None:
    chance = random.Random(form)
    kills = jobs = 0
    prompts = [f"p{number}" for number in range(LINES)]
    bound = {"max_tokens": 50} if form == "openai" else {}
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(asked(each, form) | bound) + "\n" for each in prompts))
    while kills < KILLS / len(FORMS):
        jobs += 1
        output = tmp_path / f"out{jobs}.jsonl"
        with provider(FireworksServer if form == "fireworks" else BatchServer) as server:
            server.pace, server.lag = 1 + OF_A_BATCH // 3, 0.1
            ended = False
            for _ in range(100):
                way = chance.choice(["request", "journal", "moment"])
                place = f"journal.{chance.choice(['before', 'after'])}_{chance.choice(STAGES)}"
                nth = chance.randrange(1, 4 * BATCHES)
                arguments = (str(source), str(output), server.url, form)
                process = forked.context.Process(
                    target=work, args=(*arguments, place if way == "journal" else None, chance.randrange(1, 4))
                )

                server.faults = killing(process, nth, chance) if way == "request" else lambda step, number: None
                process.start()
                process.join(chance.random() * BATCHES / 2 if way == "moment" else LONGEST)
                if process.is_alive():
                    assert way == "moment"
                    process.kill()
                process.join()
                assert process.exitcode in (0, -signal.SIGKILL)
                kills += process.exitcode != 0
                ended = process.exitcode == 0
                if ended:
                    break
            assert ended
            assert {name: text_of(line) for name, line in by_id(output).items()} == {
                each: each.upper() for each in prompts
            }
            assert server.paid == dict.fromkeys(prompts, 1), f"paid twice after {kills} kills of {jobs} jobs"
            assert not (tmp_path / f"{output.name}.batches").exists()
            spent = tmp_path / f"{output.name}.spend"
            journal = SpendJournal(spent, json.loads(spent.read_bytes().splitlines()[0])["job"])
            assert Decimal(journal.totals.spent) / 10**12 == server.ledger
            assert (journal.totals.kept, journal.inherited) == (0, {})
