"""Connect to a service that may still be starting: retry for a limited time.

Invariant: waiting for an answer takes at most `timeout_s`, and so does opening a session. While it waits, a note tells
the user the address; the error states address and reason.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from urllib.parse import urlsplit

from rlkit._util.frames import iter_causes
from rlkit._util.threads import in_thread
from rlkit.errors import ConfigError, ServiceUnreachable

_ATTEMPT_S = 10.0  # limit of one request, short enough for several attempts a minute
_QUIET_S = 2.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 5.0
_NOT_IMPLEMENTED = 501
_MARGIN_S = 0.5
"""Extra time in which an attempt can raise its own timeout error, which is more informative than a cancellation."""


class Unreachable(Exception):
    """A failed attempt to reach a service; the message is the reason as a phrase."""


@dataclass(frozen=True, slots=True)
class Connector:
    """Retries requests to a service that may not be running yet."""

    url: str  # base URL of the service
    source: str  # origin of the address, as a phrase for messages
    timeout_s: float  # limit in seconds of all attempts
    note: Callable[[str], None]  # receives one line for the user while the service does not answer

    async def wait_for_answer(self) -> None:
        """Wait until the service answers; errors are those of `ask_health` and `retry`."""
        await in_thread(import_module, "httpx")  # before the timeout starts: the import can take seconds
        await self.retry(lambda limit_s: in_thread(ask_health, self.url, limit_s), "cannot be reached")

    async def retry[T](
        self, attempt: Callable[[float], Awaitable[T]], failure: str, *, hint: Callable[[], str] = lambda: "no answer"
    ) -> T:
        """Return the result of the first attempt that succeeds.

        Args:
            attempt: called with the remaining seconds; raises `Unreachable` to request a retry.
            failure: verb phrase of the error message, such as "cannot be reached".
            hint: returns the reason to report if no attempt ended in time.

        Raises:
            ServiceUnreachable: no attempt succeeded in time.
        """
        loop = asyncio.get_running_loop()
        until_s, delay_s = loop.time() + self.timeout_s, _BACKOFF_S
        address, reason, is_noted = public_address(self.url), "", False

        def note_wait() -> None:
            nonlocal is_noted
            if not is_noted:
                is_noted = True
                status = reason or "no answer yet"
                self.note(f"waiting up to {self.timeout_s:g} s for the service at {address}: {status}")

        timer = loop.call_later(_QUIET_S, note_wait)
        try:
            while (left_s := until_s - loop.time()) > 0:
                limit = asyncio.timeout(left_s + _MARGIN_S)
                try:
                    async with limit:
                        return await attempt(left_s)
                except Unreachable as error:
                    reason = str(error)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    break
                note_wait()
                await asyncio.sleep(min(delay_s, max(0.0, until_s - loop.time())))
                delay_s = min(2 * delay_s, _BACKOFF_MAX_S)
        finally:
            timer.cancel()
        raise ServiceUnreachable(
            f"the service at {address} ({self.source}) {failure}: {reason or hint()}; gave up after "
            f"{self.timeout_s:g} s (service.connect_timeout_s)"
        )


def public_address(url: str) -> str:
    """Return a URL without its user name, password, query and fragment, because they may be keys."""
    # Everything up to the last @ goes, because a password may contain any character.
    before, _, rest = url.rpartition("@")
    address = f"{before.partition('://')[0]}://{rest}" if "://" in before else rest
    try:
        return urlsplit(address)._replace(query="", fragment="").geturl()
    except ValueError:
        return address


def ask_health(url: str, timeout_s: float) -> None:
    """Return if the service answers with a status below 500, or 501: 401 and 404 also prove that it is running.

    Raises:
        ConfigError: the address is no URL.
        Unreachable: there is no answer, or a server error.
    """
    import httpx

    limit_s = min(timeout_s, _ATTEMPT_S)
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=limit_s, follow_redirects=True)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(
            f"service.base_url (or TINKER_BASE_URL): {public_address(url)!r} is not a valid URL of a service "
            f"({error}): it must begin with http:// or https://"
        ) from error
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise Unreachable(next(_reasons(error, limit_s))) from error
    if answer.is_server_error and answer.status_code != _NOT_IMPLEMENTED:
        request_id = answer.headers.get("x-request-id")
        raise Unreachable(f"it answered {answer.status_code}" + (f" (request {request_id})" if request_id else ""))


def _reasons(error: Exception, limit_s: float) -> Iterator[str]:
    """Yield reasons of a failed request, the most informative first."""
    import httpx

    for cause in reversed([*iter_causes(error, suppressed=True)]):
        match cause:
            case socket.gaierror():
                yield f"its name cannot be resolved ({cause.strerror})"
            case ssl.SSLCertVerificationError():
                yield f"TLS: its certificate is not valid ({cause.verify_message})"
            case ssl.SSLError():
                yield f"TLS: {cause.reason or cause}"
            case OSError(strerror=str(text)) if text:
                yield text.lower()
            case httpx.ConnectTimeout():
                yield f"no connection within {limit_s:.3g} s"
            case httpx.TimeoutException():
                yield f"it accepts connections, but sent no answer within {limit_s:.3g} s"
            case _:
                pass
    yield (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The address of a service."""

    base_url: str | None = None  # None for the SDK's default
    # None for the SDK's look-up of credentials, such as TINKER_API_KEY.
    api_key: str | None = field(default=None, repr=False)
    embedded: bool = False  # the service is the embedded engine, whose answers are repeatable
    connector: Connector | None = None  # retries until a session is open; None uses the SDK's own retries
