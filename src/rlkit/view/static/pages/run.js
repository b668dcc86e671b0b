/** A run: where it started and is now, findings, curves, configuration. */
import { load } from "rlkit/api";
import { drawCurves } from "rlkit/curves";
import { apiPath, emptyNote, factList, fold, formatAge, formatCount, formatDuration, formatReward, formatUsd, h,
  joinIds, keepFocus, makeHash, makeRow, makeRunView, makeTable, replace, section, statusBadge, textBlock,
  textLine } from "rlkit/ui";

/** Show a run. */
export async function showRun([, id], query) {
  const [path, metricsPath] = [apiPath("run", id), apiPath("run", id, "metrics")];
  let [run, metrics] = await Promise.all([load(path), load(metricsPath)]);
  const [head, findings, charts, checkpoints, config] = Array.from({ length: 5 }, () => h("div"));
  const curves = drawCurves([{ run, metrics }], query);
  let shownSettings = null;
  const draw = () => {
    replace(head, drawHead(run));
    keepFocus(findings, () => replace(findings, drawFindings(run)));
    if (!metrics.step.length) replace(charts, emptyNote("No step is complete yet."));
    else if (!curves.node.isConnected) replace(charts, curves.node);
    const isOpen = checkpoints.querySelector("details")?.open;
    replace(checkpoints, drawCheckpoints(run, isOpen));
    const settings = JSON.stringify(run.config);
    if (settings !== shownSettings) replace(config, drawConfig(run));
    shownSettings = settings;
  };
  draw();
  const refresh = async (changed) => {
    const latest = await load(metricsPath);
    const isNew = latest !== metrics;
    [run, metrics] = [changed, latest];
    draw();
    if (isNew) curves.refresh([{ run, metrics }]);
  };
  const { requery, close } = curves;
  const content = [head, findings, charts, h("div", null, checkpoints, config)];
  return makeRunView(run, "run", [], content, { refresh, requery, close });
}

function drawHead(run) {
  const { model, envs, name, status, reason, evaluation, step, steps, started, updated, tags, versions } = run;
  const isBad = status === "failed" || status === "dead";
  const score = evaluation?.metric.split("/").at(-1).replaceAll("_", " ");
  const releases = Object.entries(versions ?? {}).map((pair) => pair.join(" "));
  return [
    h("div", { class: "run-head" },
      h("div", null, h("h1", null, textLine(name, 120), " ", statusBadge(status)),
        h("p", { class: "lead" }, textLine([model, envs.join(", ")].filter(Boolean).join(" · "))),
        reason && h("div", { class: isBad ? "error-block" : "lead" }, textBlock(reason, "plain"))),
      h("div", { class: "headlines" }, run.reward && headline("Reward", run.reward),
        evaluation && headline(`Evaluation ${score}`, [evaluation.start, evaluation.now]))),
    factList([
      ["Step", steps ? `${step} of ${steps}` : String(step)], ["Best step", run.best_step],
      ["Tokens", formatCount(run.tokens)], ["Cost", formatUsd(run.usd)], ["Started", formatAge(started)],
      ["Duration", started && updated ? formatDuration(updated - started) : null],
      ["Tags", tags.join(", ")], ["Versions", releases.join(", ")], ["Folder", run.path],
    ]),
  ];
}

function headline(label, [start, now]) {
  const tone = now > start ? "up" : now < start ? "down" : "";
  return h("div", { class: `headline ${tone}` }, h("div", { class: "label" }, textLine(label)),
    h("div", { class: "big" },
      h("span", { class: "from" }, formatReward(start)), h("span", { class: "arrow" }, " → "), formatReward(now)));
}

function drawFindings(run) {
  if (!run.findings?.length) return null;
  const items = run.findings.map(({ step, last, name, env, text, action }) => {
    const place = last && last !== step ? `steps ${step}–${last}` : `step ${step}`;
    const isRecorded = run.steps_recorded.includes(step);
    return h("li", { dataset: { row: "" } },
      h("div", { class: "where" },
        isRecorded ? h("a", { href: makeHash(["run", run.id, "step", String(step)]) }, place) : place),
      h("div", null, h("strong", null, textLine(name.replaceAll("_", " "))),
        env && env !== "all" && h("span", { class: "tag" }, textLine(env)),
        textBlock(text, "plain"), action && h("div", { class: "sub" }, textBlock(action, "plain"))));
  });
  return section("Findings", null, h("ul", { class: "findings" }, items));
}

function drawCheckpoints({ checkpoints, best_step: bestStep }, open = false) {
  if (!checkpoints?.length) return null;
  const rows = checkpoints.toReversed().map(({ step, path, expires }) => makeRow([
    [step === bestStep ? h("b", { title: "best evaluation" }, `${step} best`) : String(step), "num"],
    [textLine(path), "mono"], expires ? new Date(expires * 1000).toISOString().slice(0, 16).replace("T", " ") : "never",
  ]));
  const table = makeTable("Checkpoints", [["Step", "num"], "Path", "Expires"], rows);
  return fold(`Checkpoints (${rows.length})`, table.node, { open });
}

function drawConfig(run) {
  if (!run.config?.length) return null;
  const rows = run.config.map(([key, value, origin]) => h("tr", { class: origin === "default" ? "default" : null },
    h("th", { scope: "row", class: "mono" }, textLine(key, 120)),
    h("td", { class: "mono" }, textBlock(value, "plain")), h("td", { class: "muted" }, textLine(origin ?? ""))));
  const table = makeTable("Configuration", ["Key", "Value", "Origin"], rows);
  table.node.classList.add("only-set");
  const box = h("input", { type: "checkbox", onchange: () => table.node.classList.toggle("only-set") });
  const switchDefaults = h("label", { class: "field check" }, box, h("span", null, "Show defaults"));
  const link = h("a", { href: makeHash([], { select: joinIds([run.id]) }) }, "Compare with other runs");
  return section("Configuration", switchDefaults, table.node, h("p", null, link));
}
