"""Environments that return or say very much: what they cost is bounded, and their siblings do not pay for it.

No time is measured here. Work is counted; where it cannot be, what would take hours without a bound comes to an end.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import override

import pytest

import rlkit
from rlkit._util import json_values as plains
from rlkit._util import redaction
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.loading.secrets import redact
from rlkit.config.schema import Config, EnvConfig
from rlkit.errors import ContextFull, RewardError
from rlkit.policy import Limits
from rlkit.rollout.recorder import INLINE_CHARS, RecordingPolicy
from rlkit.rollout.runner import play_env
from rlkit.rollout.validation import INFO_BYTES, as_outcome
from rlkit.store import RunStore
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Json, Message, Outcome, Prompt, Sampling, Tokens, Tool, ToolCall
from tests.builders import episode
from tests.simulation import Simulation, Word

GIANT = 50_000_000


def info_of(value: object) -> Mapping[str, object]:
    return as_outcome(Outcome(1.0, info={"log": value})).info  # type: ignore[dict-item]  on purpose


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("x" * (INFO_BYTES - len('{"log":""}')), True),
        ("x" * (INFO_BYTES - len('{"log":""}') + 1), False),
        ("é" * ((INFO_BYTES - len('{"log":""}')) // 6), True),  # as it is recorded, an escape of six bytes
        ("é" * ((INFO_BYTES - len('{"log":""}')) // 6 + 1), False),
        ([1] * ((INFO_BYTES - len('{"log":[]}')) // 2), True),
        ([1] * ((INFO_BYTES - len('{"log":[]}')) // 2 + 2), False),
    ],
)
def test_info_may_have_a_mebibyte_of_json(value: object, fits: bool) -> None:
    size = len(json.dumps({"log": value}, separators=(",", ":")))
    assert (size <= INFO_BYTES) == fits
    if fits:
        assert info_of(value) == {"log": value}
    else:
        with pytest.raises(RewardError, match=r"an info of more than 1,048,576 bytes of JSON \(1 MiB\)"):
            info_of(value)


class Counted(list[object]):
    """List that counts the items read from it."""

    items_read = 0

    @override
    def __iter__(self) -> Iterator[object]:
        for item in super().__iter__():
            Counted.items_read += 1
            yield item


class CountedMapping(dict[str, object]):
    """Mapping that counts the items read from it."""

    @override
    def items(self) -> Iterator[tuple[str, object]]:  # type: ignore[override]  all that is asked of it
        for item in super().items():
            Counted.items_read += 1
            yield item


def nested(levels: int) -> object:
    """A little structure that is written out as 10 to the power of its levels."""
    value: object = "leaf"
    for _ in range(levels):
        value = Counted([value] * 10)
    return value


@pytest.mark.parametrize(
    ("value", "at_most"),
    [
        (Counted(range(3_000_000)), 0),
        (Counted("x" * 1000 for _ in range(20_000)), INFO_BYTES // 1000 + 1),
        (CountedMapping({str(number): number for number in range(1_000_000)}), 0),
        (nested(12), INFO_BYTES),
    ],
    ids=["many numbers", "many texts", "a large mapping", "one text many times"],
)
def test_oversized_info_is_rejected_before_it_is_read_completely(value: object, at_most: int) -> None:
    Counted.items_read = 0
    with pytest.raises(RewardError, match="at the key 'log': write large data to a file"):
        info_of(value)
    assert Counted.items_read <= at_most


@pytest.mark.parametrize("make", [lambda: "x" * GIANT, lambda: b"x" * GIANT, lambda: {"inner": ["x" * GIANT]}])
def test_a_giant_text_is_not_read(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    readable = plains.escape_surrogates
    monkeypatch.setattr(plains, "escape_surrogates", lambda text: (read.append(len(text)), readable(text))[1])
    with pytest.raises(RewardError, match="1 MiB"):
        info_of(make())
    assert max(read) < 1000


def test_huge_reward_or_error_is_abbreviated() -> None:
    class Giant(rlkit.Env):
        def __init__(self, odd: Callable[[], object]) -> None:
            self.odd = odd

        async def rollout(self, policy: rlkit.Policy) -> float:
            return self.odd()  # type: ignore[return-value]  on purpose

    def raises() -> object:
        raise RuntimeError("begins" + "x" * GIANT + "ends")

    async def errors() -> list[str | None]:
        odd = [raises, lambda: "x" * GIANT, lambda: [0] * 1_000_000, lambda: Outcome(1.0, {"m": "x" * GIANT})]  # type: ignore[dict-item]
        return [(await play_env(Giant(returned), ScriptedPolicy([]), timeout_s=300))[1] for returned in odd]

    raised, text, many, metric = map(str, asyncio.run(errors()))
    assert len(raised) < 11_000
    assert raised.startswith("RuntimeError: beginsxx")
    assert "… (50,000,010 characters) …" in raised
    assert "xxends at " in raised
    assert "returned str 'xxx" in text
    assert "returned list of 1,000,000 items" in many
    assert max(map(len, (text, many, metric))) < 300


def test_environment_with_fifty_megabytes_of_info_fails_only_its_episodes(tmp_path: Path) -> None:
    class Giant(Word):
        def grade(self, reply: rlkit.Reply) -> float:
            reward = super().grade(reply)
            if self.task_id != "task-1":
                return reward
            return Outcome(reward, info={"log": "x" * GIANT})  # type: ignore[return-value]  an outcome is one too

    run = Simulation(tmp_path / "run", tasks=[Giant(number) for number in range(4)])
    run.settings = {"batch": {"groups": 4, "group_size": 2}, "steps": 1}
    assert run.train().status == "completed"
    (line,) = run.lines()
    assert line["env/words/failed"] > 0
    (note,) = [note for note in run.ears.notes if "first failed rollout" in note]
    assert note.startswith("the first failed rollout of words, task task-1: Giant returned an info of more than 1,048")
    assert sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file()) < 1_000_000


@pytest.mark.parametrize(
    "text",
    ["-eyJ" * 1_000_000, "_eyJaaaaaaaa" * 300_000, "://" * 1_000_000, "://a:" * 600_000, "-----BEGIN " * 300_000],
    ids=["tokens", "longer tokens", "addresses", "passwords", "keys"],
)
def test_redaction_is_not_quadratic_in_partial_secrets(text: str) -> None:
    assert redact(text) == text


TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc"


@pytest.mark.parametrize("around", ["{}", "token={}", "Bearer {} x", "({})", "https://a.b/?t={}&u=1"])
def test_web_token_is_redacted_at_any_position(around: str) -> None:
    assert redact(around.format(TOKEN)) == around.format("[redacted]")
    assert TOKEN not in redact(f"key-{TOKEN}") + redact(f"key_{TOKEN}")


def test_redactor_reads_the_environment_once_per_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_PASSWORD", "swordfish in the well")
    reads = list[int]()
    secrets = redaction._secrets  # pyright: ignore[reportPrivateUsage]

    def counting(environ: Mapping[str, str]) -> frozenset[str]:
        reads.append(1)
        return secrets(environ)

    resolved = ResolvedConfig.from_python(Config(envs={"arithmetic": EnvConfig()}))
    info = {"steps": [{"swordfish in the well": f"step {number}"} for number in range(20_000)]}
    with RunStore(tmp_path / "run", resolved=resolved) as store:
        monkeypatch.setattr(redaction, "_secrets", counting)
        plain = {"steps": [str(number) for number in range(20_000)]}
        same = store.metadata.redact_episode(replace(episode(1.0), info=plain))
        cleaned = store.metadata.redact_episode(replace(episode(1.0), info=info))
    assert len(reads) == 2
    assert same.info is plain
    assert cleaned.info == {"steps": [{"***": f"step {number}"} for number in range(20_000)]}


class Threads(ByteChat):
    """Notes in which thread a text was tokenised."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths_and_threads = list[tuple[int, str]]()

    @override
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        rendered = super().render(messages, tools)
        self.lengths_and_threads.append((len(rendered), threading.current_thread().name))
        return rendered

    @override
    def encode(self, text: str) -> Tokens:
        self.lengths_and_threads.append((len(text), threading.current_thread().name))
        return super().encode(text)


def policy_of(chat: ByteChat, context_tokens: int | None) -> RecordingPolicy:
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=chat)
    return RecordingPolicy(
        sampler=lambda: sampler,
        chat=chat,
        sampling=Sampling(max_tokens=16),
        seed=lambda turn: turn,
        limits=Limits(context_tokens=context_tokens),
    )


def test_a_long_prompt_is_tokenised_beside_the_event_loop_and_a_short_one_on_it() -> None:
    chat = Threads()
    long: list[Message] = [{"role": "user", "content": "x" * 2_000_000}]

    async def main() -> tuple[str, ...]:
        policy = policy_of(chat, None)
        first = await policy.chat([{"role": "user", "content": "short"}])
        second = await policy.chat(long)
        third = await policy.chat([*long, second.message, {"role": "user", "content": "more"}])
        fourth = await policy.sample("y" * 2_000_000)
        assert [turn.parent for turn in policy.turns] == [None, None, 1, None]
        return first.text, second.text, third.text, fourth.text

    assert asyncio.run(main()) == ("hi", "hi", "hi", "hi")
    main_thread = threading.current_thread().name
    here = [length for length, thread in chat.lengths_and_threads if thread == main_thread]
    assert max(here) <= INLINE_CHARS
    assert max(length for length, thread in chat.lengths_and_threads if thread != main_thread) >= 2_000_000


@pytest.mark.parametrize("arguments", [{"a": [1] * 300_000}, {f"{key}": 1 for key in range(100_000)}, {}])
def test_calls_and_tools_count_as_part_of_a_long_prompt(arguments: dict[str, Json]) -> None:
    chat = Threads()
    call: ToolCall = {"id": "c", "name": "f", "arguments": arguments}
    messages: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tools: list[Tool] = [{"name": "f", "description": "" if arguments else "x" * 300_000, "parameters": {}}]
    asyncio.run(policy_of(chat, None).chat([*messages, {"role": "user", "content": "go on"}], tools=tools))
    assert {thread for length, thread in chat.lengths_and_threads if length > INLINE_CHARS} == {"rlkit_tokenizing_0"}


@pytest.mark.parametrize("how", ["chat", "sample"])
def test_a_prompt_that_fits_no_context_is_refused_before_it_is_tokenised(how: str) -> None:
    chat = Threads()

    async def main() -> None:
        policy = policy_of(chat, 4096)
        if how == "chat":
            await policy.chat([{"role": "user", "content": "x" * GIANT}])
        else:
            await policy.sample("x" * GIANT)

    with pytest.raises(ContextFull, match=r"a prompt of 50,000,0.. characters does not fit a context of 4096 tokens"):
        asyncio.run(main())
    assert chat.lengths_and_threads == []
