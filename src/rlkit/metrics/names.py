"""Names of metrics that only some runs have."""

from __future__ import annotations

import re

from rlkit.config.schema import Config

_PASS_AT = re.compile(r"pass_at_(\d{1,9})")


def has_by_chance(metric: str, config: Config) -> bool:
    """Whether a step may have this number of its episodes though a run in small has none.

    Args:
        metric: as it would stand in `metrics.jsonl`.
        config: of the run.
    """
    of, _, rest = metric.partition("/")
    env, _, name = rest.partition("/")
    if name == "retried/gap":
        return True
    specs = [spec for key, spec in config.envs.items() if env in (key, "all")] if of == "env" else []
    if name.startswith("advantage/"):
        key = name.removeprefix("advantage/")
        return any(key in (spec.advantage or config.advantage).metric_names for spec in specs)
    largest = max((spec.group_size or config.batch.group_size for spec in specs), default=0)
    k = int(found[1]) if (found := _PASS_AT.fullmatch(name)) else 0
    return 2 <= k <= largest and k.bit_count() == 1
