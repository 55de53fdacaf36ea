"""What validators ask of the formats of texts beside their forms, as patterns in Rust's syntax."""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
"""Days that there are: no 29th of February of other years, and no year 0."""
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
"""A 60th second is one only where and when it was declared."""
_LABEL = "(?:[^.]{1,3}|[^.]{2}(?:[^.-]|[^.][^.-])[^.]{0,59})"
"""A label of a name, not longer than it may be, without the -- of encoded ones in its third place."""
_NAME = rf"{_LABEL}(?:\.{_LABEL})*$"

NARROWER: dict[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (f"^{_NO_LEAP_SECOND}",),
    "date-time": (_DATE, f"^[^Tt]*[Tt]{_NO_LEAP_SECOND}"),
    "email": (rf"^[^@]{{1,64}}@(?:\[|{_NAME})", "^.{3,254}$"),
    "hostname": (f"^{_NAME}", "^.{1,253}$"),
}
"""Patterns that a text of a format matches, too."""
