"""A hook of mkdocs that generates the reference of the command line from its own help when the pages are built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import typer
from mkdocs.structure.pages import Page
from typer.core import TyperGroup

from rlkit.cli.app import app

MARK = "<!-- commands -->"

GUIDES = {
    "train": "[Runs](runs.md)",
    "resume": "[Resume a run](runs.md#resume-a-run)",
    "eval": "[Evaluation](evaluation.md)",
    "export": "[Manage checkpoints](runs.md#manage-checkpoints), [inspect and verifiers](interop.md)",
    "sync": "[Trackers](trackers.md)",
    "serve": "[The engine](engine.md#serve-any-tinker-program)",
    "chat": "[Evaluation](evaluation.md#talk-to-the-weights)",
    "init": "[Start](index.md#train-on-your-own-task)",
    "doctor": "[Findings](metrics.md#findings)",
    "audit": "[Audit the trained tokens](files.md#audit-the-trained-tokens)",
    "records": "[Discovery](discovery.md#records)",
    "verify": "[Discovery](discovery.md#verify-a-construction)",
    "view": "[View](view.md)",
    "check env": "[Environments](environments.md#test-the-environment), [The red team](redteam.md)",
    "check service": "[Check a service](conformance.md)",
    "config": "[Configuration](configuration.md)",
    "checkpoints": "[Manage checkpoints](runs.md#manage-checkpoints)",
    "launch beaker": "[Launching](launching.md)",
    "tasks": "[Terminal tasks](terminal.md#tasks), [The red team](redteam.md)",
    "import openreward-config": "[From OpenReward's cookbook](migrating/openreward.md)",
}
"""Pages that describe a command at length."""


ESCAPES = str.maketrans({"<": "&lt;", "|": "\\|", "*": "\\*"})


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace the mark in `cli.md` by the reference."""
    if page.file.src_uri != "cli.md":
        return markdown
    if MARK not in markdown:
        raise ValueError(f"{page.file.src_uri} has no line {MARK}")
    return markdown.replace(MARK, commands_markdown(app))


def commands_markdown(app: typer.Typer) -> str:
    """Return Markdown of all commands of an application: usage, purpose, arguments and options."""
    command = typer.main.get_command(app)
    root = typer.Context(command, info_name="rlkit", **command.context_settings)
    contexts = list(_subcommands(root))
    leaves = [_records(context) for context in contexts if not isinstance(context.command, TyperGroup)]
    shared = [record for record in leaves[0] if all(record[0] in dict(records) for records in leaves)]
    lines = ["## All commands\n", "| command | effect |", "| --- | --- |"]
    for context in contexts:
        link = f"[`{context.command_path}`](#{context.command_path.replace(' ', '-')})"
        lines.append(f"| {link} | {_escape((context.command.help or '').partition('\n\n')[0])} |")
    lines += ["\n## Options of every command\n", *_table("option", shared)]
    lines += ["\nOptions before the first command:\n", *_table("option", _records(root))]
    for context in contexts:
        lines += _section(context, shared)
    return "\n".join(lines).rstrip() + "\n"


def _subcommands(context: typer.Context) -> Iterator[typer.Context]:
    """Yield all commands below one, in the order of `--help`."""
    if isinstance(context.command, TyperGroup):
        for name in context.command.list_commands(context):
            child = typer.Context(context.command.commands[name], info_name=name, parent=context)
            yield child
            yield from _subcommands(child)


def _records(context: typer.Context) -> list[tuple[str, str]]:
    """Return the name and the help of each argument and option, as `--help` shows them."""
    records = (parameter.get_help_record(context) for parameter in context.command.get_params(context))
    return [record for record in records if record is not None]


def _section(context: typer.Context, shared: Sequence[tuple[str, str]]) -> Iterator[str]:
    command, path = context.command, context.command_path
    level = "##" if context.parent is None or context.parent.parent is None else "###"
    yield f"\n{level} `{path}`\n"
    yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    yield _escape(command.help or "")
    own = [record for record in _records(context) if record not in shared]
    if own and not isinstance(command, TyperGroup):
        yield ""
        yield from _table("argument or option", own)
    if guide := GUIDES.get(path.removeprefix("rlkit ")):
        yield f"\nGuide: {guide}"


def _table(head: str, records: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head} | meaning |"
    yield "| --- | --- |"
    for name, text in records:
        yield f"| `{name}` | {_escape(text)} |"


def _escape(text: str) -> str:
    """Return plain text as Markdown: options and quoted commands become code, other special characters are escaped."""
    marked = re.sub(r"`[^`]*`|(?<=\s)'([^'`]+)'|(?<![\w-])(--[a-z][\w-]*)", _mark_code, text)
    parts = re.split(r"(`[^`]*`)", marked)
    return "".join(part if part.startswith("`") else part.translate(ESCAPES) for part in parts)


def _mark_code(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return f"`{code}`" if code else match[0]
