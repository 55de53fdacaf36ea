"""Translation of patterns in JSON Schemas, which are ECMAScript's, into the syntax of Rust's `regex`.

Validators differ: those in Python count more characters as digits, letters and white space, and their dot matches more.
A pattern that an answer must match accepts only what all of them accept.
"""

from __future__ import annotations

_SPACES = r"\t\n\x0b\x0c\r\x20\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
"""White space for every validator."""
_MORE_SPACES = _SPACES + r"\x1c-\x1f\x{85}\x{feff}"
"""White space for at least one validator."""
_ECMA_SPACES = _SPACES + r"\x{feff}"
_DIGITS, _MORE_DIGITS = "0-9", r"\p{Nd}"
_LETTERS, _MORE_LETTERS = "0-9A-Za-z_", r"\p{L}\p{N}_"
_LINE_ENDS = r"\n\r\x{2028}\x{2029}"

_FEW = {
    "s": f"[{_SPACES}]", "S": f"[^{_MORE_SPACES}]",
    "d": f"[{_DIGITS}]", "D": f"[^{_MORE_DIGITS}]",
    "w": f"[{_LETTERS}]", "W": f"[^{_MORE_LETTERS}]",
}  # fmt: skip
"""Classes with the characters that every validator counts as theirs, by the letter of their escape."""
_MANY = {
    "s": f"[{_MORE_SPACES}]", "S": f"[^{_SPACES}]",
    "d": f"[{_MORE_DIGITS}]", "D": f"[^{_DIGITS}]",
    "w": f"[{_MORE_LETTERS}]", "W": f"[^{_LETTERS}]",
}  # fmt: skip
"""Classes with the characters that at least one validator counts as theirs."""
_EXACT = {
    "s": f"[{_ECMA_SPACES}]", "S": f"[^{_ECMA_SPACES}]",
    "d": f"[{_DIGITS}]", "D": f"[^{_DIGITS}]",
    "w": f"[{_LETTERS}]", "W": f"[^{_LETTERS}]",
}  # fmt: skip
"""Classes of ECMAScript."""
_ANY = r"[\x{0}-\x{10ffff}]"


def in_rust(pattern: str, *, exact: bool = False) -> str:
    """Return `pattern` in Rust's syntax: for texts that every validator accepts or, with `exact`, as in ECMAScript.

    Raises ValueError for what is read differently by the two syntaxes and cannot be translated.
    """
    found: list[str] = []
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\" and at + 1 < len(pattern):
            found.append(_escaped(pattern[at + 1], _EXACT if exact else _FEW))
            at += 2
        elif letter == "[":
            end = _end_of_class(pattern, at)
            found.append(_class(pattern[at + 1 : end], exact=exact))
            at = end + 1
        else:
            found.append(f"[^{_LINE_ENDS}]" if letter == "." else letter)
            at += 1
    return "".join(found)


def _escaped(letter: str, classes: dict[str, str]) -> str:
    if letter == "a":
        raise ValueError(r"\a is a bell for some and the letter for others")
    if letter in "<>":
        return letter  # escaped, these are edges of words in Rust
    return classes.get(letter, f"\\{letter}")


def _end_of_class(pattern: str, start: int) -> int:
    at = start + 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    if at >= len(pattern):
        raise ValueError("a [ has no ]")
    return at


def _class(inner: str, *, exact: bool) -> str:
    """Return the class for what is between brackets, where Rust also has nested classes and operators."""
    is_negated = inner.startswith("^")
    inner = inner.removeprefix("^")
    if not inner:
        raise ValueError("[] and [^] have nothing in them")
    if "--" in inner:
        raise ValueError("-- in brackets")
    if any(f"\\{letter}" in inner and f"\\{letter.upper()}" in inner for letter in "sdw"):
        if is_negated:
            raise ValueError("a class of no character")
        return _ANY
    classes = _EXACT if exact else _MANY if is_negated else _FEW
    found: list[str] = []
    at = 0
    while at < len(inner):
        letter = inner[at]
        if letter == "\\":
            following = inner[at + 1 : at + 2]
            found.append(r"\x08" if following == "b" else _escaped(following, classes))
            at += 2
            if following in classes and inner[at : at + 1] == "-":
                found.append(r"\-")  # not a range, whose ends are characters
                at += 1
        else:
            found.append(f"\\{letter}" if letter in "[&~" else letter)
            at += 1
    return f"[{'^' if is_negated else ''}{''.join(found)}]"
