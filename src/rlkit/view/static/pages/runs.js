/** The list of runs: what runs, how each went, and a choice of several to compare. */
import { load } from "rlkit/api";
import {
  choiceControl, formatAge, formatCount, formatNumber, formatReward, formatUsd, growRows, h, joinIds, makeHash, makeRow, makeTable, markInvisible, plural, replace,
  setQuery, splitIds, statusBadge, textControl, textLine,
} from "rlkit/ui";

const HEADS = ["", "Run", "Status", ["Step", "num"], ["Reward", "num"], ["Evaluation", "num"], ["Tokens", "num extra"], ["Cost", "num extra"], ["Updated", "num extra"]];
const SORTS = [["", "newest"], ["reward", "reward"], ["name", "name"], ["usd", "cost"]];

/** Show all runs of the folder. */
export async function showRuns(_parts, query) {
  const state = { ...(await load("runs")), query, selected: new Set(splitIds(query.select ?? "")), stop: () => {} };
  const table = makeTable("Runs", HEADS);
  const summary = h("p", { class: "lead", role: "status" });
  const selection = h("div", { class: "selection" });
  const select = (run, isSelected) => {
    if (isSelected) state.selected.add(run.id);
    else state.selected.delete(run.id);
    setQuery({ select: joinIds(state.selected) });
    drawSelection(selection, state.selected);
  };
  const draw = () => {
    state.stop();
    const runs = sortRuns(state.runs.filter(makeMatcher(state.query.q)), state.query.sort);
    const live = state.runs.filter((run) => run.live).length;
    replace(summary, h("bdi", { class: "mono" }, state.folder), ` · ${plural(runs.length, "run")}${live ? `, ${live} live` : ""}`);
    state.stop = growRows(table.body, runs, (run) => drawRun(run, state.selected.has(run.id), select), state.runs.length ? "No run matches." : "No runs in this folder yet.");
    drawSelection(selection, state.selected);
  };
  draw();
  const controls = [textControl("Search", "q", query, { placeholder: "name, model, tag, status" }), choiceControl("Sort", "sort", SORTS, query)];
  const node = h("div", { class: "page" },
    h("div", { class: "page-head" }, h("div", null, h("h1", null, "Runs"), summary), h("div", { class: "toolbar" }, selection, controls)), table.node);
  const requery = (changed) => {
    const isNew = changed.q !== state.query.q || changed.sort !== state.query.sort;
    state.query = changed;
    if (isNew) draw();
  };
  return { title: "Runs", node, crumbs: [["Runs", "#/"]], watch: "runs", refresh: (data) => (Object.assign(state, data), draw()), requery, close: () => state.stop() };
}

function makeMatcher(query) {
  const words = (query ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  return (run) => {
    const text = [run.name, run.id, run.model, run.status, run.kind, run.reason, ...run.envs, ...run.tags].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
}

function sortRuns(runs, sort) {
  const key = { reward: (run) => run.reward?.[1] ?? -Infinity, usd: (run) => run.usd ?? -Infinity }[sort];
  if (key) return runs.toSorted((a, b) => key(b) - key(a));
  return sort === "name" ? runs.toSorted((a, b) => a.name.localeCompare(b.name)) : runs;
}

function drawSelection(node, selected) {
  const href = makeHash(["compare", joinIds(selected)]);
  replace(node, selected.size > 0 && h("span", { class: "muted" }, `${selected.size} selected`), selected.size > 1 && h("a", { class: "button primary", href }, "Compare"));
}

function drawRun(run, isSelected, select) {
  const check = h("input", { type: "checkbox", checked: isSelected, "aria-label": `Select ${markInvisible(run.name)}`, onchange: (event) => select(run, event.target.checked) });
  const tags = [run.kind !== "rlkit" && run.kind, ...run.tags].filter(Boolean).map((tag) => h("span", { class: "tag" }, textLine(tag, 30)));
  return makeRow([
    [check, "tick"],
    h("div", null, h("a", { class: "row-link", href: makeHash(["run", run.id]) }, textLine(run.name, 80)), tags,
      h("div", { class: "sub" }, textLine([run.model, run.envs.join(", ")].filter(Boolean).join(" · "), 120))),
    h("div", { class: "status-cell" }, statusBadge(run.status), run.reason && h("div", { class: "sub reason" }, textLine(run.reason, 120))),
    [drawProgress(run), "num"], [startToNow(run.reward), "num"], [startToNow(run.evaluation && [run.evaluation.start, run.evaluation.now]), "num"],
    [formatCount(run.tokens), "num extra"], [formatUsd(run.usd), "num extra"], [formatAge(run.updated), "num muted extra"],
  ]);
}

function drawProgress(run) {
  if (!run.steps) return formatNumber(run.step);
  const width = `${100 * Math.min(1, run.step / run.steps)}%`;
  return h("div", null, `${run.step} / ${run.steps}`, h("div", { class: "bar", "aria-hidden": "true" }, h("div", { style: { width } })));
}

/** Return "0.64 → 1.00" with the newest value emphasised. */
export function startToNow(pair) {
  return pair ? h("span", { class: "change" }, h("span", { class: "muted" }, formatReward(pair[0])), " → ", h("b", null, formatReward(pair[1]))) : "–";
}
