/** A search for constructions: its records with drawings, and the states of its archive. */
import { load } from "rlkit/api";
import { drawChart } from "rlkit/chart";
import { drawImage } from "rlkit/chat";
import { bestLineage, statesPicture, valuesPicture } from "rlkit/plots";
import {
  apiPath, emptyNote, factList, fold, formatNumber, h, isKnown, makeHash, makeRunView, makeTable, plural, replace, section, textBlock,
  textLine,
} from "rlkit/ui";

const MAX_STATES = 3000;

/** Show the searches of a run. */
export async function showDiscovery([, id]) {
  const path = `${apiPath("run", id)}/discovery`;
  const [run, data] = await Promise.all([load(apiPath("run", id)), load(path)]);
  const body = h("div", { class: "stack" });
  let charts = [];
  const close = () => charts.forEach((chart) => chart.close());
  const draw = ({ searches }) => {
    close();
    charts = [];
    replace(body, searches.length ? searches.map((search) => drawSearch(run, search, charts)) : emptyNote("No search is recorded."));
  };
  draw(data);
  return makeRunView(run, "discovery", [["Discovery", ["discovery"]]], [h("h1", null, "Discovery"), body], { watch: path, refresh: draw, close });
}

function drawSearch(run, search, charts) {
  const { records, states, symbol, sign, known: knownValue } = search;
  const best = records.reduce((top, record) => (!top || sign * record.value > sign * top.value ? record : top), null);
  const datedRecords = records.filter(({ step }) => isKnown(step));
  if (datedRecords.length > 1) charts.push(drawChart({ title: `${symbol}, record by step`, x: datedRecords.map(({ step }) => step), series: [{ label: "", colour: "c0", values: datedRecords.map(({ value }) => value) }], height: 180 }));
  const chart = datedRecords.length > 1 ? charts.at(-1).node : null;
  return section(search.env === search.problem ? search.env : `${search.env}: ${search.problem}`, null,
    best && h("div", { class: "headlines" }, h("div", { class: "headline" }, h("div", { class: "label" }, `Best ${symbol}, ${sign < 0 ? "small" : "large"} is good`), h("div", { class: "big" }, formatNumber(best.value, 7)))),
    factList([["Known", knownValue], ["Records", String(records.length)], ["States", String(states.length)]]), chart,
    h("h3", null, plural(records.length, "record")), records.length > 0 ? h("div", { class: "records" }, records.toReversed().map((record) => drawRecord(run, search, record, record === best))) : emptyNote("No construction is valid yet."),
    states.length > 0 && drawStates(search));
}

function drawRecord(run, { symbol, env }, record, isBest) {
  const label = `Construction with ${symbol} ${formatNumber(record.value, 7)}`;
  const picture = record.picture ? h("div", { class: "construction" }, drawImage(record.picture)) : valuesPicture(record.values, label);
  const origin = [
    isKnown(record.step) && h("a", { href: makeHash(["run", run.id, "step", String(record.step)]) }, `step ${record.step}`),
    record.task && h("a", { href: makeHash(["run", run.id, "task", env, record.task]) }, textLine(record.task, 40)), record.parent && h("span", null, "from ", textLine(record.parent, 40)),
  ];
  return h("article", { class: `record${isBest ? " best" : ""}`, dataset: { row: "" }, tabIndex: -1 },
    h("header", null, h("h4", null, `${symbol} = ${formatNumber(record.value, 7)}`), isBest && h("span", { class: "badge good" }, "best"), record.polished && h("span", { class: "badge" }, "polished")),
    picture, h("p", { class: "sub" }, origin.filter(Boolean).map((part, index) => [index > 0 && " · ", part])),
    record.claim && h("div", { class: "sub" }, textBlock(`The program claims ${record.claim}`, "plain", 400)),
    record.program && fold("Program", textBlock(record.program, "code")), record.values?.length > 0 && fold(plural(record.values.length, "value"), textBlock(JSON.stringify(record.values), "code", 4000)));
}

function drawStates({ states, sign, symbol }) {
  const chosenStates = chooseStates(states, sign);
  const facts = h("p", { class: "lead", role: "status" }, chosenStates.length < states.length ? `The newest ${chosenStates.length} of ${states.length} states.` : "Point at a state to see its value; the line of the best is emphasised.");
  const showState = (state) => replace(facts, `State ${state.id}: ${symbol} = ${formatNumber(state.value, 7)}, ${plural(state.expansions, "expansion")}, `, state.parent ? `from ${state.parent}` : "a seed");
  const index = new Map(states.map(({ id }, position) => [id, position]));
  const best = bestLineage(states, sign, index);
  const lineage = states.filter(({ id }) => best.has(id));
  const rows = lineage.map((state) => h("tr", null, h("th", { scope: "row", class: "mono" }, textLine(state.id, 60)), h("td", { class: "num" }, formatNumber(state.value, 7)), h("td", { class: "num" }, state.expansions), h("td", { class: "mono" }, textLine(state.parent ?? "seed", 60))));
  return h("div", null, h("h3", null, "States"), facts, h("div", { class: "states-frame" }, statesPicture(chosenStates, sign, showState)),
    fold(`Line of the best: ${plural(lineage.length, "state")}`, makeTable("Line of the best state", ["State", [symbol, "num"], ["Expansions", "num"], "Parent"], rows).node));
}

function chooseStates(states, sign) {
  if (states.length <= MAX_STATES) return states;
  const lineage = bestLineage(states, sign, new Map(states.map(({ id }, position) => [id, position])));
  return states.filter((state, position) => position >= states.length - MAX_STATES || lineage.has(state.id));
}
