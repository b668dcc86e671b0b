from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.algorithms.estimators import EntropicValidAware
from rlkit.chat.renderers import chat_format
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.config.schema import EnvConfig
from rlkit.envs.discovery import PROBLEMS, discovery, settings
from rlkit.envs.discovery.prompts import extract_code
from rlkit.envs.discovery.records import read_records
from rlkit.envs.discovery.settings import PlaySettings
from rlkit.envs.discovery.source import Discovery
from rlkit.envs.discovery.task import ConstructionProblem
from rlkit.errors import ConfigError, MissingError, UsageError
from rlkit.sandbox.runners.fork_server import ForkServer
from rlkit.sandbox.runners.programs import ProgramLimits
from rlkit.sandbox.spec import MIB
from rlkit.tasks.sources import Mixture
from rlkit.testing import ScriptedPolicy
from rlkit.tokenizers.load import load_tokenizer
from rlkit.types import Episode, Group, Outcome
from tests.envs.discovery.test_archive import Number
from tests.test_docs import ROOT, snippets

BETTER = "def run(seed, budget_s):\n    h = initial_h_values.copy()\n    return 0.5 + 0.9 * (h - 0.5)"


def program(code: str) -> str:
    return f"Here it is.\n\n```python\n{code}\n```\n"


PROGRAM_S = 60.0
"""Limit of programs that end by themselves, which takes seconds on a busy machine."""


def search(**more: object) -> Discovery:
    return discovery(options={"n_points": 20}, program_timeout_s=PROGRAM_S, memory_mb=512, workers=2, **more)  # pyright: ignore


@pytest.fixture(scope="module")
def task() -> ConstructionProblem:
    try:
        problem = search().next()
        asyncio.run(problem.rollout(ScriptedPolicy([program(BETTER)])))
    except MissingError as error:
        pytest.skip(str(error))
    return problem


def play(task: ConstructionProblem, reply: str, **limits: int) -> Outcome:
    return asyncio.run(task.rollout(ScriptedPolicy([reply], **limits)))  # pyright: ignore


def test_the_reward_is_computed_once_by_the_problem(task: ConstructionProblem) -> None:
    policy = ScriptedPolicy([program(BETTER)])
    outcome = asyncio.run(task.rollout(policy))
    value = outcome.metrics["value"]
    assert outcome.reward == 1 / value
    assert [turn.reward for turn in policy.turns] == [None]  # or it would be counted twice
    assert outcome.metrics["valid"] == 1
    assert outcome.metrics["end/valid"] == 1
    assert outcome.metrics["improved"] == float(value < task.parent.value)


def test_a_claimed_value_is_ignored(task: ConstructionProblem) -> None:
    honest = play(task, program("def run(): return [0.5] * 10"))
    claimed = play(task, program("def run(): return [0.5] * 10, 1e-9, 10"))
    assert claimed.reward == honest.reward == 2.0


@pytest.mark.parametrize(
    ("reply", "end"),
    [
        ("I do not know.", "no_code"),
        ("```python\ndef run(: pass\n```", "compile"),
        ("```python\ndef run(): return 1 / 0\n```", "error"),
        ("```python\ndef run(): return [2.0, -1.0]\n```", "invalid"),
        ("```python\ndef run(): return [float('nan')] * 4\n```", "invalid"),
        ("```python\nimport os\nos._exit(0)\n```", "killed"),
        ("```python\ndef run(): return bytearray(1 << 40)\n```", "memory"),
        (
            "```python\nimport json, os\nprint(json.dumps({'h_values': [0.5] * 4, 'c5': 1e-9}))\nos._exit(0)\n```",
            "killed",
        ),
    ],
)
def test_a_program_without_a_valid_construction_has_no_reward_and_a_reason(
    task: ConstructionProblem, reply: str, end: str
) -> None:
    outcome = play(task, reply)
    assert (outcome.reward, outcome.metrics["valid"], outcome.info["end"]) == (0, 0, end)
    assert outcome.metrics[f"end/{end}"] == 1
    assert sum(value for name, value in outcome.metrics.items() if name.startswith("end/")) == 1
    assert outcome.info["why"]


@dataclass(frozen=True)
class Careless(Number):
    """A problem that puts a value on anything."""


def test_a_value_that_is_not_a_number_is_none(task: ConstructionProblem) -> None:
    careless = replace(task, problem=Careless())
    for number in ("nan", "inf", "-inf"):
        outcome = play(careless, program(f"def run(): return [float('{number}')]"))
        assert (outcome.reward, outcome.info["end"]) == (0, "invalid")
        assert str(outcome.info["why"]).endswith("which is not finite")


def test_a_program_may_print_its_progress(task: ConstructionProblem) -> None:
    outcome = play(task, program("def run():\n    print('step 1')\n    return [0.5] * 10"))
    assert outcome.reward == 2.0
    assert outcome.info["stdout"] == "step 1\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nor rather\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```text\na\n```\n```py\nb\n```\n```\nc\n```", "b\n"),
        ("```python\nthought\n```\n</think>\nNo code.", None),
        ("```python\nthought\n```\n</think>\n```python\nsaid\n```", "said\n"),
        ("```python\nnever closed", None),
        ("```python\ncut off\n\n... out of tokens.\n\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```text\ncut off\n``` python\nb\n```", "b\n"),
        ("```python\n\n```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_of_the_final_answer(text: str, code: str | None) -> None:
    assert extract_code(text) == code


GOOD, BAD = "```python\ngood\n```", "```python\nthought\n```"
HARMONY = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("model", "reply", "code"),
    [
        ("openai/gpt-oss-20b", f"{HARMONY}Let me see\n{BAD}\nand", None),
        (
            "openai/gpt-oss-20b",
            f"{HARMONY}{BAD}<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
            None,
        ),
        ("openai/gpt-oss-20b", f"{HARMONY}{BAD}<|end|><|start|>assistant<|channel|>final<|message|>{GOOD}", "good\n"),
        ("openai/gpt-oss-20b", f"<|channel|>commentary<|message|>{BAD}<|end|>", None),
        ("Qwen/Qwen3-8B", f"<think>\nLet me see\n{BAD}\nand", None),
        ("Qwen/Qwen3-8B", f"<think>\n{BAD}\n</think>\n\nNo.<|im_end|>", None),
        ("Qwen/Qwen3-8B", f"<think>\n{BAD}\n</think>\n\n{GOOD}\n<|im_end|>", "good\n"),
        ("Qwen/Qwen3-8B", f"Let me see\n{BAD}\n</think>\n\nNo.<|im_end|>", None),
    ],
)
def test_only_the_final_channel_of_a_chat_format_is_parsed(model: str, reply: str, code: str | None) -> None:
    tokenizer = load_tokenizer(model, with_weights=False, note=lambda message: None)
    tokens = np.asarray(tokenizer.encode(reply, add_special_tokens=False), np.int32)
    text = str(chat_format(model, tokenizer).parse(tokens).message["content"])
    assert extract_code(text) == code


def test_code_in_the_thinking_is_not_run(task: ConstructionProblem) -> None:
    outcome = play(task, f"<think>\n{program('def run(): return [0.5] * 10')}\n</think>\nI give up.")
    assert outcome.info["end"] == "no_code"


def test_the_prompt_states_the_rules(task: ConstructionProblem) -> None:
    (message,) = task.prompt()
    text = str(message["content"])
    length, value = len(task.parent.construction), task.parent.value
    assert f"a construction of {length} values with C5 = {value:.10f}" in text
    assert "lower is better" in text
    assert "higher is better" not in text
    assert "after 60 seconds the program is ended" in text
    assert "512 MiB" in text
    assert f"numpy {np.__version__}" in text
    assert f"`initial_h_values`: a NumPy array of shape ({length},)" in text
    assert "def run(seed, budget_s):" in text


def test_the_names_in_the_prompt_are_defined(task: ConstructionProblem) -> None:
    code = """
import numpy as np, scipy
def run(seed, budget_s):
    assert budget_s == 54 and isinstance(initial_h_values, np.ndarray)
    better = polish(initial_h_values, 0.2)
    return better
"""
    outcome = play(task, program(code))
    assert outcome.info.get("why") is None
    assert outcome.metrics["value"] < task.parent.value


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_problem_offers_its_local_search(task: ConstructionProblem, problem: str) -> None:
    task = discovery(problem=problem, program_timeout_s=PROGRAM_S, workers=2).next()
    assert "`polish(construction, seconds)`" in str(task.prompt()[0]["content"])
    outcome = play(task, program(f"def run():\n    return polish({task.problem.initial}, 0.2)"))
    assert outcome.info["end"] == "valid", outcome.info
    assert outcome.metrics["improved"] == 1


@pytest.mark.parametrize("problem", PROBLEMS)
def test_without_helpers_the_search_is_unavailable(task: ConstructionProblem, problem: str) -> None:
    task = discovery(problem=problem, program_timeout_s=PROGRAM_S, workers=2, helpers=False).next()
    assert "polish" not in str(task.prompt()[0]["content"])
    module = str(task.problem.polish).partition(":")[0]
    outcome = play(task, program(f"import {module}\ndef run():\n    return polish({task.problem.initial}, 0.2)"))
    assert outcome.info["end"] == "error"
    assert "Error" in str(outcome.info["why"])


def test_a_childs_prompt_shows_its_program_and_its_true_length(task: ConstructionProblem) -> None:
    source = search()
    first = source.next()
    code = "def run():\n    print('found it')\n    return polish(initial_h_values.repeat(2), 0.1)"
    source.observe(group(first, [play(first, program(code))]))
    texts = [str(source.next().prompt()[0]["content"]) for _ in range(8)]
    (parent_text,) = [text for text in texts if "found it" in text]
    assert code in parent_text
    assert "a construction of 40 values" in parent_text
    assert f"starting from {first.parent.value:.10f}" in parent_text


def test_a_task_can_be_pickled_and_has_a_unique_name(task: ConstructionProblem) -> None:
    again = pickle.loads(pickle.dumps(task))
    assert again.task_id == task.task_id
    assert again.prompt() == task.prompt()
    source = search()
    names = [source.next().task_id for _ in range(20)]
    assert len(set(names)) == 20


def group(task: ConstructionProblem, outcomes: Sequence[Outcome]) -> Group:
    episodes = [
        Episode(n, 0, (), "completed", outcome.reward, outcome.metrics, json.loads(json.dumps(outcome.info)), 1.0)
        for n, outcome in enumerate(outcomes)
    ]
    return Group("erdos", task.task_id, 0, tuple(episodes))


def test_constructions_of_a_group_enter_the_archive_and_metrics(task: ConstructionProblem) -> None:
    source = search()
    first = source.next()
    better = program("def run(): return [0.3, 0.7, 0.7, 0.3]")
    source.observe(group(first, [play(first, better), play(first, better), play(first, "no")]))
    metrics = source.metrics()
    assert metrics["best"] <= first.parent.value
    assert metrics["size"] == 9
    assert metrics["expansions"] == 1
    assert metrics["cpu_s"] > 0
    state = json.loads(json.dumps(source.state_dict()))
    again = search()
    again.load_state_dict(state)
    assert again.metrics() == metrics
    assert [again.next().task_id for _ in range(5)] == [source.next().task_id for _ in range(5)]
    with pytest.raises(UsageError, match="not running in this search"):
        source.observe(group(first, []))


def test_the_arguments_of_the_erdos_run_decide_beginning_buffer_and_time(task: ConstructionProblem) -> None:
    source = discovery(
        options={"n_points": 20},
        start="flat",
        reuse="epsilon_greedy",
        buffer_size=3,
        epsilon=0.125,
        program_timeout_s=PROGRAM_S,
        workers=2,
    )
    first = source.next()
    assert first.parent.construction.tolist() == [0.5] * 20
    hurried = discovery(options={"n_points": 20}, start="flat", program_timeout_s=1.0, workers=2).next()
    late = play(hurried, program("def run():\n    while True: pass"))
    assert (late.reward, late.info["end"]) == (0, "timeout")
    steps = [program(f"def run(): return [{0.5 - d}, {0.5 + d}, {0.5 + d}, {0.5 - d}]") for d in (0.05, 0.1, 0.15, 0.2)]
    source.observe(group(first, [play(first, reply) for reply in steps]))
    assert source.metrics()["size"] == 3
    assert source.metrics()["best"] < 0.5


def test_the_estimators_for_discovery_use_validity(task: ConstructionProblem) -> None:
    outcomes = [
        play(task, reply) for reply in (program(BETTER), program("def run(): return [0.5] * 4"), "no", "nothing")
    ]
    advantages = EntropicValidAware().advantages(group(task, outcomes))
    assert list(advantages[2:]) == [-1, -1]
    assert advantages[0] != advantages[1] >= -1


def test_a_record_is_on_the_disk_when_its_rollout_ends(task: ConstructionProblem, tmp_path: Path) -> None:
    source = search(start="flat", reuse="epsilon_greedy")
    source.set_folder(tmp_path / "erdos")
    first = source.next()
    better = program("def run(): return [0.3, 0.7, 0.7, 0.3]")
    outcomes = [play(first, reply) for reply in (better, better, program("def run(): return [0.5] * 4"))]
    assert [outcome.metrics["record"] for outcome in outcomes] == [1, 0, 0]
    (record,) = read_records(tmp_path / "erdos")
    assert record.value == outcomes[0].metrics["value"]
    assert record.program == extract_code(better)
    assert record.certificate is not None
    assert float(record.certificate.bound) == pytest.approx(record.value, abs=1e-9)
    assert record.options["n_points"] == 20
    assert record.lineage == [(first.parent.id, first.parent.value)]


def test_a_record_of_a_killed_rollout_returns_to_the_search(task: ConstructionProblem, tmp_path: Path) -> None:
    better_program = program("def run(): return [0.3, 0.7, 0.7, 0.3]")
    killed = search(start="flat", reuse="epsilon_greedy")
    killed.set_folder(tmp_path / "erdos")
    assert play(killed.next(), better_program).metrics["record"] == 1  # and is not told to the search
    again = search(start="flat", reuse="epsilon_greedy")
    again.set_folder(tmp_path / "erdos")
    first = again.next()
    outcome = play(first, "I have no idea.")
    assert (outcome.reward, outcome.metrics["valid"]) == (0, 0)
    again.observe(group(first, [outcome, outcome]))
    (record,) = read_records(tmp_path / "erdos")
    assert again.archive.best.to_json() == record.state.to_json()
    second = again.next()
    assert second.parent.id == record.state.id
    assert second.saved == ()


def test_a_construction_no_better_than_the_start_is_not_a_record(task: ConstructionProblem, tmp_path: Path) -> None:
    source = discovery(start="erdos_haugland_2016", program_timeout_s=PROGRAM_S, workers=2)
    source.set_folder(tmp_path / "erdos")
    outcome = play(source.next(), program("def run(): return [0.5] * 10"))
    assert (outcome.metrics["valid"], outcome.metrics["record"]) == (1, 0)
    assert read_records(tmp_path / "erdos") == []


def test_a_child_is_polished_before_archiving_without_extra_reward(task: ConstructionProblem) -> None:
    source = search(polish_s=0.2)
    first = source.next()
    outcome = play(first, program("def run(): return initial_h_values"))
    assert outcome.reward == pytest.approx(1 / first.parent.value)
    assert outcome.metrics["improved"] == 0
    source.observe(group(first, [outcome]))
    assert source.archive.best.value == outcome.metrics["polished_value"] < first.parent.value
    assert source.archive.best.polished
    spent_s = outcome.metrics["program_cpu_s"] + outcome.metrics["polish_cpu_s"]
    assert source.metrics()["cpu_s"] == spent_s > outcome.metrics["program_cpu_s"]  # or SciPy would come for nothing


@pytest.mark.slow
def test_waiting_for_other_programs_does_not_count_as_rollout_time(task: ConstructionProblem) -> None:
    slow = program("import time\ndef run():\n    time.sleep(0.6)\n    return [0.5] * 4")

    async def main() -> tuple[list[float], float]:
        limits = ProgramLimits(timeout_s=0.8, memory_bytes=512 * MIB)
        play = replace(task.play, limits=limits, workers=1)
        alone = replace(task, play=play)
        await alone.rollout(ScriptedPolicy([slow]))  # the server is there from now on

        async def played_s() -> float:
            stopwatch = Stopwatch()
            with use_stopwatches([stopwatch]):
                await alone.rollout(ScriptedPolicy([slow]))
            return stopwatch.played_s

        clock = asyncio.get_running_loop().time
        began_s = clock()
        each_s = await asyncio.gather(*(played_s() for _ in range(8)))
        return each_s, clock() - began_s

    each_s, all_s = asyncio.run(main())
    assert sum(each_s) < 2 * all_s, "one after the other; with their waiting it would be four times"


def test_a_run_fails_before_sampling_if_programs_cannot_be_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "ForkServer", partial(ForkServer, layers=("environment", "session")))
    bare = Discovery(search().archive, PlaySettings(min_isolation="limits"))
    tasks = Mixture({"erdos": bare}, weights={"erdos": 1.0}, seed=0)
    with pytest.raises(MissingError, match="isolation 'none', below min_isolation 'limits'"):
        tasks.set_folder(tmp_path)


def test_unknown_argument_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"erdos\.args\.runner: unknown argument\. Known: problem, .*, workers, "):
        load_envs(
            "erdos", EnvConfig.model_validate({"env": "discovery", "args": {"runner": "ray"}}), field="erdos", seed=0
        )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"problem": "erdoes"}, "Did you mean 'erdos'"),
        ({"options": {"n_point": 3}}, "options.n_point"),
        ({"options": {"exact_n": True}}, "exact_n needs n_points"),
        ({"options": {"n_points": 2000}}, "n_points is 2000, above max_points 1000"),
        ({"options": {"n_points": 0}}, "options.n_points"),
        ({"problem": "circle_packing", "options": {"circles": 0}}, "options.circles"),
        ({"problem": "autocorrelation_1", "options": {"n_points": 1}}, "options.n_points"),
        ({"problem": "autocorrelation_2", "options": {"max_points": 50}}, "n_points is 100, above max_points 50"),
        ({"epsilon": 0.1}, "epsilon: has no effect with reuse 'puct'"),
        ({"puct_c": 0.1, "reuse": "fixed"}, "puct_c: has no effect"),
        ({"buffer_size": 3, "reuse": "none"}, "buffer_size: has no effect"),
        ({"start": "flat"}, "start: flat needs"),
        ({"start": "erdos_haugland"}, "Did you mean"),
        ({"start": "circle_packing_26_alphaevolve_2025"}, "is not a construction of erdos"),
        ({"starts": 2, "start": "erdos_haugland_2016"}, "starts: has an effect only with"),
        ({"polish_s": 1.0, "problem": "tests.envs.discovery.test_archive:Number"}, "number has no local search"),
    ],
)
def test_an_invalid_argument_is_a_one_line_error(arguments: dict[str, object], why: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=why):
        discovery(**arguments)  # pyright: ignore


def test_results_known_without_a_model_are_reported() -> None:
    notes = list[str]()
    discovery(start="erdos_haugland_2016", note=notes.append)
    (line,) = notes
    assert "initial C5 = 0.3809268534" in line
    assert "the best published 0.3808563308462765 (rlkit, from MILO's construction, 2026-11-29)" in line
    assert "a scripted search without a model reaches" in line


def test_the_problem_of_the_documentation_is_played(
    task: ConstructionProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {snippet.file_name: snippet.body for snippet in snippets(ROOT / "docs" / "discovery.md")}
    assert len(bodies["points.py"].splitlines()) <= 33  # 30, and the name of the file between two of them
    for name in ("points.py", "points.yaml"):
        (tmp_path / name).write_text(bodies[name])
    monkeypatch.chdir(tmp_path)
    spec = load_config([Path("points.yaml")], ["model=simulated"]).config.envs["points"]
    source = load_envs("points", spec, field="envs.points", seed=0)
    assert isinstance(source, Discovery)
    played_task = source.next()
    code = "import numpy as np\ndef run():\n    return np.arange(5) * 2 * np.pi / 5"
    outcome = play(played_task, program(code))
    assert outcome.reward == outcome.metrics["value"] == pytest.approx(2 * np.sin(np.pi / 5))
    source.observe(group(played_task, [outcome]))
    assert source.archive.best.value == outcome.metrics["value"]
    assert play(played_task, program("def run(): return [1.0] * 5")).info["why"] == "two points are the same"


@pytest.mark.parametrize(
    ("circles", "by_hand", "published_best"), [(26, 2.634, 2.63598308492), (32, 2.936, 2.93957277121)]
)
def test_both_packings_of_the_literature_are_played_with_known_results(
    task: ConstructionProblem, circles: int, by_hand: float, published_best: float
) -> None:
    notes = list[str]()
    source = discovery(problem="circle_packing", options={"circles": circles}, workers=2, note=notes.append)
    task = source.next()
    text = str(task.prompt()[0]["content"])
    assert "published" not in text
    assert f"the best by hand is {by_hand}; the best published {str(published_best)[:10]}" in notes[0]
    assert f"an array of shape ({circles}, 3)" in text
    assert f"a scripted search without a model reaches {task.problem.scripted[0][1]}" in notes[0]
    outcome = play(task, program("def run(): return polish(initial_circles, 1)"))
    assert task.parent.value < outcome.metrics["value"] <= published_best + 1e-6


def test_a_configured_environment_is_a_search() -> None:
    spec = EnvConfig(env="discovery", args={"problem": "circle_packing", "options": {"circles": 5}})
    source = load_envs("packing", spec, field="envs.packing", seed=0)
    assert isinstance(source, Discovery)
    assert source.next().parent.construction.shape == (5, 3)

    assert isinstance(source.next(), rlkit.Env)
