"""Addresses such as `s3://bucket/file.jsonl`, and what is said when nothing can be done at one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from batchwright.errors import InputError, MissingExtra

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_HTTP = ("http", "https")
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol"}
"""Package that brings the driver of a scheme, where it is not that of its module."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "s3a": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "abfs": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN",
}
"""Where the drivers look for credentials."""
_NO_CREDENTIALS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "NoAuthTokenError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
        "LocalTokenNotFoundError",
    }
)
"""Names of the errors of botocore, google-auth, azure and huggingface_hub about credentials."""
_REFUSED = frozenset({401, 403, 407})
_GONE = frozenset({404, 410})
_PASSING = frozenset({408, 409, 423, 425, 429})
"""Statuses below 500 that may pass."""
_LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def scheme_of(name: str) -> str | None:
    """The scheme of an address, in small letters; None for the path of a file on this machine."""
    found = _ADDRESS.match(name)
    scheme = None if found is None else found[1].lower()
    return None if scheme in (None, "file", "local") else scheme


def local_name(name: str) -> str:
    """The path that `file://…` names; any other name as it is."""
    return unquote(urlsplit(name).path) if name.lower().startswith("file://") else name


def shown_address(address: str) -> str:
    """An address without what may be secret: a password, and the query of a signed link."""
    if scheme_of(address) not in _HTTP:
        return address
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def is_pattern(address: str) -> bool:
    """Whether an address stands for all that match it; `?` begins the query of an address of the web."""
    return any(sign in address for sign in ("*" if scheme_of(address) in _HTTP else "*?["))


def filesystem_of(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path within it.

    Raises `MissingExtra` if fsspec or the driver is not installed, `InputError` for an address that no driver takes.
    """
    shown, scheme = shown_address(address), scheme_of(address)
    try:
        import stamina  # noqa: F401 - comes with the same extra
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError as error:
        raise MissingExtra(
            f"{shown}: an address needs {error.name}; install it: pip install 'batchwright[remote]'"
        ) from error
    options: dict[str, Any] = {"use_listings_cache": False}
    try:
        if scheme in _HTTP:
            import aiohttp

            # A file may take any time as long as something arrives.
            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=60)}
        filesystem, path = url_to_fs(address, **options)
    except ImportError as error:
        known = known_implementations.get(scheme or "", {}).get("class", "").partition(".")[0]
        package = _PACKAGES.get(scheme or "") or known or error.name
        raise MissingExtra(
            f"{shown}: {scheme}:// needs the package {package}; install it: pip install {package}"
        ) from error
    except Exception as error:
        if isinstance(error, ValueError) and "rotocol not known" in str(error):
            raise InputError(
                f"{shown}: there is no driver for {scheme}://; use s3://, gs://, az://, hf:// or https://"
            ) from error
        raise InputError(f"{shown} cannot be opened: {explained(address, error)}") from error
    return filesystem, str(path)


def may_pass(error: BaseException) -> bool:
    """Whether what failed at a store may succeed when it is tried again."""
    status = _status_of(error)
    if status is not None:
        return status >= 500 or status in _PASSING
    if (cause := _behind(error)) is not None:
        return may_pass(cause)
    if _lacks_credentials(error) or isinstance(error, _LASTING):
        return False
    return isinstance(error, Exception)


def is_condition_not_met(error: BaseException) -> bool:
    """Whether a store refused a write since what it was to replace is not, or no longer, as the write said."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else None
        if isinstance(each, FileExistsError) or code in ("PreconditionFailed", "412") or _status_of(each) == 412:
            return True
    return False


def explained(address: str, error: BaseException) -> str:
    """What went wrong at an address, with the remedy if it is known."""
    scheme = scheme_of(address) or ""
    hint = f"set {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else "give credentials as its driver wants them"
    if _lacks_credentials(error):
        return f"there are no credentials for {scheme}:// ({_message(error)}): {hint}"
    cause = _behind(error)
    if isinstance(error, PermissionError) or _status_of(cause or error) in _REFUSED:
        return f"access is refused ({_message(cause or error)}): {hint}"
    if isinstance(error, FileNotFoundError) and (cause is None or _status_of(cause) in _GONE):
        return "it does not exist"
    return _message(cause or error)


def _behind(error: BaseException) -> BaseException | None:
    """The error behind one that says that a file does not exist: the driver of the web says so whatever happened."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    return cause if type(cause).__module__.partition(".")[0] == "aiohttp" or isinstance(cause, OSError) else None


def _lacks_credentials(error: BaseException) -> bool:
    return any(type(each).__name__ in _NO_CREDENTIALS for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _status_of(error: BaseException) -> int | None:
    """The status of the HTTP answer that an error is about; None if it is not known."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


def _message(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text or type(error).__name__
