"""What the page shows of a state, and without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.dashboard import states
from tests.dashboard.browser import Browser
from tests.dashboard.feed import Feed

from batchwright.server.dashboard.dashboard_state import (
    DashboardState,
    LevelState,
    Percentiles,
    QuotaState,
    ServerState,
    SloState,
)
from batchwright.service.observability.activity import TokenRates

LIVE = "document.documentElement.dataset.link === 'live'"
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn))).then(() => 0)"
"""What a change of size brings about has been done, and drawn."""
TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
CUT = """[...document.querySelectorAll("main *, header *")].filter((node) =>
    node.checkVisibility() && getComputedStyle(node).overflowX === "visible" && node.clientWidth > 0
    && node.scrollWidth > node.clientWidth + 1).map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("made", [states.extreme, states.state])
def test_nothing_overflows(browser: Browser, feed: Feed, made: Callable[[], DashboardState]) -> None:
    feed.show(made())
    with browser.page(width=1920) as page:
        page.go(feed.url)
        page.until(LIVE)
        for width in (1920, 1280, 1024, 700, 360):
            page.resize(width, 900)
            page.value(DRAWN)
            assert not page.value(TOO_WIDE), width
            assert page.value(CUT) == [], width
        assert page.complaints == []


def test_until_the_first_figures_come_it_says_so(browser: Browser, feed: Feed) -> None:
    with browser.page() as page:
        page.go(feed.url)
        page.until("document.querySelector('#link').innerText === 'Connecting…'")
        assert "Waiting for the first figures" in page.text("#jobs")
        feed.show(states.state())
        page.until(LIVE)
        assert "Waiting for the first figures" not in page.text("#jobs")


def test_without_jobs_it_says_how_to_make_one(browser: Browser, feed: Feed) -> None:
    feed.show(states.state())
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        assert "No jobs yet" in page.text("#jobs")
        assert '"url":"/v1/chat/completions"' in page.text("#example-line")
        assert "Nothing in the last two minutes" in page.text("#token-chart")


def test_figures_of_both_classes_are_shown(browser: Browser, feed: Feed) -> None:
    shown = states.state()
    online = shown.online.model_copy(update={"waiting": 7, "ttft_ms": Percentiles(count=3, p50=61, p90=128, p99=1287)})
    feed.show(shown.model_copy(update={"online": online, "dispatch_reasons": {"full": 3, "idle": 1}}))
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        assert "Waiting\n7" in page.text("#online")
        assert [each in page.text("#online") for each in ("61 ms", "128 ms", "1.29 s")] == [True] * 3
        assert "3 · 75%" in page.text("#reasons")


def test_service_levels_and_priorities_are_shown_where_there_are_any(browser: Browser, feed: Feed) -> None:
    base: dict[str, Any] = {"succeeded": 40, "failed": 0, "refused": 2, "p50": 61.0, "p99": 1287.0}
    levels = [
        LevelState(priority=0, in_time_share=0.9987, **base),
        LevelState(priority="other", in_time_share=1.0, **base),
    ]
    targets: dict[str, Any] = {"goal": 0.99, "ttft_ms": 500.0, "tpot_ms": None, "latency_ms": None}
    counts: dict[str, Any] = {"met": 98, "missed": 2, "failed": 0, "refused": 0}
    slos = [
        SloState(name="chat", attained=0.98, **targets, **counts),
        SloState(name="bulk", attained=0.999, **targets, **counts),
    ]
    with browser.page() as page:
        feed.show(states.state())
        page.go(feed.url)
        page.until(LIVE)
        assert page.value("document.querySelector('#levels').hidden && document.querySelector('#slos').hidden")
        feed.show(states.state(levels=levels, slos=slos))
        page.until("!document.querySelector('#slos').hidden")
        told = "40\t61 ms\t1.29 s"
        assert page.text("#level-rows").splitlines() == [f"0\t{told}\t99.8%\t2", f"other\t{told}\t100.0%\t2"]
        assert page.text("#slo-rows").splitlines() == ["chat\t99.0%\t98.0%\t2\t0\t0", "bulk\t99.0%\t99.9%\t2\t0\t0"]
        assert page.value("document.querySelector('#slo-rows .bad').innerText") == "98.0%"
        assert page.value("document.querySelector('#slo-rows th').title") == "first token within 500 ms"


def test_an_endpoint_elsewhere_has_no_engine_to_show(browser: Browser, feed: Feed) -> None:
    feed.show(states.state(engine=None, backend="http://10.0.0.5:8000/v1"))
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        assert "http://10.0.0.5:8000/v1" in page.text("#engine")
        assert "Occupancy\n" not in page.text("#engine")


def test_texts_of_others_are_text(browser: Browser, feed: Feed) -> None:
    name = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    feed.show(states.state(states.job(name=name, model=name), models=[name]))
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        assert page.text(".job h3") == name
        assert page.value("document.querySelectorAll('main img, main script').length") == 0
        assert page.complaints == []


def test_when_the_server_goes_the_figures_stay_grey_until_it_is_back(browser: Browser, feed: Feed) -> None:
    feed.show(states.state(states.job()))
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        feed.stop()
        page.until("document.documentElement.dataset.link === 'lost'")
        assert "Reconnecting" in page.text("#banner")
        assert "job-1.jsonl" in page.text("#job-list")
        page.until("document.querySelector('#announcer').textContent.includes('connection to the server is lost')")
        page.until("getComputedStyle(document.querySelector('#job-list')).filter === 'grayscale(1)'")
        feed.start()
        feed.show(states.state(states.job(completed=1000, progress=1.0, status="completed", ended_at=states.NOW)))
        page.click("#banner button")
        page.until("document.querySelector('#job-list').innerText.includes('Completed')")
        assert page.value("document.querySelector('#banner').hidden")
        assert "Connected again." in page.value("document.querySelector('#announcer').textContent")


def test_a_server_that_says_nothing_any_more_counts_as_gone(browser: Browser, feed: Feed) -> None:
    feed.show(states.state())
    with browser.page() as page:
        # The page's seconds are milliseconds here, so the service, which sends once a second, seems silent to it.
        faster = "const later = setTimeout; window.setTimeout = (act, ms) => later(act, ms / 1000);"
        page.send("Page.addScriptToEvaluateOnNewDocument", source=faster)
        page.go(feed.url)
        page.until("document.querySelector('#announcer').textContent.includes('connection to the server is lost')")


def test_a_change_of_status_is_announced_and_figures_are_not(browser: Browser, feed: Feed) -> None:
    with browser.page() as page:
        page.go(feed.url)
        feed.show(states.state(states.job()))
        page.until(LIVE)
        feed.show(states.state(states.job(completed=251)))
        page.until("document.querySelector('.job').innerText.includes('251')")
        assert page.value("document.querySelector('#announcer').textContent") == ""
        feed.show(states.state(states.job(status="cancelling")))
        page.until("document.querySelector('#announcer').textContent === 'job-1.jsonl: Cancelling'")
        assert page.value("document.querySelectorAll('[aria-live]').length") == 1


OFFERED: list[tuple[dict[str, object], str]] = [
    ({"status": "validating"}, "Pause Cancel"),
    ({"status": "in_progress"}, "Pause Cancel"),
    ({"status": "in_progress", "paused": True}, "Resume Cancel"),
    ({"status": "finalizing"}, ""),
    ({"status": "cancelling"}, ""),
    ({"status": "completed", "output_file_id": "file-1"}, "Output"),
    ({"status": "completed", "failed": 3, "output_file_id": "f", "error_file_id": "e"}, "Retry failed Output Errors"),
    ({"status": "expired", "failed": 750, "error_file_id": "e"}, "Retry failed Errors"),
    ({"status": "failed", "total": 0}, ""),
    ({"kind": "simple", "status": "in_progress"}, "Cancel"),
    ({"kind": "simple", "status": "completed", "failed": 1}, ""),
]


def test_what_can_be_done_with_a_job(browser: Browser, feed: Feed) -> None:
    feed.show(states.state(*(states.job(number, **changes) for number, (changes, _) in enumerate(OFFERED))))
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        for number, (changes, offered) in enumerate(OFFERED, start=1):
            assert page.text(f".job:nth-child({number}) .actions").split() == offered.split(), changes


def test_the_theme_is_the_systems_until_one_is_chosen(browser: Browser, feed: Feed) -> None:
    def background() -> str:
        return str(page.value("getComputedStyle(document.body).backgroundColor"))

    with browser.page() as page:
        page.go(feed.url)
        light = background()
        page.emulate("prefers-color-scheme", "dark")
        dark = background()
        assert light != dark
        page.click("#theme")
        assert (page.text("#theme"), background()) == ("Theme: light", light)
        page.send("Page.reload")
        page.until("document.querySelector('#theme').textContent === 'Theme: light'")
        assert background() == light


def test_nothing_moves_for_those_who_want_it_still(browser: Browser, feed: Feed) -> None:
    feed.show(states.state(states.job(status="validating", total=0, completed=0)))
    with browser.page() as page:
        page.emulate("prefers-reduced-motion", "reduce")
        page.go(feed.url)
        page.until(LIVE)
        assert page.value("document.getAnimations().length") == 0
        page.emulate("prefers-reduced-motion", "no-preference")
        page.until("document.getAnimations().length > 0")


def test_quotas_and_servers_are_shown_where_there_are_some(browser: Browser, feed: Feed) -> None:
    feed.show(states.state())
    with browser.page() as page:
        page.go(feed.url)
        page.until(LIVE)
        assert not page.value("document.querySelector('#shared').checkVisibility()")
        quotas = [
            QuotaState(of="tenant", name="storage_bytes", limit=10_000_000, used=2_500_000),
            QuotaState(of="key", name="requests_per_minute", limit=60, used=90),
        ]
        servers = [
            ServerState(name="one:1", here=True, online=3, lines=4, tokens=TokenRates(generated=10.0)),
            ServerState(name="two:2", here=False, online=5, lines=6, tokens=TokenRates(generated=20.0)),
            ServerState(name="two:3", here=False, online=None, lines=None, tokens=None),
        ]
        feed.show(states.state(quotas=quotas, servers=servers))
        page.until("document.querySelector('#shared').checkVisibility()")
        shown = page.text("#quotas")
        assert "Storage, tenant" in shown
        assert "2.50 MB of 10.0 MB" in shown
        assert "Requests a minute, key" in shown
        assert "90 of 60" in shown
        shown = page.text("#servers")
        assert "30 tokens/s, 8 online, 10 lines in all" in shown
        assert "one:1 (this one)" in shown
        assert "reports nothing of itself yet" in shown
        assert page.complaints == []
