"""docs/settings.md, made from the settings: `python docs/settings_page.py > docs/settings.md`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pydantic.fields import FieldInfo

from batchwright.service.setting_sources import CONFIG_VARIABLE, flag_of
from batchwright.service.settings import ENV_PREFIX, group_of, has_flag, setting_fields, shown_default, type_name

_HEAD = f"""\
# Settings of the service

`batchwright serve` reads its settings from flags, the environment and a TOML file. A flag takes precedence over the
environment, the environment over the file, and the file over the default. The file is the one that `--config` or
`{CONFIG_VARIABLE}` names, otherwise `batchwright.toml` in the platform's folder for settings
(`~/.config/batchwright/` on Linux). An unknown key in it is refused.

```toml
# batchwright.toml
port = 8080
max_file_size = "1GB"
webhook_allow = ["hooks.internal", "10.1.0.0/16"]
```

As flags: `--port 8080 --max-file-size 1GB --webhook-allow hooks.internal,10.1.0.0/16`. In the
environment: `BATCHWRIGHT_PORT=8080`, `BATCHWRIGHT_MAX_FILE_SIZE=1GB`,
`BATCHWRIGHT_WEBHOOK_ALLOW=hooks.internal,10.1.0.0/16`.

This page is made by `python docs/settings_page.py`.
"""


def page() -> str:
    """Return the whole page."""
    groups = groupby(setting_fields().items(), key=lambda item: group_of(item[1]))
    return _HEAD + "".join(f"\n## {group}\n\n{''.join(_rows(fields))}" for group, fields in groups)


def _rows(fields: Iterator[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| in the file | flag | environment | value | default | |\n| --- | --- | --- | --- | --- | --- |\n"
    for name, field in fields:
        kind = type_name(field).replace("|", ", ")
        flag = flag_of(name)
        flags = f"`{flag}`, `--no-{flag[2:]}`" if field.annotation is bool else f"`{flag}`" if has_flag(field) else ""
        description = str(field.description).replace("|", "\\|")
        default = f"`{shown}`" if (shown := shown_default(field)) else ""
        yield f"| `{name}` | {flags} | `{ENV_PREFIX}{name.upper()}` | {kind} | {default} | {description} |\n"


if __name__ == "__main__":
    print(page(), end="")
