/** An episode: its conversation, its exact tokens, its files, and the renderer of its environment. */
import { load } from "rlkit/api";
import { drawImage, drawMessages } from "rlkit/chat";
import { drawFiles } from "rlkit/files";
import { drawFrame } from "rlkit/frame";
import { COLOURINGS, drawTokens, forcedTexts, turnTokens } from "rlkit/tokens";
import { drawTree } from "rlkit/tree";
import {
  apiPath, choiceControl, emptyNote, errorBlock, factList, formatCount, formatDuration, formatReward, h, isKnown, makeHash, makeRunView,
  metricFacts, replace, setQuery, statusBadge, stepPlace, tabLinks, textLine,
} from "rlkit/ui";

/** Show an episode. */
export async function showEpisode([, id, kind, step, , ...place], query) {
  const path = apiPath("run", id, kind, step, "episode", ...place);
  const [run, episode] = await Promise.all([load(apiPath("run", id)), load(path)]);
  const at = (other, changed) => other && makeHash(["run", id, kind, step, "episode", ...other.map(String)], changed);
  const context = { episode, path, at: (changed) => at(place, changed), turns: episode.turns.map((_, index) => turnTokens(episode, index)), close: () => {} };
  const [tabs, body] = [h("div"), h("div", { class: "episode-body" })];
  const draw = (state) => drawView(context, state, tabs, body);
  draw(query);
  const [position, member, attempt] = place;
  const title = `Member ${member}${attempt === "0" ? "" : `, attempt ${Number(attempt) + 1}`}`;
  const places = [stepPlace(kind, step), [`Group ${position}`, [kind, step, "group", position]], [title, [kind, step, "episode", ...place]]];
  const viewQuery = { view: query.view, colour: query.colour };
  const [previous, next] = [at(episode.neighbours.previous, viewQuery), at(episode.neighbours.next, viewQuery)];
  return makeRunView(run, kind, places, [drawHead(run, episode, title), tabs, body], { previous, next, requery: draw, opened: () => scrollToTurn(query.turn), close: () => context.close() });
}

function drawHead(run, episode, title) {
  const sampled = episode.turns.reduce((sum, { sampled: ranges }) => sum + ranges.reduce((part, [low, high]) => part + high - low, 0), 0);
  const task = makeHash(["run", run.id, "task", episode.env, episode.task]);
  const taught = episode.taught ? "yes" : `no${episode.reason ? `: ${episode.reason}` : ""}`;
  return h("div", { class: "page-head" },
    h("div", null, h("h1", null, textLine(episode.task, 120), " ", statusBadge(episode.status)),
      h("p", { class: "lead" }, `${title} · `, textLine(episode.env), " · ", h("a", { href: task }, "this task across steps"))),
    h("div", { class: "headline" }, h("div", { class: "label" }, "Reward"), h("div", { class: "big" }, formatReward(episode.reward))),
    factList([["Sampled tokens", sampled ? formatCount(sampled) : null], ["Duration", isKnown(episode.seconds) ? formatDuration(episode.seconds) : null], ["Group taught", episode.kind === "step" ? taught : null],
      ["Estimator", episode.estimator], ["Baseline", isKnown(episode.baseline) ? formatReward(episode.baseline) : null], ["Draw", episode.draw], ["Masked", episode.masked ? "yes" : null]]),
    metricFacts({ ...episode.metrics, ...episode.info, view: undefined }), errorBlock(episode.error));
}

function drawView(context, query, tabs, body) {
  const { episode, at } = context;
  const choices = [["chat", "Chat"], ["tokens", "Rendered tokens"], episode.files?.length && ["files", `Files (${episode.files.length})`], episode.view && ["env", "Environment's view"]].filter(Boolean);
  const view = choices.some(([key]) => key === query.view) ? query.view : "chat";
  if (view === context.view) return view === "tokens" && context.tokens.colour(colouringOf(query));
  replace(tabs, tabLinks("Views of the episode", choices.map(([key, label]) => [key, label, at({ ...query, view: key === "chat" ? null : key })]), view));
  context.close();
  Object.assign(context, { view, close: () => {} });
  const hasTree = (view === "chat" || view === "tokens") && episode.turns.length > 1;
  const goTo = (turn) => (setQuery({ turn }), scrollToTurn(turn));
  body.classList.toggle("with-tree", hasTree);
  const draw = { chat: drawChat, tokens: drawRendered, files: () => drawFiles(context.path, episode.files), env: drawEnvView }[view];
  replace(body, hasTree && drawTree(episode, (turn) => at({ ...query, turn }), goTo), h("div", null, draw(context, query)));
}

function scrollToTurn(turn) {
  if (isKnown(turn)) document.getElementById(`turn-${turn}`)?.scrollIntoView({ block: "start" });
}

function colouringOf(query) {
  return COLOURINGS.some(([key]) => key === query.colour) ? query.colour : "advantage";
}

function turnHead(episode, index) {
  const { parent, completion, version, datum, stop, reward, seconds } = episode.turns[index];
  const facts = [
    isKnown(parent) && parent !== index - 1 && `continues turn ${parent + 1}`, !isKnown(parent) && index > 0 && "new segment", completion.length > 0 && `${formatCount(completion.length)} tokens`, isKnown(version) && `weights version ${version}`,
    isKnown(datum) && `datum ${datum}`, stop && `stop: ${stop}`, isKnown(reward) && `reward ${formatReward(reward)}`, isKnown(seconds) && formatDuration(seconds),
  ];
  return h("header", { class: "turn-head" }, h("h3", null, `Turn ${index + 1}`), h("span", { class: "muted" }, facts.filter(Boolean).join(" · ")));
}

function drawChat({ episode, turns }) {
  if (!episode.turns.length) return emptyNote("No turn is recorded.");
  return episode.turns.map((turn, index) => {
    const forced = forcedTexts(turns[index]);
    const isTextOnly = !turn.messages.some(({ content }) => Array.isArray(content));
    return h("section", { class: "turn", id: `turn-${index}`, "aria-label": `Turn ${index + 1}` }, turnHead(episode, index), isTextOnly && (turn.images ?? []).map(drawImage), drawMessages(turn.messages, { forced }),
      forced.length > 0 && h("p", { class: "sub" }, "Forced, not sampled: ", forced.map((text) => [h("mark", { class: "forced" }, textLine(text, 80)), " "])));
  });
}

function drawRendered(context, query) {
  const turns = context.turns.map((tokens, index) => ({ index, tokens, head: turnHead(context.episode, index) }));
  const control = choiceControl("Colour by", "colour", COLOURINGS, { colour: colouringOf(query) });
  context.tokens = drawTokens(context.episode, turns, colouringOf(query), control);
  return context.tokens.node;
}

function drawEnvView(context) {
  const frame = drawFrame(context.episode.view, context.episode);
  context.close = frame.close;
  return frame.node;
}
