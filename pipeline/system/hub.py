"""The Hugging Face Hub: cached files on this machine, and whether the Hub can be reached.

The Hub's client tries an unreachable address six times per file, for half a minute each, so without
a network an error about a mistyped directory would take minutes.
"""

import os
import socket
from urllib.parse import urlsplit

from pipeline.system.errors import UserError

ADDRESS = "https://huggingface.co"
TIMEOUT_SECONDS = 10.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def cached_file(name: str, file: str) -> str | None:
    """The cached path of a file of the model `name`; None if it is not in the cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return found if isinstance(found, str) else None


def why_unreachable() -> str | None:
    """The reason why the Hub can't be used; None if it responds, or if only its client can tell.

    The latter holds behind a proxy, or if the user has set the client to offline mode.
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
        sentence: sentence that says what was not found on this machine.
        error: type of error to raise.
        instead: what the user may pass instead of a Hub name.

    Raises:
        UserError: of that type; the message has the reason and the fix.
    """
    reason = why_unreachable()
    if reason is not None:
        raise error(f"{sentence} ({reason}); check the name and the connection, or use {instead}")
