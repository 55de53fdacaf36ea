"""Addresses of remote endpoints, and the proxies for them from the environment.

No message ever contains a password from either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.request import getproxies, proxy_bypass

from yarl import URL

_HOST = re.compile(r"[\w.-]+(:\d{1,5})?(/[\w./-]*)?", re.ASCII)
"""An address without its scheme, and without any part that may contain secrets."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy."""

    url: URL
    """Address, without credentials."""
    user: tuple[str, str] | None
    """Name and password, if the proxy requires them."""


def endpoint_url(text: str, *, key: str = "api_key") -> URL:
    """Parse the URL of an endpoint. `key` is the name of the setting for its key.

    Raises ValueError, without repeating a `text` that may contain a secret.
    """
    try:
        url = URL(text)
        credentials = url.raw_user is not None or url.raw_password is not None
        usable = (
            url.scheme in ("http", "https") and bool(url.host) and not url.raw_query_string and not url.raw_fragment
        )
    except ValueError:
        credentials = usable = False
    if credentials:
        raise ValueError(f"contains a user name or a password: leave them out and give the key as {key}")
    if not usable:
        meant = f": is http://{text}{'' if '/' in text else '/v1'} meant?" if _HOST.fullmatch(text) else ""
        raise ValueError(f"must be the http:// or https:// address of an endpoint, such as https://host/v1{meant}")
    return url


def proxy_for(url: URL) -> Proxy | None:
    """Return the proxy for `url` from `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`.

    Raises ValueError for a proxy that cannot be used.
    """
    if url.host is None or proxy_bypass(url.host) or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    named = getproxies()
    name = next((name for name in (url.scheme, "all") if named.get(name)), None)
    if name is None:
        return None
    text = named[name]
    try:
        proxy = URL(text if "://" in text else f"http://{text}")
        usable = proxy.scheme in ("http", "https") and bool(proxy.host)
        user = None if proxy.user is None else (proxy.user, proxy.password or "")
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{name.upper()}_PROXY: must be like http://host:3128; other kinds of proxies are not used")
    return Proxy(proxy.with_user(None), user)
