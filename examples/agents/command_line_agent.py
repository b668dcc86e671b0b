"""Train the model behind a command-line agent: here a few lines, with OpenAI's client.

rlkit train examples/agents/command_line_agent.yaml

The agent runs in a sandbox that reaches nothing but the model. Any program that takes the address of its model from
the environment can take its place.
"""

from __future__ import annotations

import sys

import rlkit

AGENT = """
import subprocess, sys
import openai

client = openai.OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": f"{sys.argv[1]} Reply with one shell command, or with done."}]
for _ in range(4):
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    if not reply.content or reply.content.strip() == "done":
        break
    command = ["sh", "-c", reply.content.replace("\\0", "")]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=20)
    output = (done.stdout + done.stderr).decode(errors="replace")
    messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": output[-500:] or "(no output)"}]
"""

WORDS = ("milk", "bread", "rice", "salt", "tea", "oats")


class Grader:
    """Full reward for a file with the word; it is an object, because functions with state cannot be pickled."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, result: rlkit.ProcessResult) -> float:
        path = result.folder / "shop.txt"
        return float(path.is_file() and path.read_text(errors="replace").strip() == self.word)


def shopping() -> list[rlkit.ProcessEnv]:
    return [
        rlkit.ProcessEnv(
            task_id=word,
            argv=[sys.executable, "agent.py", f"Write the word {word} into the file shop.txt."],
            files={"agent.py": AGENT},
            grade=Grader(word),
            timeout_s=120,
            host_folders=sorted({sys.prefix, sys.base_prefix}),  # Python and its packages
        )
        for word in WORDS
    ]
