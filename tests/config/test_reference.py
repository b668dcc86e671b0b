from __future__ import annotations

import json

from pydantic import BaseModel

from rlkit._util.sections import Section
from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.losses import LOSSES
from rlkit.config.loading.outline import config_schema, field_paths
from rlkit.config.schema.objective import CustomAdvantage, CustomLoss
from tests.doc_commands import reference_markdown


def sections() -> list[type[BaseModel]]:
    plain = [section for section in Section.__subclasses__() if section.__module__.startswith("rlkit.config.")]
    return [*plain, *ESTIMATORS.values(), *LOSSES.values(), CustomAdvantage, CustomLoss]


def test_the_reference_has_every_field_with_its_sentence() -> None:
    text = reference_markdown()
    for path in field_paths():
        assert f"`{'.'.join(path)}`" in text or "<name>" in path or path[-1] == "envs"
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and row[3].strip(" |") for row in rows)
    names = {row[0].strip("| `").rsplit(".", 1)[-1] for row in rows}
    assert {name for section in sections() for name in section.model_fields} - names == {
        "sampling", "batch", "loss", "lora", "optimizer", "eval", "service", "chat", "envs",
        "prices", "best", "kl_penalty", "length_penalty", "curriculum", "budget_forcing",
        "track", "workers", "source", "warm_start",
    }  # fmt: skip
    assert "| `envs.<name>.args` | mapping of names to values | `{}` |" in text
    assert "| `sampling.max_tokens` | integer ≥ 1 | `256` |" in text


def test_the_schema_describes_every_field_for_editors() -> None:
    schema = json.loads(json.dumps(config_schema()))
    definitions = [*schema["$defs"].values()]
    options = [option for definition in definitions for option in definition.get("oneOf", [])]
    assert {option["description"] for option in options if "description" in option}
    for definition in [*definitions, *options]:
        for name, field in definition.get("properties", {}).items():
            assert field.get("description"), name
    assert schema["additionalProperties"] is False
