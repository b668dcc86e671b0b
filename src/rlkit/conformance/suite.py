"""Run the checks of a service in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import NamedTuple

import tinker
from tinker.lib.base_url import DEFAULT_BASE_URL, resolve_base_url

from rlkit.conformance import checkpoints, optimiser, requests, samples, training
from rlkit.conformance.objectives import OBJECTIVES
from rlkit.conformance.probe import Deviation, ServiceProbe, Skipped
from rlkit.conformance.report import CheckResult, ServiceReport, Status
from rlkit.cost.usage import hosted_prices
from rlkit.errors import ServiceError, UsageError
from rlkit.tinker_client.connector import public_address
from rlkit.tinker_client.sdk import capture_warnings, translate_error


class Check(NamedTuple):
    """A check of one part of the protocol; a quick one covers what every run needs."""

    part: str
    name: str
    run: Callable[[ServiceProbe], str]
    is_quick: bool = False


CHECKS = (
    Check("session", "capabilities", requests.check_capabilities, True),
    Check("session", "key", requests.check_key, True),
    Check("session", "get_info", requests.check_info, True),
    Check("loss", "cross_entropy", training.check_cross_entropy, True),
    *(
        Check("loss", name, partial(training.check_loss, objective=objective), True)
        for name, objective in OBJECTIVES.items()
    ),
    Check("loss", "optional weights", training.check_optional_weights),
    Check("loss", "soft targets", training.check_soft_targets),
    Check("loss", "custom loss", training.check_custom_loss),
    Check("loss", "large batch", training.check_large_batch),
    Check("gradient", "forward pass leaves none", training.check_forward, True),
    Check("gradient", "size and sign", training.check_size, True),
    Check("gradient", "cross_entropy", training.check_weighted_gradient),
    *(
        Check("gradient", name, partial(training.check_gradient, objective=objective))
        for name, objective in OBJECTIVES.items()
    ),
    Check("gradient", "sum over data", training.check_accumulation),
    Check("optimiser", "scale of the gradient", optimiser.check_scale),
    Check("optimiser", "momentum", optimiser.check_momentum),
    Check("optimiser", "weight decay", optimiser.check_decay),
    Check("optimiser", "clipped norm", optimiser.check_clipping),
    Check("optimiser", "trained layers, seed", optimiser.check_layers),
    Check("samples", "log-probabilities by depth", samples.check_agreement, True),
    Check("samples", "seed", samples.check_seed, True),
    Check("samples", "temperature", samples.check_temperature, True),
    Check("samples", "distribution", samples.check_distribution),
    Check("samples", "top_k, top_p", samples.check_truncation),
    Check("samples", "stop", samples.check_stop, True),
    Check("samples", "stop strings", samples.check_stop_strings),
    Check("samples", "prompt_logprobs", samples.check_prompt_logprobs, True),
    Check("samples", "topk_logprobs", samples.check_topk),
    Check("samples", "target_prompt_logprobs", samples.check_targets),
    Check("samples", "prompt_alt_tokens", samples.check_alternatives),
    Check("checkpoints", "resume with optimiser", checkpoints.check_resumption, True),
    Check("checkpoints", "resume without optimiser", checkpoints.check_fresh_optimiser),
    Check("checkpoints", "snapshots", checkpoints.check_snapshots, True),
    Check("checkpoints", "named weights", checkpoints.check_named_weights),
    Check("checkpoints", "in-flight weights", checkpoints.check_inflight),
    Check("checkpoints", "management", checkpoints.check_management),
    Check("requests", "pipeline", requests.check_pipeline, True),
    Check("requests", "user error", requests.check_user_error, True),
    Check("requests", "order of seq_id", requests.check_order),
    Check("requests", "request sent twice", requests.check_retry),
    Check("requests", "future read twice", requests.check_future),
    Check("requests", "context limit", requests.check_context),
    Check("requests", "cancellation", requests.check_cancellation),
    Check("requests", "dead client", requests.check_dead_client),
)


def check_service(
    base_url: str | None = None,
    *,
    api_key: str | None = None,
    model: str | None = None,
    quick: bool = False,
    timeout_s: float = 600.0,
    seed: int = 0,
    note: Callable[[str], None] = lambda message: None,
) -> ServiceReport:
    """Try each endpoint and option of a Tinker service through the Tinker SDK.

    Args:
        base_url: by default the address that the SDK finds, and likewise the key.
        model: base model; by default the first trainable one that the service advertises.
        quick: only what every run needs.
        timeout_s: limit in seconds of each answer.
        note: receives a line before each check.

    Raises:
        UsageError: the service advertises no model and none is given.
        ServiceError: no session or no model can be opened, or the service is gone.
    """
    url = resolve_base_url(base_url)
    with (
        capture_warnings(lambda warning: None),
        open_probe(url, api_key=api_key, model=model, timeout_s=timeout_s, seed=seed, note=note) as probe,
    ):
        checks = [check for check in CHECKS if check.is_quick or not quick]
        results = list[CheckResult]()
        for index, check in enumerate(checks, 1):
            note(f"{index}/{len(checks)} {check.part}: {check.name}")
            results.append(run_check(probe, check))
    price = hosted_prices().get(probe.model) if url == DEFAULT_BASE_URL else None
    return ServiceReport(public_address(url), probe.model, results, probe.usage, price and price.usd(probe.usage))


@contextmanager
def open_probe(
    url: str, *, api_key: str | None, model: str | None, timeout_s: float, seed: int, note: Callable[[str], None]
) -> Generator[ServiceProbe]:
    """Open a session with an adapter, and end it; errors as in `check_service`."""
    activity = "opening a session"
    with ExitStack() as exits:
        try:
            model = model or requests.choose_model(url, api_key)
            probe = exits.enter_context(closing(ServiceProbe(url, api_key, model, timeout_s=timeout_s, seed=seed)))
            note(activity := f"creating an adapter of {model}")
            _ = probe.trainer
        except tinker.TinkerError as error:
            raise translate_error(error, activity) from error
        except Deviation as error:
            raise ServiceError(f"{activity}: {error}") from error
        yield probe


def run_check(probe: ServiceProbe, check: Check) -> CheckResult:
    """Run a check; its exceptions become its status, but for a `ServiceError` if the service is gone."""
    started = time.monotonic()
    status: Status = "works"
    try:
        with probe.session():
            detail = check.run(probe)
    except Deviation as error:
        status, detail = "deviates", str(error)
    except Skipped as error:
        status, detail = "skipped", str(error)
    except tinker.APIConnectionError as error:  # every other check would wait as long
        raise translate_error(error, f"{check.part}: {check.name}") from error
    except tinker.TinkerError as error:
        translated = translate_error(error, "the service's answer")
        status, detail = "absent" if isinstance(translated, UsageError) else "deviates", str(translated)
    except Exception as error:  # an answer that the SDK cannot read
        status, detail = "deviates", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return CheckResult(check.part, check.name, status, detail, round(time.monotonic() - started, 2))
