"""Whether Hugging Face's hub can be asked at all, before a library asks it again and again."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

PATIENCE_S = 3.0
OF_CHECKPOINTS = "config.json", "model_index.json", "adapter_config.json"  # of a model, a pipeline, adapters


@functools.cache
def why_unreachable() -> str:
    """Return why the hub cannot be reached, within seconds, or "" if it may be; a proxy is not tried."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    if address.scheme in getproxies() and not proxy_bypass(host):
        return ""
    try:
        socket.create_connection((host, port), PATIENCE_S).close()
    except OSError as error:
        return f"{host} cannot be reached: {error}"
    return ""


def why_not_there(name: str) -> str:
    """Return why a checkpoint cannot be read, neither from the cache nor from the hub, or "" if it may be."""
    from transformers.utils.hub import cached_file

    if os.path.exists(Path(name).expanduser()):
        return ""
    for file in OF_CHECKPOINTS:
        with contextlib.suppress(OSError, ValueError):  # not in the cache
            if cached_file(name, file, local_files_only=True):
                return ""
    return why_unreachable()
