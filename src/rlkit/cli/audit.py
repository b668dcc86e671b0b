"""`rlkit audit`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlkit.cli.common.arguments import resolve, run_directory
from rlkit.cli.common.output import Output

if TYPE_CHECKING:
    from rlkit.tools.audit import Audit


def run(name: str, output: Output) -> int:
    """Check that a run trains on what was sampled, and print a line an environment. Returns the exit code."""
    from rlkit._util import threads
    from rlkit.store.about import recorded_config
    from rlkit.tools.audit import audit

    directory = run_directory(name)
    batch = resolve([str(recorded_config(directory))]).config.batch
    found = threads.run(audit(directory, max_tokens=batch.max_tokens, excess=batch.too_long))
    wrong = "; ".join(one.mismatch for one in found.values() if one.mismatch is not None) or None
    if output.json:
        envs = {env: asdict(one) for env, one in found.items()}
        output.data({"run": directory.name, "ok": wrong is None, "mismatch": wrong, "envs": envs})
        return 0 if wrong is None else 1
    if not found:
        output.line(f"{directory.name} has not finished a step")
    for env, one in found.items():
        if one.mismatch is None:
            output.line(line(env, one))
    if wrong is not None:
        output.error(wrong)
    return 0 if wrong is None else 1


def line(env: str, found: Audit) -> str:
    """`terminal: 5,120 tokens of 64 episodes are trained on, each as it was sampled`."""
    cut = f"; {found.cut:,} more are left out, as batch.max_tokens says" if found.cut else ""
    return (
        f"{env}: {found.tokens:,} tokens in {found.turns:,} turns of {found.episodes:,} episodes are trained on, each "
        f"where it was sampled{cut}"
    )
