"""The way over from the predecessors: their documented runs are configurations, and the pages name what there is."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from rlkit.cli.app import app
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import BUILT_IN, load_object

from .cli.conftest import rlkit
from .doc_commands import run_of

__all__ = ["rlkit"]

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "migrating").glob("*.md"))
CONFIGS = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "tasks" not in path.parts]
COMMAND = re.compile(r"rlkit train [^`\n]*examples/[^`\n]*")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FIELD = re.compile(r"(?:[a-z_]+|<name>)(?:\.(?:[a-z_]+|<name>))+")
SCHEMATIC = "rlkit launch beaker --OPTION VALUE … -- COMMAND"

# The fields of the predecessors' configurations and command lines, by the page that has them.
OPTIONS = {
    "tinking": """
        model_name lora_rank batch_size group_size num_batches optim.lr optim.beta1 optim.beta2 optim.eps
        adv_estimator=default adv_estimator=entropic adv_beta=2.0 log_path save_every auto_save_ckpts base_url
        wandb.enabled=True wandb.enabled=False wandb.project wandb.entity wandb.run_name wandb.tags
        env=MathConfig env.dataset env.subset env.seed env.max_tokens
        env=ErdosConfig env.n_points env.buffer_size env.epsilon env.teacher_forcing env.context_window_tokens
        env.eval_timeout minitb.agent minitb.dataset minitb.dataset_path minitb.task_id minitb.n_concurrent
        grader_model=random
        workspace budget cluster hostname image description task_name priority preemptible max_retries gpus num_nodes
        env secret no_host_networking=False pure_docker_mode follow allow_dirty dry_run
        --dataset-path --task-id --n-concurrent --output-path
    """,
    "terminal-bench-trainer": """
        model_name tasks_dir logs_dir tinker_base_url lora_rank learning_rate batch_size group_size n_epochs
        eval_split eval_tasks eval_group_size loss_fn num_substeps remove_constant_reward_groups
        normalize_advantages_by_std kl_penalty_coef max_turns temperature max_tokens context_limit enable_summarize
        proactive_summarization_threshold environment_type environment_kwargs n_parallel_envs trial_timeout_sec
        wandb_project wandb_name save_every
    """,
    "../openreward": """
        wandb_project_name wandb_run_name openreward_run_name log_path environments.<Owner/Name> secrets model_name
        lora_rank tokenizer_name resume_from max_response_tokens max_total_tokens max_rollout_retries loss_fn
        loss_fn_config advantage_calculation batch_size learning_rate weight_decay num_epochs save_every
        max_active_tasks max_rollout_concurrency rollout_timeout system_prompt_template thinking seed
        splits.<split>.shuffle .num_samples nonterminal_reward num_rollouts max_failing_rollouts temperature top_p top_k
        reward_reduction min_reward max_reward
    """,
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_show_prints_every_example_completely(path: Path, rlkit: Callable[..., Any]) -> None:
    result = rlkit("config", "show", path)
    assert result.exit_code == 0, result.stderr
    assert "model:" in result.stdout


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_of_a_page_use_existing_environments_and_arguments(path: Path) -> None:
    page_commands = COMMAND.findall(path.read_text())
    assert page_commands
    for command in page_commands:
        assert run_of(shlex.split(command)[2:]).envs


def parse_commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page, each as its words; a job's own command as one more."""
    text = page.read_text()
    blocks = [body.replace("\\\n", " ") for _, body in FENCE.findall(text)]
    lines = [line for block in blocks for line in block.splitlines()] + SPAN.findall(FENCE.sub("", text))
    for line in lines:
        if not line.startswith("rlkit ") or line == SCHEMATIC:
            continue
        words = [word for word in shlex.split(line.partition(" > ")[0]) if word != "…"][1:]
        inner = words.index("--") if "--" in words else len(words)
        yield words
        if words[inner + 1 :][:1] == ["rlkit"]:
            yield words[inner + 2 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_parses(page: Path) -> None:
    page_commands = list(parse_commands(page))
    assert len(page_commands) > 4
    for words in page_commands:
        command, rest = get_command(app), list(words)
        while isinstance(command, TyperGroup):
            command = command.commands[rest.pop(0)]
        if rest:  # else the command is only named
            command.make_context("rlkit", list(rest))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_configuration_of_a_page_loads(page: Path, tmp_path: Path) -> None:
    for language, body in FENCE.findall(page.read_text()):
        assert language in ("text", "yaml"), "nothing else is tried"
        if language == "yaml":
            (tmp_path / "snippet.yaml").write_text(body)
            load_config([tmp_path / "snippet.yaml"])


def list_options(command: Any) -> set[str]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    flags = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return flags.union(*map(list_options, inner))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_field_and_option_on_a_page_exists(page: Path) -> None:
    fields = set(SPAN.findall((ROOT / "docs" / "options.md").read_text()))
    sections = {".".join(name.split(".")[:end]) for name in fields for end in range(1, len(name.split(".")))}
    sections |= {f"{name}.name" for name in sections}
    arguments = {
        name
        for path in BUILT_IN.values()
        for name in inspect.signature(load_object(path, field="env")).parameters  # pyright: ignore[reportArgumentType]
    }
    flags = list_options(get_command(app))
    rows = [line.split("|")[2] for line in page.read_text().splitlines() if line.startswith("| ")]
    for offered in [span for row in rows for span in SPAN.findall(row)]:
        if offered.startswith("--"):
            assert re.split("[ =]", offered)[0] in flags, offered
        if not FIELD.fullmatch(name := re.split("[:=] ?", offered)[0]) or name.endswith(".yaml"):
            continue
        owner, _, argument = name.rpartition("args.")
        if owner or name.startswith("args."):
            assert argument.partition(".")[0] in arguments, offered
        else:
            assert name in fields | sections, offered


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_predecessor_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "migrating" / f"{name}.md").read_text()
    first = {span for line in page.splitlines() if line.startswith("| ") for span in SPAN.findall(line.split("|")[1])}
    assert not set(OPTIONS[name].split()) - {word for span in first for word in (span, span.split()[0])}


@dataclass(frozen=True)
class Value:
    """A row of a table of values.

    Args:
        source: the option that the value comes from, or words where there was none.
        kind: `set`, `default` or `no option`.
        path: of the value here; None where there is none.
        value: here.
        note: what there is to say of it.
    """

    source: str
    kind: str
    path: str | None
    value: object
    note: str


def read_tables() -> dict[str, list[Value]]:
    """The tables of values of all pages, by the name of the file that they are of."""
    values = dict[str, list[Value]]()
    for page in PAGES:
        for section in re.split(r"^### ", page.read_text(), flags=re.MULTILINE)[1:]:
            if (heading := re.match(r"`examples/migrated/(\S+)`\n", section)) is None:
                continue
            rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
            values[heading[1]] = [row_value(*row) for row in rows if row[1] != "origin"]
    return values


def row_value(source: str, kind: str, here: str) -> Value:
    stated = re.match(r"`([\w.<>-]+): (.*?)`(?:; (.*))?$", here)
    if stated is None:
        return Value(source.strip("`"), kind, None, None, here)
    return Value(source.strip("`"), kind, stated[1], yaml.safe_load(stated[2]), stated[3] or "")


def written_values(path: Path) -> dict[str, tuple[object, str]]:
    """Each value of a file with what the comment beside it says, by its dotted path."""
    text = path.read_text()
    lines = text.splitlines()

    def walk(node: yaml.Node, steps: tuple[str, ...]) -> Iterator[tuple[str, tuple[object, str]]]:
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                yield from walk(child, (*steps, key.value))
        else:
            value = yaml.safe_load(text[node.start_mark.index : node.end_mark.index])
            yield ".".join(steps), (value, lines[node.start_mark.line][node.end_mark.column :].strip())

    node = yaml.compose(text)
    assert node is not None
    return dict(walk(node, ()))


TABLES = read_tables()
MIGRATED = sorted((ROOT / "examples" / "migrated").iterdir())


def test_every_documented_run_has_its_table() -> None:
    assert sorted(TABLES) == [path.name for path in MIGRATED]


@pytest.mark.parametrize("path", MIGRATED, ids=lambda path: path.stem)
def test_file_has_the_values_and_origins_of_its_table(path: Path) -> None:
    rows = [row for row in TABLES[path.name] if row.path is not None]
    beside = {row.path: (row.value, f"# {row.source}{', default' * (row.kind == 'default')}") for row in rows}
    assert len(beside) == len(rows), "a value has one row"
    assert written_values(path) == beside
    assert {row.kind for row in TABLES[path.name]} <= {"set", "default", "no option"}


def parse_number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


@pytest.mark.parametrize("path", MIGRATED, ids=lambda path: path.stem)
def test_number_equals_the_original_or_its_row_explains_the_difference(path: Path) -> None:
    rows = [row for row in TABLES[path.name] if parse_number(row.source.partition("=")[2]) is not None and row.path]
    assert len(rows) > 5
    for row in rows:
        assert row.note or parse_number(row.value) == parse_number(row.source.partition("=")[2]), row


def test_documented_run_of_the_trainer_matches_its_page() -> None:
    config = load_config([ROOT / "examples" / "migrated" / "trainer_terminal_bench.yaml"]).config
    assert (config.batch.groups, config.batch.group_size, config.sampling.max_tokens) == (8, 4, 4096)
    assert (config.epochs, config.steps, config.rollouts.max_concurrent) == (1, None, 1)
    assert config.track.wandb is not None
    assert config.track.wandb.project == "train-qwen"
    assert config.envs["terminal"].args["max_turns"] is None


def cookbook_file(name: str) -> dict[str, Any]:
    """The configuration of OpenReward's cookbook that a table states."""
    config = dict[str, Any]()
    for row in TABLES[name]:
        option, stated, value = row.source.partition("=")
        if stated and row.kind == "set":
            *sections, last = option.split(".")
            holder = config
            for section in sections:
                holder = holder.setdefault(section, {})
            holder[last] = (
                as_number if (as_number := parse_number(value)) is not None and "e" in value else yaml.safe_load(value)
            )
    return config


@pytest.mark.parametrize("name", ["openreward_whodunit", "openreward_two", "openreward_resume"])
def test_imported_cookbook_file_equals_the_example(name: str, rlkit: Callable[..., Any], tmp_path: Path) -> None:
    original = cookbook_file(f"{name}.yaml")
    assert original["environments"]["GeneralReasoning/WhoDunIt"]["num_rollouts"] == 16
    (tmp_path / "tinker-config.yaml").write_text(yaml.safe_dump(original))
    result = rlkit("import", "openreward-config", tmp_path / "tinker-config.yaml")
    assert result.exit_code == 0, result.stderr
    (tmp_path / "new.yaml").write_text(result.stdout)
    imported = load_config([tmp_path / "new.yaml"]).config.model_dump()
    example = load_config([ROOT / "examples" / "migrated" / f"{name}.yaml"]).config.model_dump()
    if name == "openreward_resume":  # a run of its own
        assert example.pop("name") == f"{imported.pop('name')}-resumed"
    assert imported == example


def test_every_documented_run_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in (ROOT / "examples" / "migrated").iterdir():
        assert f"examples/migrated/{path.name}" in text
