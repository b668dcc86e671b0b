/** The list of runs: what runs, how each went, and a choice of several to compare. */

import { load } from "rlkit/api";
import { debounce, h, replace } from "rlkit/dom";
import { formatAge, formatCount, formatNumber, formatReward, formatUsd, plural } from "rlkit/format";
import { emptyNote, field, selectBox, statusBadge } from "rlkit/parts";
import { makeHash, setQuery } from "rlkit/route";
import { growRows, makeRow, makeTable } from "rlkit/table";
import { textLine } from "rlkit/text";

const HEADS = ["", "Run", "Status", ["Step", "num"], ["Reward", "num"], ["Evaluation", "num"], ["Tokens", "num"], ["Cost", "num"], ["Updated", "num"]];

/** Show all runs of the folder. */
export async function showRuns(_parts, query) {
  const state = { runs: [], query, selected: new Set((query.select ?? "").split(",").filter(Boolean)), stop: () => {} };
  const table = makeTable("Runs", HEADS);
  const summary = h("p", { class: "lead", role: "status" });
  const compare = h("div", { class: "selection" });
  const search = h("input", { type: "search", placeholder: "name, model, environment, tag, status", value: query.q ?? "",
    oninput: debounce((event) => setQuery({ q: event.target.value }), 80) });
  const node = h("div", { class: "page" },
    h("div", { class: "page-head" }, h("div", null, h("h1", null, "Runs"), summary),
      h("div", { class: "toolbar" }, compare, field("Search", search),
        field("Sort", selectBox([["", "newest"], ["reward", "reward"], ["name", "name"], ["usd", "cost"]], query.sort ?? "", (sort) => setQuery({ sort }))))),
    table.node);
  const select = (run, isSelected) => {
    if (isSelected) state.selected.add(run.id);
    else state.selected.delete(run.id);
    setQuery({ select: [...state.selected].join(",") });
    drawSelection(compare, state.selected);
  };
  const draw = () => {
    state.stop();
    const runs = sortRuns(state.runs.filter(matcher(state.query.q)), state.query.sort);
    const live = state.runs.filter((run) => run.live).length;
    summary.replaceChildren(h("bdi", { class: "mono" }, state.folder), ` · ${plural(runs.length, "run")}${live ? `, ${live} live` : ""}`);
    state.stop = growRows(table.body, runs, (run) => drawRun(run, state.selected.has(run.id), select));
    if (!runs.length) table.body.append(h("tr", null, h("td", { colSpan: HEADS.length }, emptyNote(state.runs.length ? "No run matches." : "No runs in this folder yet."))));
    drawSelection(compare, state.selected);
  };
  const refresh = (data) => (Object.assign(state, data), draw());
  refresh(await load("runs"));
  const requery = (changed) => {
    const isNew = changed.q !== state.query.q || changed.sort !== state.query.sort;
    state.query = changed;
    if (isNew) draw();
  };
  return { title: "Runs", node, crumbs: [["Runs", "#/"]], watch: "runs", refresh, requery, close: () => state.stop() };
}

function matcher(query) {
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
  const href = makeHash(["compare", [...selected].join(",")]);
  replace(node, selected.size > 0 && h("span", { class: "muted" }, `${selected.size} selected`),
    selected.size > 1 && h("a", { class: "button primary", href }, "Compare"));
}

function drawRun(run, isSelected, select) {
  const check = h("input", { type: "checkbox", checked: isSelected, "aria-label": `Select ${run.name}`, onchange: (event) => select(run, event.target.checked) });
  const tags = run.tags.map((tag) => h("span", { class: "tag" }, textLine(tag, 30)));
  const name = h("div", null, h("a", { class: "row-link", href: makeHash(["run", run.id]) }, textLine(run.name, 80)),
    run.kind !== "rlkit" && h("span", { class: "tag" }, run.kind), tags,
    h("div", { class: "sub" }, textLine([run.model, run.envs.join(", ")].filter(Boolean).join(" · "), 120)));
  const status = h("div", null, statusBadge(run.status), run.reason && h("div", { class: "sub reason" }, textLine(run.reason, 120)));
  return makeRow([
    [check, "tick"], name, status, [progress(run), "num"], [startToNow(run.reward), "num"],
    [run.evaluation ? startToNow([run.evaluation.start, run.evaluation.now]) : "–", "num"],
    [formatCount(run.tokens), "num"], [formatUsd(run.usd), "num"], [formatAge(run.updated), "num muted"],
  ]);
}

function progress(run) {
  if (!run.steps) return formatNumber(run.step);
  const share = Math.min(1, run.step / run.steps);
  return h("div", null, `${run.step} / ${run.steps}`, h("div", { class: "bar", "aria-hidden": "true" }, h("div", { style: { width: `${100 * share}%` } })));
}

/** Return "0.64 → 1.00" with the newest value emphasised. */
export function startToNow(pair) {
  if (!pair) return "–";
  return h("span", { class: "change" }, h("span", { class: "muted" }, formatReward(pair[0])), " → ", h("b", null, formatReward(pair[1])));
}
