"""Measure `rlkit view` in Chromium on a large made run, beside `inspect view` on the same episodes in the same run.

    uv run --with playwright python benchmarks/view.py
    uv run --with playwright python benchmarks/view.py --steps 20 --rounds 1 --training-rounds 0     (a minute)

The run has 500 steps of 200 episodes (groups of 8), 2,000 tokens an episode and one episode of 32,000 tokens. Its
folder has 1,000 small runs as well. `--folder` keeps them for the next time. Needs Debian's Chromium, and `uv` for the
peer, which gets the episodes of two steps by `rlkit export` in its own format, .eval.

    first paint   load the run's page, until something is drawn
    run           … until all of its curves are drawn
    list          load the list of runs, until its first rows are drawn
    list, end     … then scroll, until all rows are drawn
    groups        go from the run to a step that the server has not read before, until its groups are drawn
    tokens        go from the step to the long episode, until each of its 32,000 tokens has its colour
    colours       colour them by another number
    memory        server's peak of its resident memory, and its proportional share at the end
    heap          largest heap of the browser's JavaScript after any of these pages
    open log      load the page of a step, or of its log, until its first rows are drawn
    open sample   go from there to an episode of 2,000 tokens, until its first reply is drawn
    open 32k      … to the episode of 32,000 tokens
    polling       processor time of the server while the run's page is open, as a share of one processor
    training      time of the steps of a real small training with its page open, which polls it every two seconds,
                  compared with the same training without, in turns
    its server    share of the time of all processors that the server takes from that training

A time is the best of a few rounds, because a shared machine has slow minutes; their median stands beside it. All times
end after the browser has painted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT
from urllib.parse import quote
from urllib.request import urlopen

import view_runs
from playwright.sync_api import Browser, Error, Page, sync_playwright
from view_runs import MadeRuns

from rlkit._util.paths import cache_dir
from rlkit.tools.export_episodes import export_episodes

MIB = 2**20
POLLING_S = 20.0
LIMIT_S = 60
TRAINING_STEPS = 16
EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
INSPECT = ("uv", "run", "--quiet", "--isolated", "--no-project", "--with", "inspect-ai", "inspect")

# Conditions of the pages in JavaScript.
ROWS = "document.querySelectorAll('main tr[data-row]').length"
IS_IDLE = "!document.querySelector('main[aria-busy]')"
CURVES = f"{IS_IDLE} && document.querySelector('.chart-grid canvas')"
REPLY = f"{IS_IDLE} && document.querySelector('main .message.role-assistant')"
PEER_ROWS = "document.querySelector('a[role=row]')"
PEER_REPLY = "document.querySelector('#messages-contents .assistant')?.innerText.length > 100"


class Server:
    """A local web server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], link: str) -> None:
        self._process, self.link = process, link

    @property
    def peak_bytes(self) -> int:
        """Largest resident memory of its processes together."""
        return sum(self._read("status", "VmHWM"))

    @property
    def proportional_bytes(self) -> int:
        """Memory of its processes now, pages that others share counted in parts."""
        return sum(self._read("smaps_rollup", "Pss"))

    @property
    def cpu_s(self) -> float:
        """Processor time of its processes."""
        ticks = 0
        for process in self._processes():
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _read(self, file: str, name: str) -> Iterator[int]:
        for process in self._processes():
            line = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/{file}").read_text(), re.MULTILINE)
            yield int(line[1]) * 1024 if line else 0

    def _processes(self) -> list[int]:
        processes = [self._process.pid]
        for process in processes:
            for file in Path(f"/proc/{process}/task").glob("*/children"):
                processes += map(int, file.read_text().split())
        return [process for process in processes if Path(f"/proc/{process}/comm").read_text() != "uv\n"]


@contextmanager
def serve(command: Sequence[str], *, link: str | None = None) -> Iterator[Server]:
    """Start a server; its link is the first line that it prints, unless it is known."""
    process = subprocess.Popen(command, text=True, start_new_session=True, stdout=PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield Server(process, link or process.stdout.readline().strip())
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@contextmanager
def serve_runs(folder: Path) -> Iterator[Server]:
    """Start `rlkit view`."""
    with serve([sys.executable, "-m", "rlkit", "view", str(folder), "--no-open"]) as server:
        yield server


@contextmanager
def serve_logs(folder: Path) -> Iterator[Server]:
    """Start `inspect view`."""
    link = "http://127.0.0.1:7576/"
    with serve([*INSPECT, "view", "start", "--log-dir", str(folder), "--port", "7576"], link=link) as server:
        while True:
            try:
                urlopen(link).close()
                break
            except OSError:
                time.sleep(0.2)
        yield server


class Visitor:
    """A browser that loads pages and measures milliseconds until a condition holds and is painted."""

    def __init__(self, browser: Browser, link: str) -> None:
        self._browser, self._link = browser, link.partition("#")[0]  # the link of a single run has its page
        self.page: Page | None = None
        self.heap_bytes = 0

    def load(self, place: str, condition: str) -> float:
        """Load a page in a fresh profile."""
        if self.page is not None:
            self.page.context.close()
        self.page = self._browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.page.goto(f"{self._link}#{place}", wait_until="commit")
        return self._wait("0", "", condition)

    def go(self, place: str, condition: str) -> float:
        """Follow a link within the page."""
        return self._wait("performance.now()", f"location.hash = {json.dumps(place)}", condition)

    def act(self, action: str, condition: str) -> float:
        """Do something in the page."""
        return self._wait("performance.now()", action, condition)

    def evaluate(self, expression: str) -> float:
        assert self.page is not None
        return self.page.evaluate(expression)

    def _wait(self, begin: str, action: str, condition: str) -> float:
        wait = f"""() => new Promise((resolve, reject) => {{
            setTimeout(() => reject(new Error("the page is not drawn")), {1000 * LIMIT_S});
            const begin = {begin};
            const painted = () => setTimeout(() => resolve(performance.now() - begin));
            const look = () => requestAnimationFrame(({condition}) ? () => requestAnimationFrame(painted) : look);
            {action};
            look();
        }})"""
        while True:
            try:
                milliseconds = self.evaluate(wait)
                break
            except Error as error:  # the document of a load that just began was replaced
                if "navigation" not in str(error):
                    raise
        assert self.page is not None
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable")
        metrics = {row["name"]: row["value"] for row in session.send("Performance.getMetrics")["metrics"]}
        session.detach()
        self.heap_bytes = max(self.heap_bytes, int(metrics["JSHeapUsedSize"]))
        return milliseconds


type Times = dict[str, list[float]]
"""Milliseconds of each round by row."""


def measure_pages(visitor: Visitor, made: MadeRuns, *, rounds: int) -> Times:
    """Measure the pages of the large run and the list of runs."""
    times: Times = {}
    count = view_runs.SMALL_RUNS + 1
    for number in range(rounds):
        step = 1 + number * 7 % made.steps
        measured = {
            "list": visitor.load("/", f"{ROWS} >= 50"),
            "list, end": visitor.act(
                "scrollTo(0, 1e9)", f"(scrollTo(0, document.body.scrollHeight), {ROWS} === {count})"
            ),
            "run": visitor.load(f"/run/{view_runs.BIG}", CURVES),
            "first paint": visitor.evaluate(
                "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
            ),
            "groups": visitor.go(f"/run/{view_runs.BIG}/step/{step}", has_groups(step)),
        }
        visitor.go(f"/run/{view_runs.BIG}/step/{made.long_step}", has_groups(made.long_step))
        episode = f"/run/{view_runs.BIG}/step/{made.long_step}/episode/0/0/0"
        measured["tokens"] = visitor.go(f"{episode}?view=tokens", has_colours(".p1, .p2, .p3, .p4, .n1, .n2, .n3, .n4"))
        colours = ".s0, .s1, .s2, .s3, .s4, .s5"
        choose = "Object.assign(box, {value: 'logprob'}).dispatchEvent(new Event('change'))"
        measured["colours"] = visitor.act(
            f"((box) => {choose})(document.querySelector('.token-bar select'))", has_colours(colours)
        )
        for name, value in measured.items():
            times.setdefault(name, []).append(value)
    return times


def has_groups(step: int) -> str:
    """Return the condition that the groups of a step are drawn."""
    return f"{IS_IDLE} && document.querySelector('h1')?.textContent === 'Step {step}' && {ROWS} === {view_runs.GROUPS}"


def has_colours(classes: str) -> str:
    """Return the condition that all tokens of the long episode have a class, and its sampled tokens one of some."""
    tokens = view_runs.LONG_TURNS * (view_runs.LONG_GIVEN + view_runs.LONG_SAMPLED)
    spans = "document.querySelectorAll('.chunk span[class]').length"
    return f"{IS_IDLE} && {spans} === {tokens} && document.querySelector('.chunk :is({classes})')"


def measure_episodes(visitor: Visitor, made: MadeRuns, *, rounds: int) -> Times:
    """Measure what the peer has, too: a step, and its episodes as conversations."""
    times: Times = {"open log": [], "open sample": [], "open 32k": []}
    step = f"/run/{view_runs.BIG}/step/{made.long_step}"
    for _ in range(rounds):
        for name, place in (("open sample", "/episode/0/1/0"), ("open 32k", "/episode/0/0/0")):
            times["open log"].append(visitor.load(step, has_groups(made.long_step)))
            times[name].append(visitor.go(f"{step}{place}", REPLY))
    return times


def measure_peer(visitor: Visitor, log: str, *, rounds: int) -> Times:
    """Measure the same on the peer's pages; the first row is the episode of 32,000 tokens."""
    times: Times = {"open log": [], "open sample": [], "open 32k": []}
    for _ in range(rounds):
        for name, row in (("open sample", 1), ("open 32k", 0)):
            times["open log"].append(visitor.load(f"/logs/{quote(log)}", PEER_ROWS))
            action = f"document.querySelectorAll('a[role=row]')[{row}].click()"
            times[name].append(visitor.act(action, PEER_REPLY))
    return times


def export_logs(made: MadeRuns, folder: Path) -> tuple[Path, str]:
    """Export two steps to the peer, and return the folder of its logs and the log of the step with the long episode."""
    part, exported, logs = folder / view_runs.BIG, folder / "exported", folder / "logs"
    part.mkdir()
    for name in ("run.json", "config.yaml", "metrics.jsonl", "pieces.jsonl"):
        shutil.copy(made.big / name, part)
    for step in (made.long_step, made.long_step + 1):
        shutil.copytree(made.big / f"episodes/step={step:06d}", part / f"episodes/step={step:06d}")
    export_episodes(str(part), exported)
    convert = ("log", "convert", str(exported / "logs"), "--to", "eval", "--output-dir", str(logs))
    subprocess.run([*INSPECT, *convert], check=True, capture_output=True)
    return logs, next(path.name for path in logs.iterdir() if f"{made.long_step:06d}" in path.name)


def train(browser: Browser, *, is_watched: bool) -> tuple[float, float]:
    """Train the example for a few steps, with its page open or without.

    Returns:
        Seconds of its steps, and the server's share of the time of all processors.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Path(folder) / "training"
        server = stack.enter_context(serve_runs(Path(folder))) if is_watched else None
        visitor = Visitor(browser, server.link) if server is not None else None
        if visitor is not None:  # starting a browser's page costs time, too, but no training waits for it
            visitor.load("/", f"{IS_IDLE} && document.querySelector('h1')")
        command = [sys.executable, "-m", "rlkit", "train", str(EXAMPLE), f"steps={TRAINING_STEPS}", "eval.every=0"]
        environment = {**os.environ, "RLKIT_RUNS_DIR": folder}
        with subprocess.Popen([*command, f"name={run.name}"], env=environment, stdout=PIPE, stderr=STDOUT) as process:
            while process.poll() is None and not (run / "run.json").exists():
                time.sleep(0.1)
            if visitor is not None:
                visitor.go(f"/run/{run.name}", "document.querySelector('.run-head')")
            began_s, cpu_s = time.perf_counter(), server.cpu_s if server is not None else 0.0
            output, _ = process.communicate()
            taken_s = 0.0 if server is None else server.cpu_s - cpu_s
            share = taken_s / (time.perf_counter() - began_s) / len(os.sched_getaffinity(0))
        if process.returncode:
            sys.exit(output.decode())
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return sum(json.loads(line).get("time/step_s", 0.0) for line in lines), share


def compare_training(browser: Browser, *, rounds: int) -> None:
    """Print how much a training is slowed by its page."""
    seconds, shares = {True: list[float](), False: list[float]()}, list[float]()
    for number in range(rounds):
        for is_watched in (number % 2 == 0, number % 2 == 1):
            seconds_of_steps, share = train(browser, is_watched=is_watched)
            seconds[is_watched].append(seconds_of_steps)
            shares += [share] if is_watched else []
    watched, alone = min(seconds[True]), min(seconds[False])
    print_row("training", watched / alone, f"({watched:.1f} s, alone {alone:.1f} s)", 1.02, unit="×")
    print_row("its server", 100 * max(shares), "", 2.0, unit="%")


def measure_polling(visitor: Visitor, server: Server) -> float:
    """Return the processor seconds a second of the server while the run's page is open."""
    visitor.load(f"/run/{view_runs.BIG}", CURVES)
    began_s = server.cpu_s
    time.sleep(POLLING_S)
    return (server.cpu_s - began_s) / POLLING_S


def print_row(name: str, value: float, detail: str, goal: float | None, *, unit: str) -> None:
    """Print a figure and whether it is at most its goal."""
    verdict = "" if goal is None else f"≤ {goal:g} {unit}  {'MET' if value <= goal else 'MISSED'}"
    print(f"{name:14}{value:>10.4g} {unit:5} {detail:28} {verdict}", flush=True)


def print_times(times: Times, goals: dict[str, float]) -> None:
    for name, values in times.items():
        print_row(name, min(values), f"(median {median(values):.0f})", goals.get(name), unit="ms")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "benchmarks" / "view", help="folder of made runs")
    parser.add_argument("--steps", type=int, default=500, help="steps of the large run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--training-rounds", type=int, default=3)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    made = view_runs.make_runs(options.folder, steps=options.steps)
    print(f"{len(os.sched_getaffinity(0))} processors; load of the last minute {os.getloadavg()[0]:.1f}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        measure_own(browser, made, rounds=options.rounds)
        compare_peer(browser, made, rounds=options.rounds)
        if options.training_rounds:
            compare_training(browser, rounds=options.training_rounds)


def measure_own(browser: Browser, made: MadeRuns, *, rounds: int) -> None:
    """Measure the pages of rlkit, and what its server uses."""
    with serve_runs(made.runs) as server:
        visitor = Visitor(browser, server.link)
        goals = {
            "first paint": 1000.0,
            "run": 1000.0,
            "list": 1000.0,
            "groups": 200.0,
            "tokens": 300.0,
            "colours": 300.0,
        }
        print_times(measure_pages(visitor, made, rounds=rounds), goals)
        proportional = f"(proportional {server.proportional_bytes / MIB:.0f})"
        print_row("memory", server.peak_bytes / MIB, proportional, 300.0, unit="MiB")
        print_row("heap", visitor.heap_bytes / MIB, "", 250.0, unit="MiB")
        print_row("polling", 100 * measure_polling(visitor, server), "", None, unit="%")


def compare_peer(browser: Browser, made: MadeRuns, *, rounds: int) -> None:
    """Print the times of both viewers on the same episodes, and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        logs, log = export_logs(made, Path(folder))
        with serve_runs(made.runs) as server, serve_logs(logs) as peer:
            ours = measure_episodes(Visitor(browser, server.link), made, rounds=rounds)
            theirs = measure_peer(Visitor(browser, peer.link), log, rounds=rounds)
            for name in ours:
                ratio = min(ours[name]) / min(theirs[name])
                detail = f"({min(ours[name]):.0f} ms, inspect {min(theirs[name]):.0f} ms)"
                print_row(name, ratio, detail, 1.0, unit="×")
            sizes = server.peak_bytes / MIB, peer.peak_bytes / MIB
            print_row(
                "peak memory", sizes[0] / sizes[1], f"({sizes[0]:.0f} MiB, inspect {sizes[1]:.0f} MiB)", None, unit="×"
            )


if __name__ == "__main__":
    main()
