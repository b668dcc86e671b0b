/** The frame that all pages of a run share: tabs, breadcrumbs, title, the way up. */
import { loadAll } from "rlkit/api";
import { h, keepFocus, replace } from "rlkit/dom";
import { apiPath, runHash } from "rlkit/route";

/**
 * Return a view of a page inside a run.
 * tab: key of its tab. places: [label, ...path] from below the run to the page. content: nodes. others: more of the
 * view. The tabs follow the run. `refresh` of the others gets the data of their `watch`, or else the run. If they have
 * `paths` with their `data`, `update` gets what is loaded from the paths anew.
 */
export function makeRunView(run, tab, places, content, others = {}) {
  const crumbs = [[run.name], ...places].map(([label, ...path]) => [label, runHash(run.id, ...path)]);
  const title = crumbs.map(([label]) => label).reverse().join(", ");
  crumbs.unshift(["Runs", "#/"]);
  const tabs = drawTabs(run, tab);
  const node = h("div.page", tabs, content);
  const { paths = [], update } = others;
  let shown = others.data;
  const refresh = async (data) => {
    const latestTabs = drawTabs(data, tab);
    const isNew = data.steps_recorded && !tabs.isEqualNode(latestTabs);
    if (isNew) keepFocus(tabs, () => replace(tabs, ...latestTabs.children));
    others.refresh?.(data);
    const latest = await loadAll(...paths);
    if (latest.every((each, index) => each === shown[index])) return;
    shown = latest;
    keepFocus(node, () => update(...latest));
  };
  const watch = apiPath("run", run.id);
  return { title, node, crumbs, up: crumbs.at(-2)[1], watch, watched: run, ...others, refresh };
}

/** Return the place of a step or evaluation, for `makeRunView`. */
export const stepPlace = (kind, step) => [`${kind === "step" ? "Step" : "Evaluation"} ${step}`, kind, step];

function drawTabs(run, current) {
  const lastStep = run.steps_recorded?.at(-1);
  const tabs = [
    ["run", "Overview"], lastStep !== undefined && ["step", "Steps", "step", lastStep],
    lastStep !== undefined && ["tasks", "Tasks", "tasks"],
    run.evaluations?.length > 0 && ["evaluation", "Evaluations", "evaluations"],
    run.parts?.includes("discovery") && ["discovery", "Discovery", "discovery"],
  ].filter(Boolean);
  const links = tabs.map(([key, label, ...path]) => [key, label, runHash(run.id, ...path)]);
  return tabLinks("Pages of the run", links, current);
}

/** Return links that act as tabs; `tabs` are [key, label, href]. */
export function tabLinks(label, tabs, current) {
  const drawTab = ([key, text, href]) =>
    h("a", { href, dataset: { key }, "aria-current": key === current ? "page" : null }, text);
  return h("nav.tabs", { "aria-label": label }, tabs.map(drawTab));
}
