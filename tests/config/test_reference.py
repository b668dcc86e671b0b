from __future__ import annotations

import json

from pydantic import BaseModel

from rlkit.config import reference_markdown, schema_json
from rlkit.config.loading.outline import leaf_fields
from rlkit.config.schema.section import Section


def sections() -> list[type[BaseModel]]:
    return [section for section in Section.__subclasses__() if section.__module__.startswith("rlkit.config.")]


def test_the_reference_has_every_field_with_its_sentence() -> None:
    text = reference_markdown()
    for path in leaf_fields():
        assert f"`{'.'.join(path)}`" in text or path[-1] == "envs"
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and row[3].strip(" |") for row in rows)
    names = {row[0].strip("| `").rsplit(".", 1)[-1] for row in rows}
    assert {name for section in sections() for name in section.model_fields} - names == {
        "sampling", "batch", "loss", "lora", "optimizer", "checkpoint", "eval", "service", "chat", "envs",
        "prices", "best", "kl_penalty", "length_penalty", "curriculum", "budget_forcing",
        "track", "wandb", "trackio", "tensorboard", "docent",
    }  # fmt: skip
    assert "| `envs.<name>.args` | mapping of names to values | `{}` |" in text
    assert "| `sampling.max_tokens` | integer ≥ 1 | `256` |" in text


def test_the_schema_describes_every_field_for_editors() -> None:
    schema = json.loads(schema_json())
    assert schema["$schema"].startswith("https://json-schema.org/")
    for definition in schema["$defs"].values():
        for name, field in definition.get("properties", {}).items():
            assert field.get("description"), name
    assert schema["additionalProperties"] is False
