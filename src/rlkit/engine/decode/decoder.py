"""Continuous batching: decode all requests to one set of weights together, one token per step.

Invariant: in float32 on the CPU, the tokens and log-probabilities of a sample depend only on the weights, the prompt,
the settings, the seed and the sample's index, bit for bit. They do not depend on other samples, the time of arrival or
the number of threads. Nor do they depend on the prompts whose keys and values are kept.

Memory is reserved for the current tokens of a row and one more bucket, not for its maximum length. If keys and values
exceed their limit, or a client waits that has less than its share of the batch, the newest rows are requeued, and later
draw the same tokens again. Kept prefixes of prompts yield to rows: they only use memory that no row needs.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rlkit._util.activity import Activity
from rlkit.engine.decode.kv_cache import bucket_size, kv_bytes
from rlkit.engine.decode.prefixes import PAGE_TOKENS, Prefix, PrefixCache
from rlkit.engine.decode.prompts import PrefilledPrompt, prefill, reusable_length
from rlkit.engine.decode.requests import Row, SampleRequest, SampleResult, Ticket
from rlkit.engine.decode.running_batch import RunningBatch
from rlkit.engine.kernels.devices import BatchLimits, batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.weights import Weights
from rlkit.errors import UsageError

# Maximum number of likeliest tokens in an answer; each takes 8 bytes, several times during encoding.
_TOP_VALUES_MAX = 16 << 20


class Decoder:
    """Decoder of requests to one set of weights, made by `rlkit.engine.model.lora.make_sampling_weights`.

    Call `submit` for each request and `step` while `busy`.

    Args:
        limits: batch sizes; by default those of the weights' device. Decoders passed as `others` share the memory.
    """

    def __init__(
        self, weights: Weights, lanes: Lanes, *, limits: BatchLimits | None = None, activity: Activity | None = None
    ) -> None:
        self._weights = weights
        self._limits = limits or batch_limits(weights.norm.device)
        self._lanes = lanes
        self._waiting: deque[Row] = deque()
        self._batch = RunningBatch(weights, lanes.cores)
        self._keeps_prefixes = self._limits.prefix_bytes > 0
        self._prefixes = PrefixCache(has_states=self._keeps_prefixes and weights.config.delta is not None)
        self._numbers = itertools.count()
        self._lacks_memory = False
        self._activity = activity or Activity()

    @property
    def running_count(self) -> int:
        """Number of samples in the batch."""
        return len(self._batch)

    @property
    def drawn_tokens(self) -> int:
        """Number of tokens drawn so far in the samples of the batch."""
        return sum(len(row.tokens) for row in self._batch.rows)

    @property
    def prefix_bytes(self) -> int:
        """Memory of the kept prefixes."""
        return self._prefixes.size_bytes

    @property
    def queued_count(self) -> int:
        """Number of samples that wait for room."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """True while there are samples to decode."""
        return bool(self._waiting) or self.running_count > 0

    def submit(self, request: SampleRequest, on_result: Callable[[SampleResult], None], *, owner: str = "") -> Ticket:
        """Queue a request; `on_result` is called from `step` with its result. Owners have equal shares of the batch."""
        limit = _check_request(request, self._weights)
        ticket = Ticket(request, on_result, limit, [None] * request.num_samples, owner)
        self._waiting += [Row(ticket, index, next(self._numbers)) for index in range(request.num_samples)]
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request without calling its `on_result`."""
        self._waiting = deque(row for row in self._waiting if row.ticket is not ticket)
        self._batch.drop(lambda row: row.ticket is ticket)

    def drop_prefixes(self, owner: str) -> None:
        """Drop the kept prefixes that only `owner` used."""
        self._prefixes.drop_owner(owner)

    def step(self, *, others: Sequence[Decoder] = ()) -> None:
        """Admit rows that fit, then decode one token of each; `others` are decoders that share the memory."""
        self._make_room(others)
        self._share_batch()
        admitted = self._admit(others)
        new_rows = self._prefill(admitted)
        self._trim_prefixes((self, *others), sum(map(self._row_bytes, admitted)))
        # Start new rows, then decode a token of all.
        (tickets,) = self._lanes.run([lambda: [*self._batch.start(new_rows), *self._batch.decode()]])
        for ticket in dict.fromkeys(tickets):
            samples = tuple(sample for sample in ticket.samples if sample is not None)
            if len(samples) == len(ticket.samples):
                ticket.on_result(SampleResult(samples, ticket.prompt_scores))

    def _make_room(self, others: Sequence[Decoder]) -> None:
        """Requeue rows while all decoders together exceed the memory; a single row may exceed it."""
        together = (self, *others)
        while sum(decoder._used_bytes() for decoder in together) > self._limits.kv_bytes:
            if sum(decoder.running_count for decoder in together) < 2:
                return
            largest = max(together, key=Decoder._used_bytes)
            largest._requeue_newest(largest._batch.rows)

    def _trim_prefixes(self, together: Sequence[Decoder], new_bytes: int) -> None:
        """Drop kept prefixes, of the decoder with most, until they fit beside all rows and `new_bytes` of others."""
        rows_bytes = sum(decoder._used_bytes() for decoder in together) + new_bytes
        room = max(min(self._limits.kv_bytes - rows_bytes, self._limits.prefix_bytes), 0)
        caches = [decoder._prefixes for decoder in together]
        while sum(cache.size_bytes for cache in caches) > room:
            max(caches, key=lambda cache: cache.size_bytes).drop_oldest()

    def _share_batch(self) -> None:
        """Requeue rows of the owner with most, while the batch is full and rows wait of an owner with fewer."""
        waiting, running = _count_owners(self._waiting), _count_owners(self._batch.rows)
        if not running or len(waiting | running) < 2:
            return
        if not self._lacks_memory and self.running_count < self._limits.rows:
            return
        for owner in sorted(waiting, key=running.__getitem__):
            for _ in range(waiting[owner]):
                (most, count), *_ = running.most_common(1)
                if running[owner] + 1 >= count:
                    break
                self._requeue_newest([row for row in self._batch.rows if row.ticket.owner == most])
                running[most], running[owner] = count - 1, running[owner] + 1

    def _requeue_newest(self, rows: Sequence[Row]) -> None:
        """Put the newest of some rows back into the queue; it restarts when its present size fits."""
        newest = max(rows, key=lambda row: row.arrival)
        self._batch.drop(lambda row: row is newest)
        self._waiting.appendleft(Row(newest.ticket, newest.index, newest.arrival, _reserved_positions(newest)))

    def _admit(self, others: Sequence[Decoder]) -> list[Row]:
        """Admit waiting rows within the limits; of decoders that lack memory, the smallest admits rows first."""
        room = min(self._limits.rows - self.running_count, len(self._waiting))
        admitted: list[Row] = []
        self._lacks_memory = False
        if room <= 0:
            return admitted
        own_bytes, others_bytes = self._used_bytes(), sum(decoder._used_bytes() for decoder in others)
        least_bytes = min(
            (decoder._used_bytes() for decoder in others if decoder.busy and decoder._lacks_memory),
            default=self._limits.kv_bytes,
        )
        running = _count_owners(self._batch.rows)
        while len(admitted) < room and not self._lacks_memory:
            row = min(self._waiting, key=lambda row: running[row.ticket.owner])  # the first of them
            size_bytes = self._row_bytes(row)
            fits = own_bytes <= least_bytes and own_bytes + others_bytes + size_bytes <= self._limits.kv_bytes
            if fits or not own_bytes + others_bytes:
                own_bytes += size_bytes
                admitted.append(row)
                self._waiting.remove(row)
                running[row.ticket.owner] += 1
            else:
                self._lacks_memory = True
        return admitted

    def _used_bytes(self) -> int:
        return sum(map(self._row_bytes, self._batch.rows))

    def _row_bytes(self, row: Row) -> int:
        return kv_bytes(self._weights.config, _reserved_positions(row), self._weights.norm.element_size())

    def _prefill(self, admitted: Sequence[Row]) -> list[tuple[Row, PrefilledPrompt]]:
        """Run the prompts of new rows through the model; equal prompts and prefixes run once."""
        rows: dict[bytes, list[Row]] = {}
        for row in admitted:
            rows.setdefault(row.ticket.request.prompt.tobytes(), []).append(row)
        waiting = {key: list(dict.fromkeys(row.ticket for row in group)) for key, group in rows.items()}
        prompts: dict[bytes, PrefilledPrompt] = {}
        while waiting:
            new_pages: dict[bytes, Prefix] = {}
            wave: dict[bytes, Prefix] = {}
            for key, group in waiting.items():
                request, limit = group[0].request, reusable_length([ticket.request for ticket in group])
                prefix = self._prefixes.find(request.prompt, limit)
                count, shared = len(prefix.pages), [*itertools.takewhile(new_pages.__contains__, prefix.missing)]
                place = self._prefixes.round_down(min(count + len(shared), limit // PAGE_TOKENS))
                # The prompt waits for the next wave if its next pages are computed in this one.
                if place > count:  # a model with delta nets begins where the other prompt keeps its states
                    new_pages[shared[place - count - 1]].state_places.add(place)
                else:
                    wave[key] = prefix
                    new_pages.update(dict.fromkeys(prefix.missing if self._keeps_prefixes else (), prefix))
            groups = [waiting.pop(key) for key in wave]
            for key, group, prompt in zip(wave, groups, self._run_prompts(groups, [*wave.values()]), strict=True):
                prompts[key] = prompt
                if self._keeps_prefixes:
                    owners = {ticket.owner for ticket in group}
                    self._prefixes.put(group[0].request.prompt, prompt.pages, prompt.kept_states, owners)
                for ticket, scores in zip(group, prompt.scores, strict=True):
                    ticket.prompt_scores = scores
        return [(row, prompts[key]) for key, group in rows.items() for row in group]

    def _run_prompts(self, groups: Sequence[Sequence[Ticket]], prefixes: Sequence[Prefix]) -> list[PrefilledPrompt]:
        """Run the common prompt of each group after its kept prefix."""
        requests = [[ticket.request for ticket in group] for group in groups]
        lengths = [
            len(group[0].prompt) - PAGE_TOKENS * len(prefix.pages)
            for group, prefix in zip(requests, prefixes, strict=True)
        ]
        passes = _split_into_passes(lengths, self._lanes.count, self._limits.prefill_tokens)
        tasks = [
            partial(prefill, self._weights, [requests[i] for i in batch], [prefixes[i] for i in batch])
            for batch in passes
        ]
        with self._activity.track("tokens of prompts being read", sum(lengths)):
            return [prompt for batch in self._lanes.run(tasks) for prompt in batch]


def _count_owners(rows: Iterable[Row]) -> Counter[str]:
    return Counter(row.ticket.owner for row in rows)


def _reserved_positions(row: Row) -> int:
    """Return the positions to reserve for a row: its bucket and the next, or those reserved before, up to its limit."""
    maximum = len(row.ticket.request.prompt) + row.ticket.limit
    return min(max(row.reserved_positions, bucket_size(bucket_size(row.length) + 1)), maximum)


def _split_into_passes(lengths: Sequence[int], lanes: int, tokens: int) -> list[list[int]]:
    """Group consecutive prompts into about equal passes for the lanes, each of at most `tokens` or of one prompt."""
    maximum = min(-(-sum(lengths) // lanes), tokens)
    passes: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            passes.append([])
            room = max(maximum, length)
        passes[-1].append(index)
        room -= length
    return passes


def _check_request(request: SampleRequest, weights: Weights) -> int:
    """Raise `UsageError` for an invalid request; return the maximum number of tokens to sample."""
    window, vocab = weights.config.max_positions, weights.config.vocab_size
    if not len(request.prompt):
        raise UsageError("sample: the prompt is empty")
    if request.prompt.min() < 0 or request.prompt.max() >= vocab:
        raise UsageError(f"sample: the prompt has a token outside 0 … {vocab - 1}")
    # The model's own end tokens are exempt; a client's stop token outside of the vocabulary is a mistake.
    bad_tokens = [token for token in request.stop.tokens - weights.config.eos if not 0 <= token < vocab]
    if bad_tokens:
        raise UsageError(f"sample: the stop token {min(bad_tokens)} is outside 0 … {vocab - 1}")
    targets = request.targets
    if targets is not None and (len(targets) != len(request.prompt) - 1 or targets.min(initial=-1) < -1):
        raise UsageError("sample: target_prompt_logprobs needs a row for each prompt token except the first")
    if targets is not None and targets.max(initial=-1) >= vocab:
        raise UsageError(f"sample: target_prompt_logprobs has a token outside 0 … {vocab - 1}")
    limit = _token_limit(request, window)
    values = request.num_samples * limit * request.top + len(request.prompt) * request.prompt_top
    if values > _TOP_VALUES_MAX:
        raise UsageError(
            f"sample: topk_sample_logprobs {request.top} for {request.num_samples} samples of up to {limit} tokens and "
            f"topk_prompt_logprobs {request.prompt_top} for {len(request.prompt)} tokens may give {values} values, "
            f"and an answer may have at most {_TOP_VALUES_MAX}: lower max_tokens, num_samples or the reported number"
        )
    return limit


def _token_limit(request: SampleRequest, window: int) -> int:
    length = len(request.prompt)
    if length == window and request.max_tokens == 1 and request.score_start < length:
        return 1  # the last token is never run, so a prompt that fills the context can be scored
    if length >= window:
        raise UsageError(f"sample: {length} prompt tokens fill the context of {window}: shorten the prompt")
    limit = window - length if request.max_tokens is None else request.max_tokens
    if length + limit > window:
        raise UsageError(f"sample: {length} prompt tokens and max_tokens {limit} do not fit the context of {window}")
    return limit
