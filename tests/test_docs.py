"""Every snippet of the documentation runs as it stands.

Python runs in this process, one page after another, with what earlier snippets of the page have defined; YAML is loaded
as a configuration; each line of shell is run. A snippet whose first line is a comment with the name of a file is that
file for what follows. `<!-- not run: reason -->` above a snippet exempts it. A random model stands in for the default
one, and examples are cut to one small step.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit.config.loading.load import load_config

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *TUTORIALS]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
FILE_NAME = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
RUN = ("python", "yaml", "sh")
SHOWN = ("text",)


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    body: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        match = FILE_NAME.match(self.body)
        return match[1] if match else None


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text()
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("language")) + 1
        yield Snippet(page, line, fence["language"], fence["body"], fence["reason"])


def shorten(config: str) -> str:
    """Cut a run to one small step."""
    fields = yaml.safe_load(config)
    for evaluated in fields.get("eval", {"envs": {}})["envs"].values():
        evaluated["tasks"] = 2
    if "warm_start" in fields:
        fields["warm_start"]["steps"] = 1
    return yaml.safe_dump({**fields, "steps": 1, "batch": {"groups": 2, "group_size": 2}})


@pytest.fixture
def workplace(tmp_path: Path, byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the examples, cut short, and a cache with a tiny model under the default's name."""
    cached = tmp_path / "cache" / "models" / DEFAULT_MODEL.replace("/", "--")
    cached.parent.mkdir(parents=True)
    shutil.copytree(byte_model_dir, cached)
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    place = tmp_path / "work"
    (place / "examples").mkdir(parents=True)
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, place / "examples")
    for example in (ROOT / "examples").glob("*.yaml"):
        (place / "examples" / example.name).write_text(shorten(example.read_text()))
    monkeypatch.chdir(place)
    return place


def run_python(snippet: Snippet, namespace: dict[str, object]) -> None:
    exec(compile("\n" * snippet.line + snippet.body, str(snippet.page), "exec"), namespace)


def run_shell(snippet: Snippet) -> None:
    for line in snippet.body.splitlines():
        if ">" in line or not line.startswith("rlkit "):
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            subprocess.run(["bash", "-ec", line], check=True, env={**os.environ, "PATH": path}, capture_output=True)
            continue
        from rlkit.cli.app import app

        # in this process: the libraries are loaded once, not once a line
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{snippet.place}: {line}\n{result.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_of_a_page_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)
    for snippet in snippets(page):
        if snippet.reason is not None or snippet.language in SHOWN:
            continue
        if page.name == "README.md" and snippet.language == "sh":
            continue  # the two commands of the README have a test of their own
        if snippet.file_name:
            (workplace / snippet.file_name).write_text(snippet.body)
        match snippet.language:
            case "python":
                run_python(snippet, module.__dict__)
            case "yaml":
                name = snippet.file_name or "snippet.yaml"
                (workplace / name).write_text(snippet.body)
                load_config([workplace / name])
                if page in TUTORIALS:  # their commands train on it
                    (workplace / name).write_text(shorten(snippet.body))
            case "sh":
                run_shell(snippet)
            case other:
                pytest.fail(f"{snippet.place}: nothing runs {other!r}; use one of {RUN} or {SHOWN}")


def readme_commands() -> list[str]:
    readme = list(snippets(ROOT / "README.md"))
    return [line for snippet in readme if snippet.language == "sh" for line in snippet.body.splitlines()]


def test_readme_has_one_command_to_train_and_one_to_test() -> None:
    assert readme_commands() == [
        "python3 scripts/first_run.py train examples/arithmetic.yaml",
        "python3 -m pip install -qU --target .uv uv && .uv/bin/uv run pytest -n 3 --dist loadfile",
    ]


def test_developer_page_runs_the_tests_with_the_command_of_the_readme() -> None:
    command = readme_commands()[1].partition(" && ")[2]
    lines = [line.partition("  #")[0].strip() for line in (ROOT / "AGENTS.md").read_text().splitlines()]
    assert [line for line in lines if "pytest -n" in line] == [command]


def test_the_quick_start_trains_with_the_command_of_the_readme() -> None:
    bodies = [snippet.body.strip() for snippet in snippets(ROOT / "docs" / "index.md") if snippet.reason]
    assert bodies == readme_commands()[:1]


def test_readme_does_not_name_the_package_of_another_project() -> None:
    for page in [*PAGES, ROOT / "AGENTS.md"]:
        assert "pip install rlkit" not in page.read_text(), page


def test_the_readme_starts_with_three_lines_and_the_picture() -> None:
    paragraphs = (ROOT / "README.md").read_text().split("\n\n")
    assert len(paragraphs[1].splitlines()) == 3
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", paragraphs[2])
    assert (ROOT / picture).stat().st_size > 1000


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -E '(.+)' README\.md", script)
    assert pattern is not None
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(pattern[1], line)]
    assert lines == readme_commands()[1:]
    assert script.rstrip().endswith('bash -c "$test_command"')
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_eight_lines_of_the_readme_are_those_of_the_docstring() -> None:
    from rlkit.env import Env

    (body,) = [snippet.body for snippet in snippets(ROOT / "README.md") if snippet.language == "python"]
    for line in (Env.__doc__ or "").split("::")[1].strip().splitlines()[:5]:
        assert line.strip() in body


def test_every_public_name_is_in_the_reference() -> None:
    import rlkit.errors

    page = (ROOT / "docs" / "reference.md").read_text()
    named = set(re.findall(r"^::: rlkit\.[\w.]*?(\w+)$", page, re.MULTILINE))
    errors = {name for name in rlkit.__all__ if name in vars(rlkit.errors)}
    assert set(rlkit.__all__) - errors - named == {"Config"}, "Config has the page of the configuration"
    assert "::: rlkit.errors" in page


def test_modules_to_read_first_exist_with_the_stated_length() -> None:
    page = (ROOT / "docs" / "design.md").read_text().partition("## The ten modules to read")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE)
    texts = {name: (ROOT / "src" / "rlkit" / name).read_text() for name, _ in rows}
    lengths = {name: sum(1 for line in text.splitlines() if line.strip()) for name, text in texts.items()}
    assert len(rows) == 10
    assert {name: stated for name, stated in rows if abs(lengths[name] - int(stated)) > 20} == {}
    assert (total := re.search(r"about ([\d,]+) lines that are not blank", page)) is not None
    assert abs(sum(lengths.values()) - int(total[1].replace(",", ""))) <= 100


def test_every_estimator_is_in_the_table_and_the_reference() -> None:
    from rlkit.algorithms.estimators import ESTIMATORS

    page = (ROOT / "docs" / "advantages.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(ESTIMATORS)
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: rlkit\.algorithms\.estimators\.(\w+)$", reference, re.MULTILINE)) == sorted(
        each.__name__ for each in ESTIMATORS.values()
    )


def test_the_navigation_has_four_parts_and_the_guides_by_name() -> None:
    parts = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [name for part in parts for name in part] == ["Start", "Guides", "Reference", "Background"]
    assert [name for guide in parts[1]["Guides"] for name in guide] == [
        "Tutorials",
        "Environments",
        "Rewards and advantages",
        "Agents",
        "Terminal tasks",
        "Maths",
        "OpenReward",
        "Discovery",
        "Distillation",
        "Evaluation",
        "Scale",
        "Operation",
        "Moving over",
    ]


def test_configuration_reference_is_generated_from_the_schema() -> None:
    hook = runpy.run_path(str(ROOT / "scripts" / "docs_hook.py"))
    on_page_markdown, reference_markdown = hook["on_page_markdown"], hook["reference_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="configuration.md"), meta={})
    page_text = on_page_markdown((ROOT / "docs" / "configuration.md").read_text(), page=page)
    assert reference_markdown() in page_text
    with pytest.raises(ValueError, match="has no line"):
        on_page_markdown("no mark", page=page)


@pytest.mark.parametrize("ending", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_the_picture_of_a_run_is_drawn_from_its_metrics(ending: str, tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/all/reward/mean": 0.1}]
    lines += [{"step": step, "env/all/reward/mean": step / 5} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / f"curve.{ending}"
    script = [sys.executable, str(ROOT / "scripts" / "plot_run.py"), f"adding={tmp_path}", "--out", str(out)]
    subprocess.run(script, check=True, capture_output=True)
    first = out.read_bytes()
    assert len(first) > 1000
    subprocess.run(script, check=True, capture_output=True)
    assert out.read_bytes() == first, "the same run gives the same picture"
