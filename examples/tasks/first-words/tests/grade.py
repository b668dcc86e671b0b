"""Grade the form of the agent's replies: each correct part counts, so that a small model can learn it.

The script reads only the agent's record, not the results of its commands.
"""

import json
from pathlib import Path

RECORD = Path("/logs/agent/trajectory.json")
REWARDS = Path("/logs/verifier/reward.json")
FIELDS = ("analysis", "plan", "commands", "keystrokes", "duration")


def of_reply(step):
    """Return scores of a reply's parts, from 0 to 1."""
    if step.get("tool_calls"):  # Terminus 2 parsed the commands
        return {"begins": 1.0, "fields": 1.0, "understood": 1.0}
    text = step.get("message") or ""
    named = sum(f'"{field}"' in text for field in FIELDS)
    return {"begins": float(text.lstrip().startswith("{")), "fields": named / len(FIELDS), "understood": 0.0}


def main():
    try:
        steps = json.loads(RECORD.read_text())["steps"]
    except (OSError, ValueError, KeyError):
        steps = []
    replies = [of_reply(step) for step in steps if step.get("source") == "agent"] or [of_reply({})]
    rewards = {name: sum(reply[name] for reply in replies) / len(replies) for name in replies[0]}
    rewards["reward"] = sum(rewards.values()) / len(rewards)
    REWARDS.write_text(json.dumps(rewards))


main()
