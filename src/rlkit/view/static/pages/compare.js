/** Several runs: curves overlaid, results side by side, and the difference of their configurations. */
import { makeCurves } from "rlkit/curves";
import { drawRun, HEADS } from "rlkit/pages/runs";
import { runColour } from "rlkit/panels";
import { apiPath, emptyNote, errorBlock, h, loadAll, makeHash, makeHeadedRow, makeTable, replace, section, splitIds,
  swatch, textLine } from "rlkit/ui";

export default async function showCompare([, list], query) {
  const ids = splitIds(list);
  const results = await Promise.allSettled(ids.map(loadSource));
  let sources = results.flatMap(({ value }) => value ?? []);
  if (!sources.length) throw results[0].reason;
  const failures = results.flatMap(({ reason }) => (reason ? errorBlock(reason.message) : []));
  const summary = h("div");
  const curves = makeCurves();
  const draw = () => {
    const rows = sources.map(({ run }, index) => drawRun(run, swatch(runColour(index))));
    replace(summary, makeTable("Runs", HEADS, rows));
    curves.show(sources, query);
  };
  draw();
  const refresh = async ({ runs }) => {
    const rows = new Map(runs.map((row) => [row.id, row]));
    const isOld = ({ run }) => ["updated", "status"].some((key) => rows.get(run.id)?.[key] !== run[key]);
    if (!sources.some(isOld)) return;
    sources = await Promise.all(sources.map((source) => (isOld(source) ? loadSource(source.run.id) : source)));
    draw();
  };
  const requery = (changed) => ((query = changed), draw());
  const difference = drawDifference(sources.map(({ run }) => run));
  const node = h("div.page", h("h1", "Compare runs"), failures, summary, curves.node, difference);
  const crumbs = [["Runs", "#/"], [`Compare ${ids.length}`, makeHash(["compare", list])]];
  const up = makeHash([], { select: list });
  return { title: "Compare runs", node, crumbs, up, watch: "runs", refresh, requery };
}

async function loadSource(id) {
  const [run, metrics] = await loadAll(apiPath("run", id), apiPath("run", id, "metrics"));
  return { run, metrics };
}

function drawDifference(runs) {
  const title = "Difference of the configurations";
  const settings = runs.map((run) => new Map(run.config ?? []));
  const setKeys = new Set(runs.flatMap(({ config }) => config ?? []).flatMap(([key, , origin]) =>
    origin === "default" ? [] : key));
  // Defaults of an environment that a run lacks say nothing.
  const isShown = (key) => setKeys.has(key) || settings.every((values) => values.has(key));
  const keys = new Set(settings.flatMap((values) => [...values.keys()]).filter(isShown));
  const differentKeys = [...keys].filter((key) => new Set(settings.map((values) => values.get(key))).size > 1);
  const drawValue = (key, values) => values.has(key) ? [textLine(values.get(key), 300), "mono"] : ["not set", "muted"];
  const rows = differentKeys.map((key) =>
    makeHeadedRow([textLine(key, 120), "mono"], ...settings.map((values) => drawValue(key, values))));
  const table = makeTable(title, ["Key", ...runs.map((run) => textLine(run.id, 40))], rows);
  return section(title, null, rows.length ? table : emptyNote("The configurations are equal."));
}
