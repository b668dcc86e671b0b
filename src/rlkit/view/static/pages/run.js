/** A run: where it started and is now, findings, curves, configuration. */
import { makeCurves } from "rlkit/curves";
import { apiPath, checkField, drawChange, emptyNote, errorBlock, factList, fold, formatAge, formatCount,
  formatDuration, formatUsd, h, headline, isKnown, joinFacts, joinIds, keepFocus, loadPage, makeHash, makeHeadedRow,
  makeRow, makeRunView, makeTable, replace, runHash, section, statusBadge, textBlock, textLine } from "rlkit/ui";

export default async function showRun([, id], query) {
  const page = await loadPage(id, query, apiPath("run", id, "metrics"));
  const [head, findings, charts, checkpoints, config] = Array.from({ length: 5 }, () => h("div"));
  const curves = makeCurves();
  let shownSettings = null;
  const redraw = () => {
    const { run, data: [metrics] } = page;
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
  const draw = () => {
    curves.show([{ run: page.run, metrics: page.data[0] }], page.query);
    redraw();
  };
  const content = [head, findings, charts, h("div", checkpoints, config)];
  return makeRunView(page, "run", [], content, draw, { redraw });
}

function drawHead(run) {
  const { model, envs, name, status, reason, evaluation, step, steps, started, updated, tags, versions } = run;
  const isBad = status === "failed" || status === "killed";
  const score = evaluation?.metric.split("/").at(-1).replaceAll("_", " ");
  const releases = Object.entries(versions ?? {}).map((pair) => pair.join(" "));
  return [
    h("div.run-head",
      h("div", h("h1", textLine(name, 120), " ", statusBadge(status)),
        h("p.lead", textLine(joinFacts([model, envs.join(", ")]))),
        reason && h("div", { class: isBad ? "error-block" : "lead" }, textBlock(reason, "plain"))),
      h("div.headlines", run.reward && drawResult("Reward", run.reward),
        evaluation && drawResult(`Evaluation ${score}`, [evaluation.start, evaluation.now]))),
    errorBlock(run.damaged),
    factList([
      ["Step", steps ? `${step} of ${steps}` : String(step)], ["Best step", run.best_step],
      ["Tokens", formatCount(run.tokens)], ["Cost", formatUsd(run.usd)], ["Started", formatAge(started)],
      ["Duration", started && updated ? formatDuration(updated - started) : null],
      ["Tags", tags.join(", ")], ["Versions", releases.join(", ")], ["Folder", run.path],
    ]),
  ];
}

function drawResult(label, [start, now]) {
  const difference = isKnown(start) ? now - start : 0;
  const tone = difference > 0 ? "up" : difference < 0 ? "down" : "";
  return headline(textLine(label), drawChange([start, now]), tone);
}

function drawFindings(run) {
  if (!run.findings?.length) return null;
  const items = run.findings.map(({ step, last, name, env, text, action }) => {
    const place = last && last !== step ? `first at step ${step}, last at ${last}` : `step ${step}`;
    const isRecorded = run.steps_recorded.includes(step);
    return h("li", { dataset: { row: "" } },
      h("div.where", isRecorded ? h("a", { href: runHash(run.id, "step", step) }, place) : place),
      h("div", h("strong", textLine(name.replaceAll("_", " "))),
        env && env !== "all" && h("span.tag", textLine(env)),
        textBlock(text, "plain"), action && h("div.sub", textBlock(action, "plain"))));
  });
  return section("Findings", null, h("ul.findings", items));
}

function drawCheckpoints({ checkpoints, best_step: bestStep }, open = false) {
  if (!checkpoints?.length) return null;
  const rows = checkpoints.toReversed().map(({ step, path, expires }) => makeRow([
    [step === bestStep ? h("b", { title: "best evaluation" }, `${step} best`) : String(step), "num"],
    [textLine(path), "mono"], expires ? new Date(expires * 1000).toISOString().slice(0, 16).replace("T", " ") : "never",
  ]));
  const table = makeTable("Checkpoints", [["Step", "num"], "Path", "Expires"], rows);
  return fold(`Checkpoints (${rows.length})`, table, { open });
}

function drawConfig(run) {
  if (!run.config?.length) return null;
  const hasOrigins = run.config.some(([, , origin]) => origin); // records of other tools have none
  const rows = run.config.map(([key, value, origin]) => {
    const cells = [[textBlock(value, "plain"), "mono"], hasOrigins && [textLine(origin), "muted"]];
    const row = makeHeadedRow([textLine(key, 120), "mono"], ...cells.filter(Boolean));
    row.classList.toggle("default", origin === "default");
    return row;
  });
  const table = makeTable("Configuration", ["Key", "Value", ...(hasOrigins ? ["Origin"] : [])], rows);
  const box = hasOrigins && checkField("Show defaults", h("input", { type: "checkbox" })); // style.css hides them
  const link = h("a", { href: makeHash([], { select: joinIds([run.id]) }) }, "Compare with other runs");
  return section("Configuration", box, table, h("p", link));
}
