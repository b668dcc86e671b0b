"""Defects of the SDK that rlkit patches; a fixed SDK is not patched."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.openreward.connection import sdk


class Stream:
    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines

    @property
    def content(self) -> AsyncIterator[bytes]:
        return self._iterate_lines()

    async def _iterate_lines(self) -> AsyncIterator[bytes]:
        for line in self.lines:
            yield line


def parsed(text: str) -> list[tuple[str, str]]:
    async def main() -> list[tuple[str, str]]:
        lines = [line.encode() for line in text.splitlines(keepends=True)]
        return [event async for event in sdk.parse_events(Stream(lines))]

    return asyncio.run(main())


@pytest.fixture(scope="module")
def untouched() -> ModuleType:
    """The SDK's module as it is on the disk."""
    sdk.load()
    module_spec = importlib.util.find_spec("openreward.api._session.http")
    assert module_spec is not None and module_spec.origin is not None
    spec = importlib.util.spec_from_file_location("untouched_http", module_spec.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def untouched_client() -> ModuleType:
    """The SDK's client as it is on the disk."""
    sdk.load()
    module_spec = importlib.util.find_spec("openreward.api.environments.client")
    assert module_spec is not None and module_spec.origin is not None
    name = "openreward.api.environments.untouched_client"
    spec = importlib.util.spec_from_file_location(name, module_spec.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parser_of_the_known_version_loses_spaces_and_is_replaced(
    untouched: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openreward.api._session.http as http

    monkeypatch.setattr(http, "_parse_sse_events", untouched._parse_sse_events)
    sdk.patch_parser()
    assert http._parse_sse_events is sdk.parse_events, "fixed upstream: remove the patch"


def test_a_correct_sdk_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    import openreward.api._session.http as http

    async def right(response: Stream) -> AsyncIterator[tuple[str, str]]:
        async for event in sdk.parse_events(response):
            yield event

    monkeypatch.setattr(http, "_parse_sse_events", right)
    sdk.patch_parser()
    assert http._parse_sse_events is right


def test_blocks_of_the_known_version_are_patched_once(
    untouched_client: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openreward.api.environments.client as client

    monkeypatch.setattr(client, "_parse_blocks", untouched_client._parse_blocks)
    blocks = [{"type": "text", "text": "a"}, {"type": "hologram"}]
    assert len(client._parse_blocks(blocks)) == 1
    sdk.patch_blocks()
    patched = client._parse_blocks
    assert [block.type for block in client._parse_blocks(blocks)] == ["text", "hologram"]
    sdk.patch_blocks()
    assert client._parse_blocks is patched


def test_an_sdk_of_another_structure_is_used_unpatched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import openreward.api._session.http as http
    import openreward.api.environments.client as client

    async def resumable_sse(client: object, path: str) -> None:
        pass

    monkeypatch.delattr(http, "_parse_sse_events")
    monkeypatch.setattr(client, "resumable_sse", resumable_sse)
    sdk.load.cache_clear()
    sdk.load()
    sdk.load.cache_clear()
    assert client.resumable_sse is resumable_sse
    assert ["is not applied" in record.message for record in caplog.records] == [True, True]


def test_an_option_set_by_the_sdk_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import openreward.api.environments.client as client

    requests = list[tuple[str, object]]()

    async def resumable_sse(client: object, path: str, *, resumable_only: bool = False) -> None:
        requests.append((path, resumable_only))

    monkeypatch.setattr(client, "resumable_sse", resumable_sse)
    sdk.patch_tool_calls()

    async def main() -> None:
        await client.resumable_sse(None, "/x/call")  # pyright: ignore
        await client.resumable_sse(None, "/create_session")  # pyright: ignore
        await client.resumable_sse(None, "/x/call", resumable_only=False)  # pyright: ignore

    asyncio.run(main())
    assert requests == [("/x/call", True), ("/create_session", False), ("/x/call", False)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1), max_size=5))
def test_event_data_round_trips(chunks: list[str]) -> None:
    text = "".join(f": ping\nevent: chunk\ndata: {chunk}\n\n" for chunk in chunks)
    assert parsed(text) == [("chunk", chunk) for chunk in chunks]


def test_lines_without_a_field_are_ignored() -> None:
    assert parsed("event:end\ndata\nid: 4\nnonsense\ndata:two\n\n\n") == [("end", "\ntwo")]


def test_importing_rlkit_and_its_environments_imports_no_sdk() -> None:
    script = (
        "import sys, rlkit, rlkit.envs.openreward, rlkit.envs.openreward.task\n"
        "assert not {'openreward', 'aiohttp', 'torch', 'tinker'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
