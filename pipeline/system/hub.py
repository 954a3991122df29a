"""The Hugging Face Hub: files in this machine's cache, and whether it can be reached.

The Hub's own client tries an address that doesn't answer six times for every file, for half a
minute each: a mistyped directory on a machine without a network would take minutes to be named.
"""

import os
import socket
from urllib.parse import urlsplit

from pipeline.system.errors import UserError

ADDRESS = "https://huggingface.co"
TIMEOUT_SECONDS = 10.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def cached_file(name: str, file: str) -> str | None:
    """The cached path of a file of the model `name`; None where it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return found if isinstance(found, str) else None


def why_unreachable() -> str | None:
    """Reason why the Hub can't be used; None if it responds, or if only its client can tell.

    That is so behind a proxy, and where the user has set the client to stay offline.
    """
    if any(os.environ.get(name) for name in PROXIES) or os.environ.get("HF_HUB_OFFLINE"):
        return None
    address = urlsplit(os.environ.get("HF_ENDPOINT") or ADDRESS)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_SECONDS):
            return None
    except OSError as error:
        return f"{address.hostname} can't be reached: {error.strerror or error}"


def require_reachable(sentence: str, error: type[UserError], *, instead: str) -> None:
    """Raise an error if the Hub can't be used.

    Args:
        sentence: what was not found on this machine.
        error: the kind of error to raise.
        instead: what the user may give in place of a name on the Hub.

    Raises:
        UserError: of that kind; why the Hub can't be used, and what to do.
    """
    reason = why_unreachable()
    if reason is not None:
        raise error(f"{sentence} ({reason}); check the name and the connection, or give {instead}")
