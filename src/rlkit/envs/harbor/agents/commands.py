"""Shell commands as text: the command in a model's reply, the script that runs it, and what the model is shown of it.

Invariant: any reply gives a command or none, and any output gives printable text within its limit; nothing here raises.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

END_WORD = "exit"
"""The word for a model to end an episode with."""

END_WORDS = frozenset(["", END_WORD, "done"])
"""Commands that end an episode; they are not run."""

NO_OUTPUT = "(no output)"
"""The text that a model is shown of a command that printed nothing and went well."""

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PROMPT = re.compile(r"\A\$ +")
_CODE = re.compile(r"\A`([^`]+)`\Z")


def read_command(reply: str) -> str | None:
    """Return the command in a reply: its first fenced block, or else its first line.

    A `$ ` before it and backticks around it are left out, as is what no command can hold. It is "" for an empty
    reply, and None for the beginning of a block without anything in it.
    """
    text = reply.replace("\0", "").encode(errors="replace").decode().strip()
    if (block := _FENCED.search(text)) is not None:
        return _PROMPT.sub("", block[1].strip()) or None
    line = text.split("\n", 1)[0].strip()
    if line.startswith("```"):
        return None
    line = _PROMPT.sub("", line)
    return _CODE.sub(r"\1", line)


def command_script(command: str, *, folder: str, mark: str) -> str:
    """Return the script that runs a command in a folder, and prints a mark and the folder that it has come to.

    With "" as the folder, or one that is gone, the command runs where the script starts. Nothing else may print `mark`.
    """
    begin = f"cd -- {shlex.quote(folder)} 2>/dev/null\n" if folder else ""
    # its own descriptor, since a command may send its output elsewhere
    end = f'trap \'printf "\\n%s%s" {mark} "$PWD" >&9\' EXIT\n'
    return f"exec 9>&1 2>&1\n{end}{begin}eval {shlex.quote(command)}\n"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command printed to both streams, and the folder where it left the shell, None where that is unknown."""

    output: str
    exit_status: int
    folder: str | None

    @classmethod
    def read(cls, printed: str, exit_status: int, *, mark: str) -> CommandResult:
        """Read what a `command_script` printed."""
        output, separator, folder = printed.rpartition(f"\n{mark}")
        return cls(output, exit_status, folder) if separator else cls(printed, exit_status, None)

    def observation(self, most_chars: int) -> str:
        """Return the text that the model is shown: both ends of the output, and the exit status unless it is 0."""
        output = _printable(_cut(self.output.strip("\r\n"), most_chars))
        lines = [output] if output.strip() else []
        if self.exit_status:
            lines.append(f"(exit status {self.exit_status})")
        return "\n".join(lines) or NO_OUTPUT


def _cut(text: str, most_chars: int) -> str:
    if len(text) <= most_chars:
        return text
    head = most_chars // 2
    tail = most_chars - head
    return f"{text[:head]}\n(… {len(text) - most_chars:,} characters left out …)\n{text[-tail:]}"


def _printable(text: str) -> str:
    lines = text.replace("\r\n", "\n").encode(errors="replace").decode()
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in lines)
