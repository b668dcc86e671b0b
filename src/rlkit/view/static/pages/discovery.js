/** A search for constructions: its records with drawings, and the tree of its states. */
import { drawImage } from "rlkit/chat";
import { lineageOf, statesPicture, valuesPicture } from "rlkit/plots";
import { apiPath, drawChart, emptyNote, factList, fold, formatNumber, h, headline, isKnown, loadPage, makeHeadedRow,
  makeRunView, makeTable, plural, replace, runHash, section, textBlock, textLine } from "rlkit/ui";

const MAX_STATES = 3000;
const DIGITS = 7;

export default async function showDiscovery([, id]) {
  const path = apiPath("run", id, "discovery");
  const page = await loadPage(id, {}, path);
  const body = h("div.stack");
  const articles = new Map(); // what a record says → its article, which stays as it was opened
  const draw = () => {
    const [{ searches }] = page.data;
    const sections = searches.map((search) => drawSearch(page.run, search, articles));
    replace(body, searches.length ? sections : emptyNote("No search is recorded."));
  };
  const content = [h("h1", "Discovery"), body];
  const refresh = (latest) => ((page.data = [latest]), draw());
  const following = { watch: path, watched: page.data[0], refresh };
  return makeRunView(page, "discovery", [["Discovery", "discovery"]], content, draw, following);
}

/** Return the chart of the best value after each step, or null if no record has a step. */
function drawProgress({ records, sign, symbol }, lastStep) {
  const datedRecords = records.filter(({ step }) => isKnown(step)).toSorted((a, b) => a.step - b.step);
  const bests = new Map();
  let best = -Infinity;
  for (const { step, value } of datedRecords) {
    best = Math.max(best, sign * value);
    bests.set(step, sign * best);
  }
  if (!bests.size) return null;
  if (lastStep > datedRecords.at(-1).step) bests.set(lastStep, sign * best);
  const series = [{ label: "", colour: "var(--c0)", values: [...bests.values()], isStepped: true }];
  return drawChart({ title: `${symbol}, record by step`, x: [...bests.keys()], series, height: 180, digits: DIGITS });
}

function drawSearch(run, search, articles) {
  const { env, problem, symbol, records, states, sign, known: knownResults } = search;
  const best = records.reduce((top, record) => (sign * record.value > sign * top.value ? record : top));
  const drawOnce = (record) => {
    const key = JSON.stringify([env, record]);
    if (!articles.has(key)) articles.set(key, drawRecord(run, env, symbol, record));
    articles.get(key).classList.toggle("best", record === best);
    return articles.get(key);
  };
  return section(textLine(env === problem ? env : `${env}: ${problem}`), null,
    headline(`Best ${symbol}, ${sign < 0 ? "small" : "large"} is good`, formatNumber(best.value, DIGITS)),
    factList([["Known", knownResults && textBlock(knownResults, "plain")], ["Records", String(records.length)],
      ["States", String(states.length)]]),
    drawProgress(search, run.step), h("h3", plural(records.length, "record")),
    h("div.records", records.toReversed().map(drawOnce)),
    states.length > 0 && drawStates(states, lineageOf(best.id, states), symbol));
}

function drawRecord(run, env, symbol, record) {
  const { step, task, parent, claim, program, values } = record;
  const title = `${symbol} = ${formatNumber(record.value, DIGITS)}`;
  const picture = record.picture
    ? h("div.construction", drawImage(record.picture))
    : valuesPicture(values, `Construction with ${title}`);
  const origin = [
    isKnown(step) && h("a", { href: runHash(run.id, "step", step) }, `step ${step}`),
    task && h("a", { href: runHash(run.id, "task", env, task) }, textLine(task, 40)),
    parent && h("span", "from ", textLine(parent, 40)),
  ].filter(Boolean);
  return h("article.record", { dataset: { row: "" }, tabIndex: -1 },
    h("header", h("h4", title), h("span.badge.good", "best"), record.polished && h("span.badge", "polished")),
    picture, h("p.sub", origin.map((part, index) => [index > 0 && " · ", part])),
    claim && h("div.sub", textBlock(claim, "plain", 400)),
    program && fold("Program", textBlock(program, "code")),
    values?.length > 0 && fold(plural(values.length, "value"), textBlock(JSON.stringify(values), "code", 4000)));
}

function drawStates(states, lineage, symbol) {
  const oldest = states.length - MAX_STATES;
  const shownStates = states.filter(({ id }, position) => position >= oldest || lineage.has(id));
  const cut = oldest > 0 ? `The newest ${MAX_STATES} of ${states.length} states. ` : "";
  const help = `${cut}Point at a state to see its value; the line of the best is emphasised.`;
  const rows = states.filter(({ id }) => lineage.has(id)).map(({ id, value, expansions, parent }) =>
    makeHeadedRow([textLine(id, 60), "mono"], [formatNumber(value, DIGITS), "num"], [expansions ?? "dropped", "num"],
      [textLine(parent ?? "seed", 60), "mono"]));
  const heads = ["State", [symbol, "num"], ["Expansions", "num"], "Parent"];
  return h("div", h("h3", "States"), h("p.lead", help),
    h("div.states-frame", statesPicture(shownStates, lineage)),
    fold(`Line of the best: ${plural(rows.length, "state")}`, makeTable("Line of the best state", heads, rows)));
}
