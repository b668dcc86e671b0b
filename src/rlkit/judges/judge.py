"""A model that grades replies by a rubric, for environments.

Invariant: a judge never changes, so tasks share it; its counts are those of a process. A judgement that fails, or stays
unreadable, raises, and never has a score.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, cast
from weakref import WeakValueDictionary

from pydantic import Field, FiniteFloat, HttpUrl, NonNegativeFloat, NonNegativeInt, PositiveFloat

from rlkit._util.paths import cache_dir, expand_user
from rlkit._util.sections import Positive, check_fields, validate_fields
from rlkit._util.seeds import derive_seed
from rlkit._util.threads import in_thread
from rlkit.config.schema.operation import ServiceConfig
from rlkit.cost.usage import Price, Usage, hosted_prices
from rlkit.errors import EnvironmentFault, LimitReached, MissingError, ServiceError, UsageError
from rlkit.evaluation.openai_endpoint import Endpoint, EndpointPolicy, connect_endpoint
from rlkit.judges.records import JudgeRecords
from rlkit.judges.rubric import ask_for_verdict, fill_prompt, hash_text, read_field_names, read_verdict
from rlkit.policy import Limits, Policy
from rlkit.serving.model import open_model
from rlkit.tinker_client.connect import ServiceChoice, choose_service, connect
from rlkit.types import Sampling
from rlkit.workers.resource import WorkerResource

type _Text = Annotated[str, Field(min_length=1)]
type _Amount = Annotated[FiniteFloat, Field(ge=0)]


class JudgementError(EnvironmentFault):
    """A judge gave no readable verdict. The episode, or the group, fails and has no reward."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a judge: its text, and its usage as `metrics` of an `Outcome`, `judge/tokens` and others."""

    scores: tuple[float, ...]
    text: str
    metrics: Mapping[str, float]

    @property
    def score(self) -> float:
        """The score of the first reply, or of the only one."""
        return self.scores[0]


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A model that scores replies by a rubric, in the methods of an environment::

        judge = rlkit.Judge(model="Qwen/Qwen3-32B", prompt="Is this polite?\n\n{reply}", scale=(0, 10))
        verdict = await judge.score(reply=reply.text)
        return rlkit.Outcome(verdict.score / 10, verdict.metrics)

    Args:
        model: name of a model or `tinker://` path of sampler weights; with `url`, the endpoint's name of a model.
        prompt: rubric with fields such as `{reply}`; the form of the verdict is appended. `{mark}` is a word that
            follows from the fields, for lines around a reply that the reply cannot forge.
        scale: lowest and highest score.
        url, key_env: address of an OpenAI-compatible endpoint, and the environment variable that holds its key.
        service: address of a Tinker service, or "engine" for the embedded engine; None chooses as a run does.
        max_tokens, temperature: sampling of an answer; a temperature of 0 repeats it, and needs `attempts=1`.
        attempts: requests until a verdict is readable, each with a seed of its own (endpoints get no seed).
        timeout_s, max_concurrent: limit of a request in seconds; limit of concurrent requests of a process.
        requests_per_minute: limit of the requests to the model, of all processes that share the folder.
        budget_tokens, budget_usd: limits of spending on the model, of all processes and runs that share the folder.
        prices: US dollars per million tokens of prompts and of answers; None for rlkit's price table.
        folder: folder of verdicts and spending, with a subfolder for each model, that is `model`, `url` and `service`;
            by default `judges` in rlkit's cache.
    """

    model: _Text
    prompt: str
    scale: tuple[FiniteFloat, FiniteFloat]
    url: str | None = None
    key_env: _Text | None = None
    service: _Text | None = None
    max_tokens: Positive = 4096
    temperature: _Amount = 1.0
    attempts: Positive = 3
    timeout_s: PositiveFloat = 600.0
    max_concurrent: Positive = 16
    requests_per_minute: PositiveFloat = math.inf
    budget_tokens: NonNegativeInt | None = None
    budget_usd: NonNegativeFloat | None = None
    prices: tuple[_Amount, _Amount] | None = None
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        for field in ("scale", "prices"):
            pair = cast("tuple[object, ...] | list[object] | None", getattr(self, field))
            if isinstance(pair, tuple | list) and len(pair) == 2:
                object.__setattr__(self, field, tuple(pair))  # YAML has lists, which have no hash
            elif pair is not None:
                raise UsageError(f"judge: {field}: give two numbers, not {pair!r:.100}")
        try:
            check_fields(self)
        except UsageError as error:
            raise UsageError(f"judge: {error}") from None
        for place, url in (("url", self.url), ("service", None if self.service == "engine" else self.service)):
            if url is not None:
                validate_fields(HttpUrl, url, place=f"judge: {place}")
        for field, is_right, problem in (
            ("scale", self.scale[0] < self.scale[1], "give the lowest score first"),
            ("prompt", read_field_names(self.prompt), "it has no field such as {reply}"),
            ("temperature", self.temperature > 0 or self.attempts == 1, "0 repeats an answer: set attempts=1"),
            ("url", self.url is None or self.service is None, "url and service exclude each other"),
            ("key_env", self.url is not None or self.key_env is None, "it needs url, the endpoint that gets the key"),
        ):
            if not is_right:
                raise UsageError(f"judge: {field}: {problem}")

    @property
    def usage(self) -> Mapping[str, float]:
        """Sums of the metrics of this process, also of judgements that failed."""
        return dict(_get_counts(self))

    async def score(self, /, **fields: str) -> Judgement:
        """Score one reply, given the value of each field of the prompt.

        Raises:
            JudgementError: no answer was readable, or the model did not answer.
            UsageError, MissingError: wrong fields, a used budget, no key or no service; ends a run.
        """
        return await self._judge(fields, None)

    async def compare(self, replies: Sequence[str], /, **fields: str) -> Judgement:
        """Score the replies of a group in one request, for `score_group`; the prompt has the field `{replies}`.

        Equal replies are shown once. The order follows from the texts, so that no member has a place of its own.
        """
        texts = (
            [] if isinstance(replies, str) else [reply for reply in replies if isinstance(cast("object", reply), str)]
        )
        if not texts or len(texts) < len(replies) or "replies" not in read_field_names(self.prompt):
            raise UsageError("judge: compare needs a list of texts, and a prompt with the field {replies}")
        distinct_replies = sorted(set(replies), key=hash_text)
        verdict = await self._judge(fields, distinct_replies)
        score_of = dict(zip(distinct_replies, verdict.scores, strict=True))
        return replace(verdict, scores=tuple(score_of[reply] for reply in replies))

    async def _judge(self, fields: Mapping[str, str], replies: Sequence[str] | None) -> Judgement:
        """Return the verdict from the cache or the model; `replies` is None for one reply."""
        count = None if replies is None else len(replies)
        prompt = f"{fill_prompt(self.prompt, fields, replies)}\n\n{ask_for_verdict(self.scale, count)}"
        source = [self.model, self.url, self.service]
        root = cache_dir() / "judges" if self.folder is None else expand_user(self.folder)
        records = JudgeRecords(root / hash_text(source)[:16])
        key = hash_text([source, self.max_tokens, self.temperature, prompt])
        read_scores = partial(read_verdict, scale=self.scale, count=count)
        metrics = dict.fromkeys(_get_counts(self), 0.0)
        try:
            async with _locks.setdefault((asyncio.get_running_loop(), key), asyncio.Lock()):
                text = await in_thread(records.read_verdict, key)
                scores = read_scores(text)
                metrics["judge/cached"] = float(scores is not None)
                for attempt in range(self.attempts if scores is None else 0):
                    text = await self._request(prompt, records, metrics, seed=derive_seed(0, "judge", key, attempt))
                    scores = read_scores(text)
                    if scores is not None:
                        await in_thread(records.write_verdict, key, text)
                        break
                    metrics["judge/unreadable"] += 1
        except (ServiceError, EnvironmentFault, LimitReached, TimeoutError) as error:
            raise JudgementError(f"the judge {self.model} failed: {str(error) or 'timeout_s has passed'}") from error
        finally:
            for name, value in metrics.items():
                _get_counts(self)[name] += value
        if scores is None:
            end = " ".join(text.split())[-200:]
            raise JudgementError(f"the judge {self.model} gave no readable verdict; its last answer ended: {end!r}")
        return Judgement(scores, text, metrics)

    async def _request(self, prompt: str, records: JudgeRecords, metrics: dict[str, float], *, seed: int) -> str:
        """Return an answer; the last line of one that was cut off says so, and is no verdict."""
        make_policy, price, slots = await _share_connection(replace(self, prompt="{reply}", scale=(0, 1))).get()
        if self.budget_usd is not None and price is None:
            raise UsageError("judge: budget_usd needs a price: set prices, or budget_tokens in its place")
        limits = {"tokens": self.budget_tokens, "usd": self.budget_usd}
        interval_s = 60.0 / self.requests_per_minute

        async def start_request() -> None:
            start_s = await in_thread(lambda: records.start_request(limits, interval_s=interval_s, now_s=time.time()))
            await asyncio.sleep(start_s - time.time())
            metrics["judge/requests"] += 1

        async with slots:
            await start_request()
            async with asyncio.timeout(self.timeout_s):
                policy = make_policy(Sampling(self.max_tokens, self.temperature), seed)
                if isinstance(policy, EndpointPolicy):
                    policy.before_retry = start_request
                reply = await policy.chat([{"role": "user", "content": prompt}])
            usage = Usage(1, len(reply.turn.prompt), 0, len(reply.turn.completion))
            usd = 0.0 if price is None else price.usd(usage)
            metrics["judge/tokens"] += usage.tokens
            metrics["judge/usd"] += usd
            await in_thread(records.add_spending, usage.tokens, usd)
        return f"{reply.text}\n[cut off at max_tokens]" if reply.truncated else reply.text


type _Connection = tuple[Callable[[Sampling, int], Policy], Price | None, asyncio.Semaphore]
"""Factory of the policy of a request, price of its tokens, and limit of concurrent requests."""

_locks = WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock]()
"""Locks of running requests, so that equal requests are sent once."""


@cache
def _get_counts(judge: Judge) -> dict[str, float]:
    return {f"judge/{name}": 0.0 for name in ("requests", "cached", "unreadable", "tokens", "usd")}


@cache
def _share_connection(judge: Judge) -> WorkerResource[_Connection]:
    """Return the connection of this process, which judges with other rubrics share."""
    return WorkerResource(partial(_connect, judge))


@asynccontextmanager
async def _connect(judge: Judge) -> AsyncGenerator[_Connection]:
    slots, is_engine = asyncio.Semaphore(judge.max_concurrent), judge.service == "engine"
    price = Price(judge.prices[0], judge.prices[0], judge.prices[1], 0.0) if judge.prices else None
    if judge.url is not None:
        key = os.environ.get(judge.key_env) if judge.key_env else None
        if judge.key_env and not key:
            raise MissingError(f"judge: the environment variable {judge.key_env} (key_env) is not set")
        endpoint = Endpoint(judge.url, judge.model, key, judge.key_env or "")
        async with connect_endpoint(endpoint, timeout_s=judge.timeout_s) as make:
            yield lambda sampling, seed: make(sampling, Limits()), price, slots
        return
    config = ServiceConfig(base_url=None if is_engine else judge.service)
    choice = ServiceChoice("engine", None, "the judge's service") if is_engine else choose_service(config)
    async with connect(config, choice=choice) as service:
        model = await open_model(service, judge.model, with_weights=choice.kind == "engine")
        price = price or (hosted_prices().get(model.name) if choice.kind == "hosted" else None)
        yield lambda sampling, seed: model.make_policy(sampling, seed=lambda turn: seed), price, slots
