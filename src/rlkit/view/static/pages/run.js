/** A run: where it started and is now, findings, curves, configuration. */
import { load } from "rlkit/api";
import { drawCurves } from "rlkit/curves";
import {
  apiPath, emptyNote, factList, fold, formatAge, formatCount, formatDuration, formatReward, formatUsd, h, joinIds, makeHash, makeRow, makeRunView,
  makeTable, replace, section, statusBadge, textBlock, textLine,
} from "rlkit/ui";

/** Show a run. */
export async function showRun([, id], query) {
  const metricsPath = `${apiPath("run", id)}/metrics`;
  let [run, metrics] = await Promise.all([load(apiPath("run", id)), load(metricsPath)]);
  const [head, findings, details] = [h("div"), h("div"), h("div")];
  const curves = drawCurves([{ run, metrics }], query);
  const draw = () => {
    replace(head, drawHead(run));
    replace(findings, drawFindings(run));
    replace(details, drawCheckpoints(run), drawConfig(run));
  };
  draw();
  const content = [head, findings, metrics.step.length ? curves.node : emptyNote("No step is complete yet."), details];
  const refresh = async (changed) => {
    run = changed;
    const latest = await load(metricsPath);
    draw();
    if (latest === metrics) return;
    const wasEmpty = !metrics.step.length;
    metrics = latest;
    curves.refresh([{ run, metrics }]);
    if (wasEmpty && metrics.step.length) findings.nextSibling.replaceWith(curves.node);
  };
  return makeRunView(run, "run", [], content, { watch: apiPath("run", id), refresh, requery: curves.requery, close: curves.close });
}

function drawHead(run) {
  const subject = [run.model, run.envs.join(", ")].filter(Boolean).join(" · ");
  return [
    h("div", { class: "run-head" },
      h("div", null, h("h1", null, textLine(run.name, 120), " ", statusBadge(run.status)), h("p", { class: "lead" }, textLine(subject)),
        run.reason && h("div", { class: run.status === "failed" || run.status === "dead" ? "error-block" : "lead" }, textBlock(run.reason, "plain"))),
      h("div", { class: "headlines" }, headline("Reward", run.reward), run.evaluation && headline(`Evaluation ${run.evaluation.metric.split("/").at(-1).replaceAll("_", " ")}`, [run.evaluation.start, run.evaluation.now]))),
    factList([
      ["Step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)], ["Best step", run.best_step], ["Tokens", formatCount(run.tokens)], ["Cost", formatUsd(run.usd)],
      ["Started", formatAge(run.started)], ["Duration", run.started && run.updated ? formatDuration(run.updated - run.started) : null],
      ["Tags", run.tags.join(", ")], ["Versions", Object.entries(run.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ")], ["Folder", run.path],
    ]),
  ];
}

function headline(label, pair) {
  if (!pair) return null;
  const [start, now] = pair;
  const tone = now > start ? "up" : now < start ? "down" : "";
  return h("div", { class: `headline ${tone}` }, h("div", { class: "label" }, label),
    h("div", { class: "big" }, h("span", { class: "from" }, formatReward(start)), h("span", { class: "arrow" }, " → "), formatReward(now)));
}

function drawFindings(run) {
  if (!run.findings?.length) return null;
  return section("Findings", null, h("ul", { class: "findings" }, run.findings.map((finding) => {
    const where = finding.last && finding.last !== finding.step ? `steps ${finding.step}–${finding.last}` : `step ${finding.step}`;
    const isRecorded = run.steps_recorded.includes(finding.step);
    return h("li", { dataset: { row: "" } },
      h("div", { class: "where" }, isRecorded ? h("a", { href: makeHash(["run", run.id, "step", String(finding.step)]) }, where) : where),
      h("div", null, h("strong", null, textLine(finding.name.replaceAll("_", " "))), finding.env && finding.env !== "all" && h("span", { class: "tag" }, textLine(finding.env)),
        textBlock(finding.text, "plain"), finding.action && h("div", { class: "sub" }, textBlock(finding.action, "plain"))));
  })));
}

function drawCheckpoints(run) {
  if (!run.checkpoints?.length) return null;
  const table = makeTable("Checkpoints", [["Step", "num"], "Path", "Expires"], run.checkpoints.toReversed().map(({ step, path, expires }) =>
    makeRow([[step === run.best_step ? h("b", { title: "best evaluation" }, `${step} best`) : String(step), "num"], [textLine(path), "mono"], expires ? new Date(expires * 1000).toISOString().slice(0, 16).replace("T", " ") : "never"])));
  return fold(`Checkpoints (${run.checkpoints.length})`, table.node);
}

function drawConfig(run) {
  if (!run.config?.length) return null;
  const rows = run.config.map(([key, value, origin]) => h("tr", { class: origin === "default" ? "default" : null },
    h("th", { scope: "row", class: "mono" }, textLine(key, 120)), h("td", { class: "mono" }, textBlock(value, "plain")), h("td", { class: "muted" }, textLine(origin ?? ""))));
  const table = makeTable("Configuration", ["Key", "Value", "Origin"], rows);
  table.node.classList.add("only-set");
  const filter = h("input", { type: "checkbox", onchange: () => table.node.classList.toggle("only-set") });
  const others = h("label", { class: "field check" }, filter, h("span", null, "Show defaults"));
  return section("Configuration", others, table.node, h("p", null, h("a", { href: makeHash([], { select: joinIds([run.id]) }) }, "Compare with other runs")));
}
