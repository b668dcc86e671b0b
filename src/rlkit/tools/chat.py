"""Conversations with the weights of a run, or with a checkpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlkit._util.seeds import derive_seed
from rlkit._util.threads import in_thread
from rlkit.chat.renderers import load_chat
from rlkit.config.loading.run_config import load_run_config
from rlkit.errors import UsageError
from rlkit.policy import Policy
from rlkit.serving.model import open_model
from rlkit.store.history import table_path
from rlkit.tinker_client.connect import choose_service, connect
from rlkit.token_records.list_columns import read_columns  # pyright: ignore[reportUnknownVariableType]  pyarrow has no types
from rlkit.token_records.pieces import decode_pieces, pieces_path, read_pieces
from rlkit.tools.checkpoints import choose_checkpoint
from rlkit.types import Sampling


@asynccontextmanager
async def open_chat(
    name: str,
    sampling: Sampling,
    *,
    step: int | None = None,
    best: bool = False,
    seed: int = 0,
    note: Callable[[str], None],
) -> AsyncGenerator[Callable[[], Policy]]:
    """Load a checkpoint, and yield a function that begins a conversation with it.

    Args:
        name: name or folder of a run, or `tinker://` path of sampler weights.
        sampling: settings of the replies.
        step, best: see `choose_checkpoint`; by default the newest checkpoint.

    Raises:
        UsageError: there is no such checkpoint.
        MissingError: the service does not answer.
    """
    chosen = choose_checkpoint(name, step=step, best=best)
    path = chosen.path if chosen.checkpoint is None else chosen.checkpoint.sampler
    choice = choose_service(chosen.service)
    async with connect(chosen.service, choice=choice, note=note) as service:
        chat, is_engine = None, choice.kind == "engine"
        if chosen.run is not None:
            chat = await in_thread(partial(load_chat, load_run_config(chosen.run), engine=is_engine, note=note))
        served = await open_model(service, path, chat=chat, with_weights=is_engine, note=note)
        yield lambda: served.make_policy(sampling, seed=lambda turn: derive_seed(seed, "chat", turn))


def find_text_prompt(run: Path, step: int) -> str | None:
    """Return a prompt of a step if all its prompts are plain texts; None otherwise, or if none can be read."""
    with suppress(UsageError):
        columns = [f"turns.list.element.{name}" for name in ("prompt", "messages")]
        # Not as Python objects: a step may have millions of tokens.
        turns = cast("Any", read_columns(table_path(run, step), columns)).column("turns").combine_chunks().flatten()
        if len(turns) == turns.field("messages").null_count > 0:
            return decode_pieces(read_pieces(pieces_path(run)), turns.field("prompt")[0].as_py())
    return None
