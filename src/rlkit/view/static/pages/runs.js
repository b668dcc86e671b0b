/** The list of runs: what runs, how each went, and a choice of several to compare. */
import { choiceControl, drawChange, formatAge, formatCount, formatNumber, formatUsd, h, joinFacts, joinIds,
  keepFocus, load, makeHash, makeList, makeRow, memberBox, pageHead, plural, replace, runHash, sortRows, splitIds,
  statusBadge, textControl, textLine, wordMatcher } from "rlkit/ui";

export const HEADS = ["", "Run", "Status", ...["Step", "Reward", "Evaluation"].map((head) => [head, "num"]),
  ...["Tokens", "Cost", "Updated"].map((head) => [head, "num extra"])];
const SORTS = [
  ["", "newest"], ["reward", "reward", ({ reward }) => -(reward?.[1] ?? -Infinity)],
  ["name", "name", ({ name }) => name], ["usd", "cost", ({ usd }) => -(usd ?? -Infinity)],
];

export default async function showRuns(_parts, query) {
  let { folder, runs } = await load("runs");
  const selected = new Set(splitIds(query.select ?? ""));
  const summary = h("p.lead", { role: "status" });
  const selection = h("div.selection");
  const drawBox = ({ id }) => memberBox(selected, id, "select", { "aria-label": `Select ${id}` });
  const list = makeList("Runs", HEADS, (run) => drawRun(run, drawBox(run)));
  const draw = () => {
    const isMatch = wordMatcher(query.q);
    const chosen = sortRows(runs.filter((run) => isMatch(describeRun(run))), SORTS, query.sort);
    const live = runs.filter((run) => run.live).length;
    const count = `${plural(chosen.length, "run")}${live ? `, ${live} live` : ""}`;
    replace(summary, h("span.mono", textLine(folder)), ` · ${count}`);
    list.show(chosen, runs.length ? "No run matches." : "No runs in this folder yet.");
  };
  draw();
  drawSelection(selection, selected);
  const search = textControl("Search", "q", query, { placeholder: "name, model, tag, status" });
  const toolbar = h("div.toolbar", selection, search, choiceControl("Sort", "sort", SORTS, query));
  const node = h("div.page", pageHead("Runs", summary, toolbar), list.node);
  const requery = (changed) => {
    const isNew = changed.q !== query.q || changed.sort !== query.sort;
    query = changed;
    if (isNew) draw();
    drawSelection(selection, selected);
  };
  const refresh = (data) => (({ folder, runs } = data), keepFocus(list.node, draw));
  return { title: "Runs", node, crumbs: [["Runs", "#/"]], watch: "runs", refresh, requery };
}

const describeRun = ({ name, id, model, status, kind, reason, envs, tags }) =>
  [name, id, model, status, kind, reason, ...envs, ...tags].join(" ");

function drawSelection(node, selected) {
  const href = makeHash(["compare", joinIds(selected)]);
  replace(node, selected.size > 0 && h("span.muted", `${selected.size} selected`),
    selected.size > 1 && h("a.button.primary", { href }, "Compare"));
}

/** Return a run as a row of a table with `HEADS`; `mark` is before its name. */
export function drawRun(run, mark) {
  const link = h("a.row-link", { href: runHash(run.id) }, textLine(run.id, 80));
  const tags = [run.kind !== "rlkit" && run.kind, ...run.tags].filter(Boolean);
  const subject = joinFacts([run.model, run.envs.join(", ")]);
  const reasons = [run.reason, run.damaged].map((reason) => reason && h("div.sub.bad", textLine(reason, 120)));
  return makeRow([
    [mark, "tick"],
    h("div", link, tags.map((tag) => h("span.tag", textLine(tag, 30))), h("div.sub", textLine(subject, 120))),
    h("div.status-cell", statusBadge(run.status), reasons),
    [drawProgress(run), "num"], [drawChange(run.reward ?? []), "num change"],
    [drawChange([run.evaluation?.start, run.evaluation?.now]), "num change"], [formatCount(run.tokens), "num extra"],
    [formatUsd(run.usd), "num extra"], [formatAge(run.updated), "num muted extra"],
  ]);
}

function drawProgress({ step, steps }) {
  if (!Number.isFinite(steps)) return formatNumber(step);
  return h("div", `${step} / ${steps}`, h("progress", { max: steps, value: step, "aria-hidden": "true" }));
}
