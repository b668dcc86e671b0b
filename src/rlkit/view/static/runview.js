/** The frame that all pages of a run share: tabs, breadcrumbs, title, the way up. */
import { loadAll } from "rlkit/api";
import { h, keepFocus, replace } from "rlkit/dom";
import { apiPath, runHash } from "rlkit/route";

/** Return {run, data, query, paths} of a page inside a run: its state, with the data of the paths. */
export async function loadPage(id, query, ...paths) {
  const [run, ...data] = await loadAll(apiPath("run", id), ...paths);
  return { run, data, query, paths };
}

/**
 * Return a view of a page inside a run.
 * page: its state, which is kept up to date. tab: key of its tab. places: [label, ...path] from below the run to the
 * page. content: nodes that draw(view) fills, now and for other data or another query. others: more of the view, and
 * redraw(view) for a run that has changed.
 */
export function makeRunView(page, tab, places, content, draw, { redraw, ...others } = {}) {
  const { run } = page;
  const crumbs = [[run.name], ...places].map(([label, ...path]) => [label, runHash(run.id, ...path)]);
  const title = crumbs.map(([label]) => label).reverse().join(", ");
  crumbs.unshift(["Runs", "#/"]);
  const tabs = drawTabs(run, tab);
  const node = h("div.page", tabs, content);
  const watch = apiPath("run", run.id);
  const view = { title, node, crumbs, up: crumbs.at(-2)[1], watch, watched: run };
  view.requery = (query) => ((page.query = query), draw(view));
  view.refresh = async (latestRun) => {
    page.run = latestRun;
    const latestTabs = drawTabs(latestRun, tab);
    if (!tabs.isEqualNode(latestTabs)) keepFocus(tabs, () => replace(tabs, ...latestTabs.children));
    redraw?.(view);
    const latest = await loadAll(...page.paths);
    if (latest.every((each, index) => each === page.data[index])) return;
    page.data = latest;
    keepFocus(node, () => draw(view));
  };
  draw(view);
  redraw?.(view);
  return Object.assign(view, others);
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
