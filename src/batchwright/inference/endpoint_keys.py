"""Where the API key for a remote endpoint comes from: a file, or one of a few environment variables.

A key is never the value of a flag, since every user of the machine can read those, and no error repeats a key. The
variable of a known provider is only used for that provider's own hosts.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from batchwright.errors import InputError
from batchwright.wire.dialects import ANTHROPIC, Dialect, is_azure

OWN_VARIABLE = "BATCHWRIGHT_BACKEND_API_KEY"
_AZURE_VARIABLE = "AZURE_OPENAI_API_KEY"
PROVIDERS: Mapping[str, str] = {
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "api.cerebras.ai": "CEREBRAS_API_KEY",
    "api.deepseek.com": "DEEPSEEK_API_KEY",
    "api.doubleword.ai": "DOUBLEWORD_API_KEY",
    "api.fireworks.ai": "FIREWORKS_API_KEY",
    "api.groq.com": "GROQ_API_KEY",
    "api.mistral.ai": "MISTRAL_API_KEY",
    "api.moonshot.ai": "MOONSHOT_API_KEY",
    "api.openai.com": "OPENAI_API_KEY",
    "api.sambanova.ai": "SAMBANOVA_API_KEY",
    "api.together.ai": "TOGETHER_API_KEY",
    "api.together.xyz": "TOGETHER_API_KEY",
    "api.x.ai": "XAI_API_KEY",
    "generativelanguage.googleapis.com": "GEMINI_API_KEY",
    "integrate.api.nvidia.com": "NVIDIA_API_KEY",
    "openrouter.ai": "OPENROUTER_API_KEY",
    "router.huggingface.co": "HF_TOKEN",
}
"""Variable with the key of each known provider, by its domain, which includes hosts such as eu.api.openai.com."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_FILE = 65_536
_OTHERS_MAY_READ = stat.S_IRWXG | stat.S_IRWXO

KEY_FLAG_REFUSED = (
    "--backend-api-key is no flag any more: every user of this machine can read the value of a flag in the list of "
    "processes, this one too, so replace the key if others use the machine. Give the key in an environment variable "
    f"({OWN_VARIABLE}, or the one that --{{prefix}}api-key-env names), or in a file (--{{prefix}}api-key-file)"
)
"""Error for a key on the command line; `prefix` is the prefix of the command's flags."""


@dataclass(frozen=True, slots=True)
class EndpointKey:
    """The API key for an endpoint, if there is one, and where it was looked for."""

    value: str | None = field(default=None, repr=False)
    origin: str = ""
    """Where the key comes from, or where none was found, for messages; empty if the caller provided it."""
    warning: str | None = None
    """What the owner of the key should know; None: nothing."""

    @property
    def refusal(self) -> str:
        """What the endpoint objects to if it answers 401 or 403 to requests with this key, or without one."""
        if self.value is not None:
            return f"it does not accept the API key{self.origin and f' from {self.origin}'}"
        looked = self.origin and f"; one was looked for in {self.origin}"
        return f"it does not accept requests without an API key{looked}"


def key_variables(address: str, dialect: Dialect) -> tuple[str, ...]:
    """Return the names of the environment variables in which a key for `address` is looked for, in order.

    An address that belongs to no known provider, such as one of this machine, gets the key that the official client of
    the dialect would send.
    """
    host = (urlsplit(address).hostname or "").lower()
    domain = next((each for each in PROVIDERS if host == each or host.endswith(f".{each}")), None)
    if is_azure(host):
        return OWN_VARIABLE, _AZURE_VARIABLE
    if domain is not None:
        return OWN_VARIABLE, PROVIDERS[domain]
    return OWN_VARIABLE, "ANTHROPIC_API_KEY" if dialect.name == ANTHROPIC.name else "OPENAI_API_KEY"


def is_provider(address: str) -> bool:
    """Return whether an address is that of a known provider, rather than of a self-hosted engine."""
    host = urlsplit(address).hostname or ""
    return is_azure(host) or any(host == each or host.endswith("." + each) for each in PROVIDERS)


def key_from_environment(
    address: str, dialect: Dialect, environment: Mapping[str, str], *, variable: str | None = None
) -> EndpointKey:
    """Return the key for `address`: that of `variable` if one is named, else of the first of `key_variables`.

    An empty variable counts as missing. Raises `InputError` if `variable` is not a name, or is missing.
    """
    if variable is None:
        names = key_variables(address, dialect)
    elif not _VARIABLE.fullmatch(variable):
        raise InputError("api_key_env: must be the name of an environment variable, not a key; what was given is not")
    else:
        names = (variable,)
    for name in names:
        if value := environment.get(name, "").strip():
            return EndpointKey(value, name)
    if variable is not None:
        # Keys of some providers look like variable names, but not like names in capitals.
        shown = f"={variable}" if variable.isupper() else ""
        raise InputError(f"api_key_env{shown}: there is no such environment variable, or it is empty: export it")
    return EndpointKey(None, " and ".join(names))


def key_from_file(path: Path) -> EndpointKey:
    """Read the key in the first line of a file. Raises `InputError` if there is none, or it cannot be read."""
    try:
        with path.expanduser().open("rb") as file:
            mode = path.expanduser().stat().st_mode
            line = file.readline(_LONGEST_FILE).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"api_key_file {path}: {reason}") from None
    if not line:
        raise InputError(f"api_key_file {path}: its first line is empty: write the key there")
    warning = None
    if stat.S_ISREG(mode) and mode & _OTHERS_MAY_READ:
        warning = f"{path} holds an API key, and other users may read it: chmod 600 {path}"
    return EndpointKey(line, str(path), warning)


def find_key(
    address: str,
    dialect: Dialect,
    environment: Mapping[str, str],
    *,
    variable: str | None = None,
    file: Path | None = None,
) -> EndpointKey:
    """Return the key in `file`, or as `key_from_environment` does. Raises `InputError`, also if both are named."""
    if file is None:
        return key_from_environment(address, dialect, environment, variable=variable)
    if variable is not None:
        raise InputError("api_key_env and api_key_file both name a key: give one of them")
    return key_from_file(file)
