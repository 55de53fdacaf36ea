"""Patterns, in Rust's syntax, for what validators require of string formats beyond their form."""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
"""Days that exist: 29 February only in leap years, and no year 0."""
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
"""Second 60 is valid only where and when a leap second was declared."""
_LABEL = "(?:[^.]{1,3}|[^.]{2}(?:[^.-]|[^.][^.-])[^.]{0,59})"
"""A label of a name, of allowed length, without the -- at the third place that marks encoded labels."""
_NAME = rf"{_LABEL}(?:\.{_LABEL})*$"

NARROWER: dict[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (f"^{_NO_LEAP_SECOND}",),
    "date-time": (_DATE, f"^[^Tt]*[Tt]{_NO_LEAP_SECOND}"),
    "email": (rf"^[^@]{{1,64}}@(?:\[|{_NAME})", "^.{3,254}$"),
    "hostname": (f"^{_NAME}", "^.{1,253}$"),
}
"""Patterns that a text must match in addition to its format, by format."""
