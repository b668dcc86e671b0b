"""Shell commands as text: the command in a model's reply, the script that runs it, and its output for the model.

Invariant: functions accept any reply and any output, and never raise; text for the model is printable and limited.
"""

from __future__ import annotations

import re
import shlex

END_WORD = "exit"
"""The command with which a model ends an episode."""

END_WORDS = frozenset(["", END_WORD, "done"])
"""Commands that end an episode; they are not run."""

NO_OUTPUT = "(no output)"
"""The observation of a command that succeeded without output."""

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PROMPT = re.compile(r"\A\$ +")
_CODE = re.compile(r"\A`([^`]+)`\Z")


def read_command(reply: str) -> str | None:
    """Return the command in a reply: its first fenced block, or its first line if there is none.

    A leading `$ `, enclosing backticks and characters invalid in commands are removed. An empty reply gives "",
    an empty block None.
    """
    text = reply.replace("\0", "").encode(errors="replace").decode().strip()
    if (block := _FENCED.search(text)) is not None:
        return _PROMPT.sub("", block[1].strip()) or None
    line = text.split("\n", 1)[0].strip()
    if line.startswith("```"):
        return None
    line = _PROMPT.sub("", line)
    return _CODE.sub(r"\1", line)


def make_command_script(command: str, *, folder: str, mark: str) -> str:
    """Return a script that runs a command in a folder, and prints a mark and the shell's final folder.

    With "" or a missing folder the command runs in the script's folder. Nothing else may print `mark`.
    """
    prologue = f"cd -- {shlex.quote(folder)} 2>/dev/null\n" if folder else ""
    # a separate descriptor, because a command may redirect its output
    epilogue = f'trap \'printf "\\n%s%s" {mark} "$PWD" >&9\' EXIT\n'
    return f"exec 9>&1 2>&1\n{epilogue}{prologue}eval {shlex.quote(command)}\n"


def split_output(printed: str, *, mark: str) -> tuple[str, str | None]:
    """Return the output of a command and the shell's final folder, None if unknown, from the output of its script."""
    output, separator, folder = printed.rpartition(f"\n{mark}")
    return (output, folder) if separator else (printed, None)


def make_observation(output: str, exit_status: int, *, max_chars: int) -> str:
    """Return the text for the model: both ends of the output, and the exit status unless it is 0."""
    output = _replace_unprintable(_truncate(output.strip("\r\n"), max_chars))
    lines = [output] if output.strip() else []
    if exit_status:
        lines.append(f"(exit status {exit_status})")
    return "\n".join(lines) or NO_OUTPUT


def _truncate(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    return f"{text[:head]}\n(… {len(text) - max_chars:,} characters left out …)\n{text[-tail:]}"


def _replace_unprintable(text: str) -> str:
    lines = text.replace("\r\n", "\n").encode(errors="replace").decode()
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in lines)
