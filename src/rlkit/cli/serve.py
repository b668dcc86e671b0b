"""`rlkit serve` and `rlkit chat`."""

from __future__ import annotations

import shlex
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.common.options import Best, CheckpointStep
from rlkit.cli.common.output import Output
from rlkit.cli.common.signals import graceful_shutdown, run_terminable
from rlkit.errors import ContextFull, UsageError

RunOrSampler = Annotated[
    str, typer.Argument(metavar="RUN", help="Run name, run folder, or tinker://…/sampler_weights/… path.")
]


def serve(
    output: Output,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="CPU threads of the model; by default one per core, or one for a small model."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the models: cpu or cuda; by default cuda if available.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the checkpoints.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Find or download this model first; repeatable.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="RLKIT_SERVE_API_KEY", help="API key of clients, tml-…; by default a new key."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File that keeps the API key across restarts; created if missing.")
    ] = None,
) -> None:
    """Serve the embedded engine to any Tinker client, until Ctrl-C.

    OpenAI and Anthropic clients can chat with models and checkpoints at the same address.
    """
    from rlkit.engine import EngineServer
    from rlkit.engine.model.model_files import resolve_model
    from rlkit.engine.server.server import load_api_key
    from rlkit.serving import ChatModels

    models = model or []
    if api_key_file is not None:
        if api_key is not None:
            raise UsageError("--api-key and --api-key-file: give one of them")
        api_key = load_api_key(api_key_file)
    # The constructor rejects invalid options, before any model is downloaded.
    engine = EngineServer(
        host=host,
        port=port,
        api_key=api_key,
        threads=threads,
        device=device,
        root=root,
        models=models,
        extension=ChatModels,
    )
    note_once = cache(output.note)  # of a conversion in hundreds of parts
    for name in models:
        directory = resolve_model(name, progress=lambda message, _: note_once(message))
        output.note(f"model {name} is ready: {directory}")
    stop = threading.Event()
    with graceful_shutdown(stop.set, output.note, message="stopping"), engine:
        _show_address(output, engine.url, engine.api_key)
        if host not in ("127.0.0.1", "localhost"):
            output.note("other machines can reach the engine, and the key is sent unencrypted: use a trusted network")
        stop.wait()


def chat(
    output: Output,
    run: RunOrSampler,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="[MESSAGE]", help="Message to answer; without it, start a conversation.", show_default=False
        ),
    ] = None,
    *,
    step: CheckpointStep = None,
    best: Best = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Continue each message as plain text, like a prompt that is a string.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Limit of a reply, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="Temperature of sampling; 0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the replies.")] = 0,
) -> None:
    """Talk to a checkpoint of a run.

    Without MESSAGE, each line of stdin is a message, and /new begins another conversation.
    """
    from rlkit.tools.chat import open_chat
    from rlkit.types import Message, Sampling

    if complete and system is not None:
        raise UsageError("--system: a plain text has no system prompt: leave out --complete or --system")
    system_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    async def converse() -> None:
        from rlkit._util.json_values import escape_surrogates
        from rlkit._util.threads import in_thread

        sampling = Sampling(max_tokens, temperature)
        async with open_chat(run, sampling, step=step, best=best, seed=seed, note=output.note) as begin:
            policy, messages = begin(), list(system_messages)
            while (line := await in_thread(lambda: _read_line(output)) if message is None else message) is not None:
                if message is None and line == "/new":
                    policy, messages = begin(), list(system_messages)
                    continue
                text = escape_surrogates(line)
                question: Message = {"role": "user", "content": text}
                try:
                    reply = await (begin().sample(text) if complete else policy.chat([*messages, question]))
                except ContextFull as error:
                    if message is not None:
                        raise
                    output.error(f"{error}; /new begins another conversation")
                    continue
                messages += [question, reply.message]
                output.result({"message": reply.message, "stop": reply.turn.stop}, reply.text)  # pyright: ignore[reportArgumentType]  a message is JSON
                if reply.truncated:
                    output.note(f"the reply was cut off after {max_tokens} tokens (--max-tokens)")
                if message is not None:
                    return

    run_terminable(converse())


def _read_line(output: Output) -> str | None:
    """Return the next line of stdin that is not empty; None at its end."""
    while True:
        if sys.stdin.isatty():
            output.err.write("> ")
            output.err.flush()
        line = sys.stdin.buffer.readline().decode(errors="backslashreplace")
        if not line:
            return None
        if line.strip():
            if not sys.stdin.isatty():  # a terminal shows what was typed
                output.note(f"> {line.strip()}")
            return line.strip()


def _show_address(output: Output, url: str, key: str) -> None:
    from rlkit._util.model_names import DEFAULT_MODEL

    output.result(
        {"url": url, "api_key": key},
        f"export TINKER_BASE_URL={shlex.quote(url)}\nexport TINKER_API_KEY={shlex.quote(key)}",
    )
    if not output.json:
        output.note("run these two lines in another shell, to let a Tinker program use the engine")
        output.note(f"set its base_model to a folder or a name on the Hugging Face hub, such as {DEFAULT_MODEL}")
        output.note(f"to chat with a model or a tinker:// checkpoint: OPENAI_BASE_URL={url}/v1, with the same key")
        output.note("Ctrl-C stops the engine")
