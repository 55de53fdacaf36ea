"""The modules' own functions, called in the browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.dashboard.browser import Browser, Page
from tests.dashboard.feed import Feed


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    feed = Feed()
    feed.start()
    with browser.page() as page:
        page.go(feed.url)
        yield page
    feed.stop()


def call(page: Page, module: str, function: str, *arguments: Any) -> Any:
    given = ", ".join(json.dumps(each) for each in arguments)
    return page.value(f"""(async () => {{
        const main = document.querySelector('script[src$="/main.js"]').src;
        const loaded = await import(new URL("./{module}.js", main));
        return loaded.{function}({given});
    }})()""")


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        ("count", None, "\u2013"),
        ("count", 0, "0"),
        ("count", 999_999, "999,999"),
        ("count", 1_000_000, "1.00 M"),
        ("count", 9_999_999, "9.99 M"),
        ("count", 999_999_999, "999 M"),
        ("count", 1_000_000_000, "1.00 B"),
        ("exact", 1_234_567_890, "1,234,567,890"),
        ("rate", 0, "0"),
        ("rate", 0.25, "0.3"),
        ("rate", 9.96, "10"),
        ("rate", 1234.5, "1,235"),
        ("share", None, "\u2013"),
        ("share", 0, "0%"),
        ("share", 0.001, "<1%"),
        ("share", 0.999999, "99%"),
        ("share", 1, "100%"),
        ("milliseconds", 3.21, "3.2 ms"),
        ("milliseconds", 9.96, "10 ms"),
        ("milliseconds", 999.6, "1.00 s"),
        ("milliseconds", 12_345, "12.3 s"),
        ("milliseconds", 125_000, "2 min 05 s"),
        ("duration", None, "\u2013"),
        ("duration", -3, "0 s"),
        ("duration", 59.6, "1 min 00 s"),
        ("duration", 3_599.4, "59 min 59 s"),
        ("duration", 3_600, "1 h 00 min"),
        ("duration", 86_399, "23 h 59 min"),
        ("duration", 86_400 * 4 + 3 * 3600, "4 d 3 h"),
        ("bytes", 999, "999 B"),
        ("bytes", 200_000_000, "200 MB"),
    ],
)
def test_figures_as_people_read_them(page: Page, function: str, value: float | None, shown: str) -> None:
    assert call(page, "format", function, value) == shown


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.3, 0.5), (1, 1), (1.01, 2), (4999, 5000), (5001, 10_000)])
def test_the_top_of_a_chart_is_a_round_number_above_all_values(page: Page, value: float, top: float) -> None:
    assert call(page, "chart", "niceTop", value) == top


def inspected(page: Page, name: str, text: str) -> Any:
    return page.value(f"""(async () => {{
        const main = document.querySelector('script[src$="/main.js"]').src;
        const {{ inspect }} = await import(new URL("./first-line.js", main));
        return inspect(new File([{json.dumps(text)}], {json.dumps(name)})).catch((error) => error.message);
    }})()""")


@pytest.mark.parametrize("before", ["", "\n \n", "\ufeff"])
def test_the_endpoint_stands_in_the_first_line(page: Page, before: str) -> None:
    found = inspected(page, "a.jsonl", before + '{"url": "/v1/embeddings"}\nnot JSON\n')
    assert found == {"kind": "requests", "endpoint": "/v1/embeddings", "array": False}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "It is empty."),
        ("\n\n", "Its beginning is blank."),
        ("\n{", "Line 2: must be a JSON object"),
        ('{"url": "/v1/other", "body": {}}', 'it is "/v1/other"'),
        ('{"method": "POST"}', "there is none"),
    ],
)
def test_a_file_without_an_endpoint_is_not_uploaded(page: Page, text: str, told: str) -> None:
    assert told in inspected(page, "a.jsonl", text)


@pytest.mark.parametrize(
    ("name", "text", "kind", "columns"),
    [
        ("a.csv", 'id,"a, ""quoted"" name",text\n1,2,3\n', "table", ["id", 'a, "quoted" name', "text"]),
        ("A.TSV", "id\ttext\r\n", "table", ["id", "text"]),
        ("a.parquet", "PAR1", "table", None),
        ("a.txt", "one prompt\n", "prompts", None),
        ("a.jsonl", '{"prompt": "x", "id": 1}', "prompts", ["prompt", "id"]),
        ("a.jsonl", '"a prompt"', "prompts", None),
        ("a.jsonl", '{"question": "x"}', "table", ["question"]),
        ("a.jsonl", '{"url": "http://x", "text": "y"}', "table", ["url", "text"]),
        ("a.jsonl", '{"prompt": "x", "method": "y"}', "prompts", ["prompt", "method"]),
        ("a.json", '[{"question": "x"}]', "table", ["question"]),
        ("a.json", '[{"question": "x"}, {"cut', "table", []),
    ],
)
def test_what_other_files_hold(page: Page, name: str, text: str, kind: str, columns: list[str] | None) -> None:
    assert inspected(page, name, text) == {"kind": kind, "columns": columns}
