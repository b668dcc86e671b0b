"""Each page shows what the files of the run say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlkit.config.loading.load import load_config
from rlkit.metrics.intervals import estimate_mean
from rlkit.store import RunStore, table
from rlkit.store.history import table_path
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.types import Episode, Group, Prompt, TokenPiece, Turn
from rlkit.view.library import Library
from tests.trackers.folders import write_run
from tests.view.browser.conftest import ROOT, can_search, serve
from tests.view.browser.visit import Visit


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_step(run: Path, step: int) -> pd.DataFrame:
    return pd.read_parquet(run / "episodes" / f"step={step:06d}" / "episodes.parquet")


def read_page(runs: Path, path: str) -> dict[str, Any]:
    return json.loads(Library([runs]).respond(path))


def find_episode(runs: Path, env: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Return the step and the row of the first final episode with these values."""
    for step in range(1, 13):
        rows = read_step(runs / "shop", step)
        for row in rows[(rows.env == env) & rows.final].to_dict("records"):
            if all(row[name] == value for name, value in fields.items()):
                return step, row
    raise AssertionError(f"no episode of {env} has {fields}")


def episode_hash(step: int, row: dict[str, Any], query: str = "") -> str:
    return f"#/run/shop/step/{step}/episode/{row['position']}/{row['member']}/{row['attempt']}{query}"


def test_the_list_shows_each_run_with_its_progress(visit: Visit, runs: Path) -> None:
    visit.open()
    rows = {row[1].split()[0]: row for row in visit.rows()}
    for name, steps in (("shop", 12), ("faster", 4)):
        lines = read_lines(runs / name)
        rewards = [line["env/all/reward/mean"] for line in lines if "env/all/reward/mean" in line]
        scores = [line["eval/held_out/reward/mean"] for line in lines if "eval/held_out/reward/mean" in line]
        row = rows[name]
        assert row[2] == "completed"
        assert row[3] == f"{steps} / {steps}"
        assert row[4] == f"{rewards[0]:.2f} → {rewards[-1]:.2f}"
        assert row[5] == f"{scores[0]:.2f} → {scores[-1]:.2f}"
    assert str(runs) in visit.text()
    visit.check()


def test_a_run_shows_its_result_findings_curves_and_configuration(visit: Visit, runs: Path) -> None:
    visit.open("#/run/shop")
    text, lines = visit.text(), read_lines(runs / "shop")
    rewards = [line["env/all/reward/mean"] for line in lines if "env/all/reward/mean" in line]
    assert f"{rewards[0]:.2f} → {rewards[-1]:.2f}" in text
    assert visit.facts()["Step"] == "12 of 12"
    run = read_page(runs, "run/shop")
    assert run["findings"]
    for finding in run["findings"]:
        assert finding["name"].replace("_", " ") in text
        assert re.sub(r"\s+", " ", finding["text"]) in text
    titles = visit.texts(".chart-title")
    assert {"Reward", "Evaluation", "KL sampler–trainer", "Groups", "Failures", "Truncation"} <= set(titles)
    labels = visit.page.locator(".plot").evaluate_all("nodes => nodes.map((node) => node.ariaLabel)")
    reward = next(label for label in labels if label.startswith("Reward."))
    assert f"{float(f'{rewards[-1]:.3g}')} at step 12" in reward
    assert visit.page.locator(".plot canvas").count() == len(titles)
    assert "optimizer.learning_rate 0.0001" in re.sub(r"\s+", " ", text)
    visit.check()


def test_any_metric_can_be_found_and_drawn(visit: Visit) -> None:
    visit.open("#/run/shop")
    visit.page.get_by_label("Metric", exact=True).fill("entropy")
    visit.page.locator(".matches label", has_text="optim/entropy").first.click()
    visit.wait_until(lambda: visit.texts(".chart-title")[0].startswith("optim/entropy"))
    assert "m=optim" in visit.hash
    visit.check()


def test_a_step_shows_its_groups_with_rewards_and_reasons(visit: Visit, runs: Path) -> None:
    visit.open("#/run/shop/step/3")
    table = read_step(runs / "shop", 3)
    rows = visit.rows()
    groups = table[table.final].groupby("position")
    assert len(rows) == len(groups) == 6
    for position, group in groups:
        row = rows[int(position)]
        assert row[1].startswith(f"{group.task.iloc[0]} {group.env.iloc[0]}")
        chips = ["fail" if np.isnan(reward) else f"{reward:.2f}" for reward in group.sort_values("member").reward]
        assert row[2].split() == chips
        assert row[3] == f"{group.reward.mean():.2f}"
        is_taught = group.reward[~group.masked].nunique() > 1
        assert row[5] == "yes" if is_taught else row[5].startswith("no")
    visit.check()


def test_a_group_shows_replies_by_advantage_and_their_differences(visit: Visit, runs: Path) -> None:
    for step in range(1, 13):
        table = read_step(runs / "shop", step)
        sums = table[(table.env == "sums") & table.final]
        mixed = [position for position, group in sums.groupby("position") if group.reward.nunique() > 1]
        if mixed:
            break
    visit.open(f"#/run/shop/step/{step}/group/{mixed[0]}")
    rewards = visit.texts(".column header .chip")
    assert rewards == sorted(rewards, reverse=True)
    assert len(rewards) == 4
    group = sums[sums.position == mixed[0]]
    assert visit.text().count(f"What is {group.task.iloc[0]}?") == 1  # shared by all, shown once
    visit.page.get_by_role("button", name="Best against worst").click()
    visit.wait_for_hash("diff=")
    assert visit.page.locator("del, ins").count() > 0
    assert len(visit.texts(".column")) == 2
    visit.check()


def test_differences_of_replies_with_several_messages_show_their_roles(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    visit.open(f"#/run/shop/step/{step}/group/{row['position']}")
    visit.page.get_by_role("button", name="Best against worst").click()
    visit.wait_for_hash("diff=")
    texts = visit.texts(".column")
    assert len(texts) == 2
    assert all("[assistant]" in text for text in texts)
    assert any("[tool search]" in text for text in texts)
    visit.check()


def test_a_group_shows_where_a_reply_forks(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    visit.open(f"#/run/shop/step/{step}/group/{row['position']}")
    assert "continues turn 1" in visit.texts(".column .tag")


def test_a_failed_reply_shows_its_error(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="failed")
    visit.open(f"#/run/shop/step/{step}/group/{row['position']}")
    assert "ConnectionError: the till of the shop did not answer" in visit.text()
    visit.page.locator("summary .bad").first.click()
    visit.wait_until(lambda: "recorded_run.py" in visit.text("details .error-block"))
    visit.open(episode_hash(step, row))
    assert row["error"].splitlines()[0] in visit.text()
    visit.check()


@pytest.mark.parametrize("width", [800, 1280])
def test_failed_attempts_are_on_the_screen(visit_link: Callable[..., Visit], link: str, runs: Path, width: int) -> None:
    step, row = find_episode(runs, "shop", status="failed")
    visit = visit_link(link, width=width)
    visit.open(f"#/run/shop/step/{step}/group/{row['position']}")
    table = read_step(runs / "shop", step)
    table = table[(table.position == row["position"]) & (table.status == "failed")]
    failures = visit.page.locator("details", has=visit.page.locator("summary .bad"))
    assert failures.count() == len(table) > 0
    boxes = [failure.locator("summary").bounding_box() for failure in failures.all()]
    assert all(box["x"] + box["width"] <= width and box["y"] + box["height"] <= 800 for box in boxes)
    assert "failed" not in visit.text(".columns")
    failures.first.locator("summary").click()
    failures.first.locator(".message").first.wait_for()
    visit.page.keyboard.press("j")
    assert visit.page.evaluate("() => document.activeElement.closest('details') !== null")
    visit.check()


def test_a_group_whose_attempts_all_failed_has_no_best_reply(visit_link: Callable[..., Visit]) -> None:
    with serve(ROOT / "tests" / "data" / "view" / "verifiers_traces") as link:
        visit = visit_link(link)
        visit.open("#/run/verifiers_traces/evaluation/0/group/2")
        assert "2 failed attempts" in visit.text()
        assert visit.text(".columns") == "No reply is complete."
        button = visit.page.get_by_role("button", name="Best against worst")
        assert button.count() == 0  # it is hidden
        visit.page.get_by_label("Differences between").select_option("0.0")
        visit.page.get_by_label("and", exact=True).select_option("1.0")
        visit.page.get_by_role("button", name="Show all replies").click()
        visit.page.get_by_text("No reply is complete.").wait_for()
        visit.check()


def test_one_token_is_no_plural(tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    with serve(write_run(tmp_path / "short", steps=1)) as link:
        visit = visit_link(link)
        visit.open("#/run/short/step/1/group/0")
        assert visit.texts(".columns .column > .sub")[0].startswith("1 token ·")
        assert "1 token" in visit.page.locator(".columns .chip").first.get_attribute("title").split(", ")
        visit.open("#/run/short/step/1/episode/0/0/0")
        assert "· 1 token ·" in f"· {visit.texts('.turn-head .muted')[0]} ·"
        visit.check()


def test_a_run_with_a_single_evaluation_shows_one_number(tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    run = write_run(tmp_path / "once", steps=1)
    lines = [{"step": 0, "eval/sums/reward/mean": 0.25}, {"step": 1, "env/sums/reward/mean": 0.5}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with serve(run, ROOT / "tests" / "data" / "view" / "inspect.eval") as link:
        visit = visit_link(link)
        visit.open("#/?sort=name")
        assert [row[4:6] for row in visit.rows()] == [["–", "0.83"], ["0.50", "0.25"]]
        visit.open("#/run/once")
        assert visit.texts(".headline .big") == ["0.50", "0.25"]
        visit.check()


def test_a_configuration_without_origins_has_no_column_for_them(visit_link: Callable[..., Visit], link: str) -> None:
    heads = "section:has(h2:text('Configuration')) thead th"
    with serve(ROOT / "tests" / "data" / "view" / "inspect.eval") as other_link:
        for address, expected in ((other_link, ["Key", "Value"]), (f"{link}#/run/shop", ["Key", "Value", "Origin"])):
            visit = visit_link(address.partition("#")[0])
            visit.open(f"#{address.partition('#')[2] or '/run/inspect.eval'}")
            assert visit.texts(heads) == expected
            assert visit.page.get_by_label("Show defaults").count() == len(expected) - 2
            visit.check()


@pytest.mark.parametrize("text", ["a: [", "steps: " + "9" * 400 + "\n", "\x00"])
def test_a_damaged_configuration_leaves_the_rest_of_the_run(
    tmp_path: Path, visit_link: Callable[..., Visit], text: str
) -> None:
    write_run(tmp_path / "whole")
    (write_run(tmp_path / "odd") / "config.yaml").write_text(text)
    with serve(tmp_path) as link:
        visit = visit_link(link)
        visit.open("#/?sort=name")
        assert [row[1:5] for row in visit.rows()] == [
            ["odd", "completed", "3", "0.00 → 0.30"],
            ["whole", "completed", "3 / 100", "0.00 → 0.30"],
        ]
        visit.open("#/run/odd")
        assert "0.00 → 0.30" in visit.text()
        assert ("config.yaml" in visit.text(".error-block")) if "steps" not in text else "9999" in visit.text()
        assert visit.page.locator(".plot canvas").count() > 0
        visit.check()


def test_an_episode_is_a_chat_with_calls_results_and_a_fork(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    visit.open(episode_hash(step, row))
    text = visit.text()
    assert "search" in visit.texts(".call b")
    assert "buy" in visit.texts(".call b")
    assert "You bought" in text
    assert "How sure are you?" in text
    count = len(row["turns"])
    assert len(visit.texts(".tree a")) == count
    assert "continues turn 1" in text  # the fork
    branches = visit.page.locator(".tree li li")
    lines = branches.evaluate_all("(items) => items.map((item) => getComputedStyle(item).borderTopStyle)")
    assert lines == ["none", "dashed"]
    assert visit.facts()["spent"] == f"{json.loads(row['metrics'])['spent']:.2f}"
    visit.check()


def test_thinking_is_folded(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    visit.open(episode_hash(step, row))
    thinking = visit.page.locator("details.thinking").first
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    assert "is in the basket, so I am done." in visit.text("details.thinking")
    visit.check()


def test_forced_text_is_marked(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "sums", status="completed")
    visit.open(episode_hash(step, row))
    assert visit.texts("mark.forced")[0] == "The sum is"
    assert visit.page.locator(".role-assistant mark.forced").count() == 1
    assert visit.page.locator(".role-user mark.forced").count() == 0
    visit.check()


FORCED_REPLY = (
    (b"<think>\n", False),
    (b"I guess. ", True),
    (b"Wait, ", False),
    (b"I check. Wait, no.", True),
    (b"\n</think>\n\nSo ", False),
    (b"it is 4. So", True),
    (b" \xe2\x86", False),
    (b"\x92 4", False),
    (b".<|im_end|>", True),
)
"""Pieces of a reply, and whether each was sampled. What is forced occurs among the sampled words, too."""


def write_forced_run(directory: Path) -> None:
    """Write a run with an episode whose reply was forced in several places."""
    ids = np.arange(len(FORCED_REPLY), dtype=np.int32)
    thinking, content = "I guess. Wait, I check. Wait, no.", "So it is 4. So → 4."
    turn = Turn(
        Prompt(ids[:1]),
        ids,
        np.zeros(len(ids), np.float32),
        np.array([is_sampled for _, is_sampled in FORCED_REPLY]),
        "stop",
        0,
        messages=(
            {"role": "user", "content": f"{content} Right?"},
            {"role": "assistant", "content": content, "thinking": thinking},
        ),
    )
    episode = Episode(0, 0, (turn,), "completed", 1.0, {}, {}, 1.0)
    resolved = load_config([], settings={"model": "simulated", "envs": {"env": {"env": "env"}}, "steps": 1})
    with RunStore(directory, resolved=resolved):
        pieces = PieceWriter(pieces_path(directory), lambda token: TokenPiece(FORCED_REPLY[token][0], False))
        pieces.add([ids])
        group = table.RecordedGroup(Group("env", "task", 0, (episode,)), True, (episode,))
        table.write(table_path(directory, 1), [group])


def test_each_forced_text_is_marked_where_it_was_put(visit_link: Callable[..., Visit], tmp_path: Path) -> None:
    write_forced_run(tmp_path / "forced")
    with serve(tmp_path) as link:
        visit = visit_link(link)
        visit.open("#/run/forced/step/1/episode/0/0/0")
        script = "(nodes) => nodes.map((node) => [node.previousSibling?.data ?? '', node.textContent])"
        marks = visit.page.locator(".thinking mark.forced").evaluate_all(script)
        assert marks == [["I guess. ", "Wait, "]]
        marks = visit.page.locator(".message > .text mark.forced").evaluate_all(script)
        assert marks == [["", "So "], ["it is 4. So", " → 4"]]
        assert visit.page.locator(".role-user mark.forced").count() == 0
        visit.check()


def test_rendered_tokens_are_the_recorded_ones_with_their_numbers(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "sums", status="completed", counts=True)
    visit.open(episode_hash(step, row, "?view=tokens"))
    episode = read_page(runs, f"run/shop/step/{step}/episode/{row['position']}/{row['member']}/{row['attempt']}")
    turns = row["turns"]
    spans = visit.page.locator(".tokens .chunk span")
    assert spans.count() == sum(len(turn["prompt"]) + len(turn["completion"]) for turn in turns)
    first = len(turns[0]["prompt"])
    text = "".join(spans.all_text_contents()[:first])
    expected = "".join(episode["pieces"][str(token)] for token in turns[0]["prompt"])
    assert text.replace("↵", "") == expected
    assert "<|im_start|>" in text
    spans.nth(first).hover()
    details = visit.text(".token-details")
    logprob = float(turns[0]["logprobs"][0])
    assert f"log p {float(f'{logprob:.4g}')}" in details
    assert f"id {turns[0]['completion'][0]}" in details
    advantage = episode["turns"][0]["advantages"]
    if advantage is not None and advantage[0] is not None:
        assert f"{abs(advantage[0]):.3f}" in details
    forced = visit.page.locator(".tokens .chunk span.forced").all_text_contents()
    assert "".join(forced).strip() == "The sum is"
    for colour in ("logprob", "gap", "mask", "version"):
        before = visit.page.locator(".tokens").inner_html()
        visit.page.get_by_label("Colour by").select_option(colour)
        visit.wait_for_hash(f"colour={colour}")
        assert visit.page.locator(".tokens").inner_html() != before
    visit.check()


def test_an_episode_that_taught_nothing_says_so_and_one_of_an_evaluation_has_no_record(
    visit: Visit, runs: Path
) -> None:
    library = Library([runs])
    steps = range(1, len(read_lines(runs / "shop")))
    groups = [
        (step, group) for step in steps for group in json.loads(library.respond(f"run/shop/step/{step}"))["groups"]
    ]
    step, untaught = next((step, group) for step, group in groups if group["reason"] == "equal rewards")
    visit.open(f"#/run/shop/step/{step}/episode/{untaught['position']}/0/0?view=tokens")
    assert "no token is trained on" in visit.text(".token-legend")
    visit.open("#/run/shop/evaluation/0/episode/0/0/0?view=tokens")
    assert "not recorded for this episode" in visit.text(".token-legend")
    visit.check()


def test_a_trial_shows_its_terminal_verifier_and_artefacts(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    visit.open(episode_hash(step, row, "?view=files"))
    visit.page.get_by_text("$ buy tea").wait_for()  # without the escape sequences
    visit.page.get_by_text("1 passed: the basket holds 1 items").wait_for()
    visit.page.get_by_text("receipt.txt").click()
    visit.page.get_by_text(f"receipt of {row['task'].split()[-1]}").wait_for()
    assert "outside.txt" not in visit.text()
    visit.check()


def test_an_environment_draws_its_own_view_in_a_frame(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    visit.open(episode_hash(step, row, "?view=env"))
    frame = visit.page.frame_locator("iframe")
    frame.get_by_text(f"Basket of {row['task']}").wait_for()
    assert frame.locator("li").all_inner_texts() == [turn["stop"] for turn in row["turns"]]
    step, row = find_episode(runs, "sums", reward=1.0)
    visit.open(episode_hash(step, row, "?view=env"))
    visit.page.frame_locator("iframe").locator("h1", has_text=row["task"]).wait_for()
    visit.check()


def test_tasks_show_when_each_was_first_solved(visit: Visit, runs: Path) -> None:
    visit.open("#/run/shop/tasks?env=shop")
    frames = [read_step(runs / "shop", step).assign(step=step) for step in range(1, 13)]
    table = pd.concat(frames)
    table = table[table.final & (table.env == "shop")]
    rows = {row[0]: row for row in visit.rows()}
    for task, episodes in table.groupby("task"):
        row = rows[f"{task} shop"]
        assert row[1] == str(len(episodes))
        solved = episodes[episodes.reward == 1].step
        assert row[-1] == (f"step {solved.min()}" if len(solved) else "never")
    visit.check()


def test_a_task_is_shown_across_steps_and_against_another_run(visit: Visit, runs: Path) -> None:
    visit.open("#/run/shop/task/shop/cheapest%20tea")
    steps = [step for step in range(1, 13) if "cheapest tea" in set(read_step(runs / "shop", step).task)]
    assert list(dict.fromkeys(row[0] for row in visit.rows())) == [f"step {step}" for step in steps]
    visit.page.get_by_label("Compare with").select_option("faster")
    visit.wait_for_hash("against=faster")
    visit.page.get_by_text("Difference").wait_for()
    means = []
    for name, count in (("shop", 12), ("faster", 4)):
        table = pd.concat([read_step(runs / name, step) for step in range(1, count + 1)])
        means.append(table[table.final & (table.task == "cheapest tea")].reward.mean())
    assert visit.facts()["Mean reward, all episodes"] == f"{means[0]:.2f} against {means[1]:.2f}"
    visit.check()


def test_a_task_that_a_step_played_twice_names_the_groups_of_its_solvers(
    tmp_path: Path, visit_link: Callable[..., Visit]
) -> None:
    folder = write_run(tmp_path / "twice", steps=1)
    episodes = [Episode(0, 0, (), "completed", reward, {}, {}, 1.0) for reward in (1.0, 0.0, 1.0)]
    groups = [Group("sums", task, draw, (each,)) for draw, (task, each) in enumerate(zip("aba", episodes, strict=True))]
    table.write(table_path(folder, 1), [table.RecordedGroup(group, True, group.episodes) for group in groups])
    with serve(folder) as link:
        visit = visit_link(link)
        visit.open("#/run/twice/task/sums/a")
        assert "first solved at step 1, by members 0 of group 0, 0 of group 2" in visit.text()
        visit.check()


def test_runs_of_one_name_have_different_names_in_the_list(tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    with serve(write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")) as link:
        visit = visit_link(link)
        visit.open()
        assert sorted(row[1].split()[0] for row in visit.rows()) == ["run", "run~2"]
        visit.check()


def test_evaluations_show_scores_with_intervals_labels_and_tasks(visit: Visit, runs: Path) -> None:
    visit.open("#/run/shop/evaluations")
    text = visit.text()
    last = [line for line in read_lines(runs / "shop") if "eval/held_out/reward/mean" in line][-1]
    low, high = (last[f"eval/held_out/avg_at_3/{name}"] for name in ("low", "high"))
    assert f"{last['eval/held_out/avg_at_3']:.2f} ({low:.2f} to {high:.2f})" in text
    for label in ("size/small", "size/large"):
        assert text.count(label) == 1
        assert f"{last[f'eval/held_out/{label}/avg_at_3']:.2f}" in text
    for number in range(6):
        assert f"{10 * number + 7} + 25" in text
    visit.page.get_by_role("link", name="all groups").click()
    visit.wait_for_hash("evaluation/12")
    assert len(visit.rows()) == 6
    assert "Taught" not in visit.text()  # an evaluation teaches nothing, so a filter of a step does not count
    visit.open("#/run/shop/evaluation/12?taught=1")
    assert len(visit.rows()) == 6
    visit.page.locator("a.row-link").first.click()
    visit.wait_for_hash("evaluation/12/group")
    assert visit.texts("nav.tabs a[aria-current]") == ["Evaluations"]
    visit.check()


def test_evaluations_of_other_tools_have_intervals(visit_link: Callable[..., Visit]) -> None:
    with serve(ROOT / "tests" / "data" / "view" / "inspect.eval") as link:
        visit = visit_link(link)
        visit.open("#/run/inspect.eval")
        visit.page.get_by_role("link", name="Evaluations").click()
        visit.wait_for_hash("evaluations")
        interval = estimate_mean([1, 0.5, 1])
        assert f"mean reward 0.83 ({interval.low:.2f} to {interval.high:.2f}), 8 episodes" in visit.text()
        visit.page.get_by_role("link", name="all groups").click()
        visit.wait_for_hash("evaluation/0")
        assert len(visit.rows()) == 4
        visit.check()


def test_records_of_other_tools_have_no_numbers_that_were_not_recorded(visit_link: Callable[..., Visit]) -> None:
    with serve(ROOT / "tests" / "data" / "view" / "inspect.eval") as link:
        visit = visit_link(link)
        visit.open("#/run/inspect.eval/evaluations")
        assert visit.rows() == [["tool", "1.00"], ["picture", "0.50"], ["plain", "1.00"], ["fails", "–"]]
        visit.open("#/run/inspect.eval/evaluation/0/episode/0/0/0")
        assert visit.texts("nav.tree a") == ["Turn 1", "Turn 2"]
        visit.check()


@pytest.mark.skipif(not can_search(), reason="programs of a search would not be kept apart")
def test_discovery_shows_records_and_the_tree_of_states(visit: Visit, runs: Path) -> None:
    visit.open("#/run/erdos/discovery")
    paths = sorted((runs / "erdos" / "artefacts" / "erdos").glob("*.record.json"))
    records = [json.loads(path.read_text()) for path in paths]
    titles = visit.texts(".record h4")
    assert len(titles) == len(records) > 0
    best = min(record["value"] for record in records)
    assert f"{float(f'{best:.7g}')}" in visit.text()
    assert visit.page.locator(".states-frame svg circle").count() > 0
    visit.page.locator(".record summary", has_text="Program").first.click()
    assert "def run(seed, budget_s):" in visit.text()
    visit.check()


def test_runs_are_compared_with_the_difference_of_their_configurations(visit: Visit) -> None:
    visit.open()
    for name in ("shop", "faster"):
        visit.page.get_by_label(f"Select {name}", exact=True).check()
    visit.page.get_by_role("link", name="Compare").click()
    visit.wait_for_hash("compare/")
    text = visit.text()
    assert "optimizer.learning_rate 0.0001 0.0003" in text or "optimizer.learning_rate 0.0003 0.0001" in text
    assert "batch.groups" not in text  # equal in both
    legend = visit.texts(".chart .legend")[0]
    assert "shop" in legend
    assert "faster" in legend
    visit.check()
