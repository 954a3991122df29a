"""The Hugging Face Hub: cached files on this machine, and whether the Hub can be reached.

The Hub's client tries an unreachable address six times per file, for half a minute each, so without
a network an error about a mistyped directory would take minutes.
"""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pipeline.system.errors import ConfigError, UserError, one_line, require

HUB_URL = "https://huggingface.co"
TIMEOUT_SECONDS = 10.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def cached_file(name: str, file: str) -> str | None:
    """Return the cached path of a file of the model `name`, or None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return path if isinstance(path, str) else None


def download_settings(name: str) -> None:
    """Download a model's settings and tokenizer if they aren't cached and the Hub is reachable."""
    from huggingface_hub import snapshot_download

    if cached_file(name, "config.json") is None and unreachable_reason() is None:
        with suppress(OSError, ValueError):  # loading the model reports the error
            snapshot_download(name, allow_patterns=["*.json", "*.jinja"])


def unreachable_reason() -> str | None:
    """Return the reason why the Hub can't be reached, or None if it can be or if that is unknown.

    It is unknown behind a proxy, and if the user has set the Hub's client to offline mode.
    """
    if any(os.environ.get(name) for name in PROXIES) or os.environ.get("HF_HUB_OFFLINE"):
        return None
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB_URL)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_SECONDS):
            return None
    except OSError as error:
        return f"{address.hostname} can't be reached: {error.strerror or error}"


def require_reachable(message: str, error: type[UserError], *, alternative: str) -> None:
    """Check that the Hub can be reached.

    Raises:
        UserError: the Hub can't be reached; the error, of the given type, states `message` (what
            was not found here), the reason, and the fix, with an `alternative` to a Hub name.
    """
    reason = unreachable_reason()
    if reason is not None:
        hint = f"check the name and the connection, or use {alternative}"
        raise error(f"{message} ({reason}); {hint}")


def check_push(name: str, *, online: bool) -> None:
    """Check the repository's name and that a token exists; if `online`, also the token's rights.

    Raises:
        ConfigError: the upload would fail.
    """
    from huggingface_hub import HfApi, constants, get_token

    option = f"--push-to-hub {name}"
    is_valid = re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name, re.ASCII)
    require(is_valid is not None, f"{option} is not the name of a repository, such as OWNER/NAME")
    reason = unreachable_reason() if online else None
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else reason
    require(reason is None, f"{option}: {reason}; omit the option, and run `hf upload` later")
    require(get_token() is not None, f"{option} needs a token; run `hf auth login` or set HF_TOKEN")
    if not online:
        return
    try:
        user: Mapping[str, Any] = HfApi().whoami()
    except Exception as error:  # noqa: BLE001  # the client may raise anything
        reason = one_line(error)
        raise ConfigError(f"{option}: the token can't be checked: {reason}") from None
    token = user.get("auth", {}).get("accessToken", {"role": "write"})
    can_write = token["role"] == "write"
    owners = [user["name"], *(org["name"] for org in user.get("orgs", ()))]
    is_owner = name.rpartition("/")[0] in ("", *owners) or not can_write  # others may see no orgs
    require(can_write or "repo.write" in str(token), f"{option} needs a token with write access")
    require(is_owner, f"{option}: {user['name']} can only write to {', '.join(owners)}")
