/** The frame that all pages of a run share: tabs, breadcrumbs, title, the way up. */
import { h } from "rlkit/dom";
import { makeHash } from "rlkit/route";

/**
 * Return a view of a page inside a run.
 * tab: key of its tab. places: [label, path] from below the run to the page. content: nodes. others: more of the view.
 */
export function makeRunView(run, tab, places, content, others = {}) {
  const hashes = [["Runs", "#/"], [run.name, makeHash(["run", run.id])], ...places.map(([label, path]) => [label, makeHash(["run", run.id, ...path])])];
  const node = h("div", { class: tab === "group" ? "page wide" : "page" }, drawTabs(run, tab === "group" ? "step" : tab), content);
  return { title: hashes.slice(1).map(([label]) => label).reverse().join(", "), node, crumbs: hashes, up: hashes.at(-2)[1], ...others };
}

/** Return the place of a step or evaluation, for `makeRunView`. */
export function stepPlace(kind, step) {
  return [`${kind === "step" ? "Step" : "Evaluation"} ${step}`, [kind, String(step)]];
}

function drawTabs(run, current) {
  const lastStep = run.steps_recorded?.at(-1);
  const tabs = [["run", "Overview"]];
  if (lastStep !== undefined) tabs.push(["step", "Steps", "step", String(lastStep)], ["tasks", "Tasks", "tasks"]);
  const evaluations = run.kind === "rlkit" ? ["evaluations"] : ["evaluation", String(run.evaluations?.at(-1))]; // others have no intervals
  if (run.evaluations?.length) tabs.push(["evaluation", "Evaluations", ...evaluations]);
  if (run.parts?.includes("discovery")) tabs.push(["discovery", "Discovery", "discovery"]);
  return tabLinks("Pages of the run", tabs.map(([key, label, ...path]) => [key, label, makeHash(["run", run.id, ...path])]), current);
}

/** Return links that act as tabs; `tabs` are [key, label, href]. */
export function tabLinks(label, tabs, current) {
  return h("nav", { class: "tabs", "aria-label": label }, tabs.map(([key, text, href]) => h("a", { href, "aria-current": key === current ? "page" : null }, text)));
}
