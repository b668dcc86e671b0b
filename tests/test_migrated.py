"""The way over from the predecessors: their documented runs are configurations, and the pages name what there is."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from rlkit.cli.app import app
from rlkit.cli.arguments import split
from rlkit.config import load_config, load_object
from rlkit.config.objects import BUILT_IN

from .cli.conftest import rlkit

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
def test_every_example_is_shown_whole(path: Path, rlkit: Callable[..., Any]) -> None:
    result = rlkit("config", "show", path)
    assert result.exit_code == 0, result.stderr
    assert "model:" in result.stdout


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_commands_of_a_page_are_of_configurations_that_load(path: Path) -> None:
    commands = COMMAND.findall(path.read_text())
    assert commands
    for command in commands:
        words = shlex.split(command)[2:]
        files, values = split([word for word in words if word.startswith("examples/") or "=" in word])
        load_config(files, values)


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page, each as its words; a job's own command as one more."""
    text = page.read_text()
    blocks = [body.replace("\\\n", " ") for _, body in FENCE.findall(text)]
    shown = [line for block in blocks for line in block.splitlines()] + SPAN.findall(FENCE.sub("", text))
    for line in shown:
        if not line.startswith("rlkit ") or line == SCHEMATIC:
            continue
        words = [word for word in shlex.split(line.partition(" > ")[0]) if word != "…"][1:]
        inner = words.index("--") if "--" in words else len(words)
        yield words
        if words[inner + 1 :][:1] == ["rlkit"]:
            yield words[inner + 2 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_has_known_words(page: Path) -> None:
    found = list(commands(page))
    assert len(found) > 4
    for words in found:
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


def options_of(command: Any) -> set[str]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return own.union(*map(options_of, inner))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_field_and_option_that_a_page_offers_is_there(page: Path) -> None:
    fields = set(SPAN.findall((ROOT / "docs" / "options.md").read_text()))
    sections = {".".join(name.split(".")[:end]) for name in fields for end in range(1, len(name.split(".")))}
    sections |= {f"{name}.name" for name in sections}
    taken = {
        name
        for path in BUILT_IN.values()
        for name in inspect.signature(load_object(path, field="env")).parameters  # pyright: ignore[reportArgumentType]
    }
    flags = options_of(get_command(app))
    rows = [line.split("|")[2] for line in page.read_text().splitlines() if line.startswith("| ")]
    for offered in [span for row in rows for span in SPAN.findall(row)]:
        if offered.startswith("--"):
            assert re.split("[ =]", offered)[0] in flags, offered
        if not FIELD.fullmatch(name := re.split("[:=] ?", offered)[0]) or name.endswith(".yaml"):
            continue
        owner, _, argument = name.rpartition("args.")
        if owner or name.startswith("args."):
            assert argument.partition(".")[0] in taken, offered
        else:
            assert name in fields | sections, offered


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_of_a_predecessor_is_left_out(name: str) -> None:
    page = (ROOT / "docs" / "migrating" / f"{name}.md").read_text()
    first = {span for line in page.splitlines() if line.startswith("| ") for span in SPAN.findall(line.split("|")[1])}
    assert not set(OPTIONS[name].split()) - {word for span in first for word in (span, span.split()[0])}


def test_every_documented_run_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in (ROOT / "examples" / "migrated").iterdir():
        assert f"examples/migrated/{path.name}" in text
