/** Several runs: curves overlaid, results side by side, and the difference of their configurations. */
import { load } from "rlkit/api";
import { drawCurves } from "rlkit/curves";
import { startToNow } from "rlkit/pages/runs";
import { runColour } from "rlkit/panels";
import { apiPath, emptyNote, formatCount, formatUsd, h, makeHash, makeRow, makeTable, section, splitIds, statusBadge, textLine } from "rlkit/ui";

/** Show a comparison of runs. */
export async function showCompare([, list], query) {
  const ids = splitIds(list);
  const loadAll = () => Promise.all(ids.map(async (id) => {
    const [run, metrics] = await Promise.all([load(apiPath("run", id)), load(`${apiPath("run", id)}/metrics`)]);
    return { run, metrics };
  }));
  const sources = await loadAll();
  const curves = drawCurves(sources, query);
  const node = h("div", { class: "page" }, h("h1", null, "Compare runs"), drawSummary(sources), curves.node, drawDifference(sources.map(({ run }) => run)));
  const crumbs = [["Runs", "#/"], [`Compare ${ids.length}`, makeHash(["compare", list])]];
  return { title: "Compare runs", node, crumbs, up: makeHash([], { select: list }), watch: apiPath("run", ids[0]), refresh: async () => curves.refresh(await loadAll()), requery: curves.requery, close: curves.close };
}

function drawSummary(sources) {
  const rows = sources.map(({ run }, index) => makeRow([
    h("span", null, h("i", { class: "swatch", style: { background: `var(--${runColour(index)})` } }), " ", h("a", { href: makeHash(["run", run.id]) }, textLine(run.name, 80)), h("div", { class: "sub" }, textLine(run.model ?? ""))),
    statusBadge(run.status), [String(run.step), "num"], [startToNow(run.reward), "num"],
    [startToNow(run.evaluation && [run.evaluation.start, run.evaluation.now]), "num"], [formatCount(run.tokens), "num"], [formatUsd(run.usd), "num"],
  ]));
  return makeTable("Runs", ["Run", "Status", ["Step", "num"], ["Reward", "num"], ["Evaluation", "num"], ["Tokens", "num"], ["Cost", "num"]], rows).node;
}

function drawDifference(runs) {
  const values = runs.map((run) => new Map((run.config ?? []).map(([key, value]) => [key, value])));
  const keys = [...new Set(values.flatMap((map) => [...map.keys()]))];
  const different = keys.filter((key) => new Set(values.map((map) => map.get(key))).size > 1);
  const rows = different.map((key) => h("tr", null, h("th", { scope: "row", class: "mono" }, textLine(key, 120)),
    values.map((map) => h("td", { class: "mono" }, map.has(key) ? textLine(map.get(key), 300) : h("span", { class: "muted" }, "not set")))));
  const table = makeTable("Difference of the configurations", ["Key", ...runs.map((run) => run.name)], rows);
  return section("Difference of the configurations", null, different.length ? table.node : emptyNote("The configurations are equal."));
}
