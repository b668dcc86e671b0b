"""Quick check of the connection to the Hugging Face hub.

Invariant: the check takes at most `LIMIT_S`; the hub's own libraries retry for more than a minute.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlkit._util.threads import call_within

LIMIT_S = 0.8
"""Time limit of a connection to the hub."""


def hub_problem() -> str | None:
    """Return why the hub cannot be reached, as a phrase; None if it can.

    The variables `HF_HUB_OFFLINE` and `HF_ENDPOINT`, and those of proxies, apply.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    proxies = getproxies()
    try:
        endpoint = server = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        host = endpoint.hostname or ""
        proxy = proxies.get(endpoint.scheme) or proxies.get("all")
        if proxy and not proxy_bypass(host):
            server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        address = (server.hostname or "", server.port or (80 if server.scheme == "http" else 443))
    except ValueError as error:
        return f"the address of the hub or of its proxy is no URL: {error}"
    route = "" if server is endpoint else f" through the proxy {address[0]}:{address[1]}"

    def connect() -> str | None:
        try:
            socket.create_connection(address, timeout=LIMIT_S).close()
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        return None

    problem = call_within(connect, timeout_s=LIMIT_S)
    return None if problem is None else f"{host} cannot be reached{route} ({problem})"
