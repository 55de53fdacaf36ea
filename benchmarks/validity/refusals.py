"""The keyword that a refusal is about, by its text."""

from __future__ import annotations

import json
import re

_KEYWORDS = re.compile(r"has keywords that are not supported: (\[.*\])")
_KEYWORD = re.compile(r"(?:is not supported: |^schema: )([$\w]+): ")
_REASONS = {
    "Unknown format": "format",
    "oneOf constraints": "oneOf",
    "patternProperty regexes": "patternProperties",
    "min/maxProperties": "minProperties, maxProperties",
    "lookarounds": "pattern",
    "regex parse error": "pattern",
    "Unable to determine if regex": "pattern",
    "Unsatisfiable": "no answer satisfies it",
    "Failed to generate regex for": "minimum, maximum",
    "multipleOf": "multipleOf",
    "schema too large": "too large",
    "grammar size": "too large",
    "too large": "too large",
    "characters, the most is": "too large",
    "nested more than": "too large",
    "that are not required": "too large",
    "fuel": "too large",
    "circular references": "$ref",
    "Unresolvable": "$ref",
    "is not present in a registry": "$ref",
    "Pointer": "$ref",
    "retrieve": "$ref",
    "$ref": "$ref",
    "Expected": "no schema",
    "must be": "no schema",
    "Invalid type": "no schema",
}


def keyword_of(refusal: str) -> str:
    """Return the keyword, the first one if there are several, or another word for the reason."""
    if found := _KEYWORDS.search(refusal):
        keywords = json.loads(found[1])
        return "if" if "if" in keywords else str(keywords[0])
    if found := _KEYWORD.search(refusal):
        return found[1]
    return next((word for reason, word in _REASONS.items() if reason in refusal), "other")
