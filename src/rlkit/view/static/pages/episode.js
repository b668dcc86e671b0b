/** An episode: its conversation, its exact tokens, its files, and the renderer of its environment. */

import { load } from "rlkit/api";
import { drawImage, drawMessages } from "rlkit/chat";
import { h, replace } from "rlkit/dom";
import { drawFiles } from "rlkit/files";
import { formatCount, formatDuration, formatReward } from "rlkit/format";
import { drawFrame } from "rlkit/frame";
import { runTabs } from "rlkit/pages/run";
import { emptyNote, errorBlock, factList, field, metricFacts, runCrumbs, selectBox, statusBadge, tabLinks } from "rlkit/parts";
import { apiPath, makeHash, setQuery } from "rlkit/route";
import { textLine } from "rlkit/text";
import { COLOURINGS, drawTokens, forcedTexts, turnTokens } from "rlkit/tokens";
import { drawTree } from "rlkit/tree";

/** Show an episode. */
export async function showEpisode([, id, kind, step, , position, member, attempt], query) {
  const path = apiPath("run", id, kind, step, "episode", position, member, attempt);
  const [run, episode] = await Promise.all([load(apiPath("run", id)), load(path)]);
  const at = (place, changed) => place && makeHash(["run", id, kind, step, "episode", ...place.map(String)], changed);
  const here = [position, member, attempt];
  const context = { run, episode, path, at: (changed) => at(here, changed), turns: episode.turns.map((_, index) => turnTokens(episode, index)), close: () => {}, tokens: null };
  const body = h("div", { class: "episode-body" });
  const tabs = h("div", { class: "episode-tabs" });
  const draw = (state) => drawView(context, state, tabs, body);
  draw(query);
  const groupHash = makeHash(["run", id, kind, step, "group", position]);
  const stepHash = makeHash(["run", id, kind, step]);
  const title = `Member ${member}${attempt === "0" ? "" : `, attempt ${Number(attempt) + 1}`}`;
  const crumbs = runCrumbs(run, [`${kind === "step" ? "Step" : "Evaluation"} ${step}`, stepHash], [`Group ${position}`, groupHash], [title, at(here)]);
  const keep = { view: query.view, colour: query.colour };
  const node = h("div", { class: "page" }, runTabs(run, kind === "step" ? "step" : "evaluations"), drawHead(run, episode, title), tabs, body);
  return {
    title: `${title}, group ${position}, ${kind} ${step}`, node, crumbs, up: groupHash, previous: at(episode.neighbours.previous, keep), next: at(episode.neighbours.next, keep),
    requery: draw, opened: () => scrollToTurn(query.turn), close: () => context.close(),
  };
}

function drawHead(run, episode, title) {
  const info = Object.fromEntries(Object.entries(episode.info ?? {}).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]));
  const sampled = episode.turns.reduce((sum, { sampled: ranges }) => sum + ranges.reduce((part, [low, high]) => part + high - low, 0), 0);
  const task = makeHash(["run", run.id, "task", episode.env, episode.task]);
  return h("div", { class: "page-head" },
    h("div", null, h("h1", null, textLine(episode.task, 120), " ", statusBadge(episode.status)),
      h("p", { class: "lead" }, `${title} · `, textLine(episode.env), " · ", h("a", { href: task }, "this task across steps"))),
    h("div", { class: "headline" }, h("div", { class: "label" }, "Reward"), h("div", { class: "big" }, formatReward(episode.reward))),
    factList([["Sampled tokens", formatCount(sampled)], ["Seconds", episode.seconds === null ? null : formatDuration(episode.seconds)], ["Group taught", episode.kind === "step" ? (episode.taught ? "yes" : `no${episode.reason ? `: ${episode.reason}` : ""}`) : null],
      ["Estimator", episode.estimator], ["Baseline", episode.baseline === null ? null : formatReward(episode.baseline)], ["Draw", episode.draw === null ? null : String(episode.draw)]]),
    metricFacts({ ...episode.metrics, ...info }), errorBlock(episode.error));
}

function drawView(context, query, tabs, body) {
  const { episode, at } = context;
  const choices = [["chat", "Chat"], ["tokens", "Rendered tokens"]];
  if (episode.files?.length) choices.push(["files", `Files (${episode.files.length})`]);
  if (episode.view) choices.push(["env", "Environment's view"]);
  const view = choices.some(([key]) => key === query.view) ? query.view : "chat";
  if (view === context.view && view === "tokens") return void context.tokens.colour(colouringOf(query));
  replace(tabs, tabLinks("Views of the episode", choices.map(([key, label]) => [key, label, at({ ...query, view: key === "chat" ? null : key })]), view));
  context.close();
  context.close = () => {};
  context.view = view;
  const hasTree = (view === "chat" || view === "tokens") && episode.turns.length > 1;
  const tree = hasTree && drawTree(episode, (turn) => at({ ...query, turn }), Number(query.turn ?? -1));
  tree && tree.addEventListener("click", (event) => followTurn(event, episode));
  body.classList.toggle("with-tree", hasTree);
  replace(body, tree, h("div", { class: "episode-view" }, { chat: drawChat, tokens: drawRendered, files: () => drawFiles(context.path, episode.files), env: drawEnvView }[view](context, query)));
}

function followTurn(event, episode) {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  const index = [...event.currentTarget.querySelectorAll("a")].indexOf(link);
  const turn = link.getAttribute("href").match(/[?&]turn=(\d+)/)?.[1] ?? String(Math.min(index, episode.turns.length - 1));
  setQuery({ turn });
  for (const other of event.currentTarget.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
  link.setAttribute("aria-current", "true");
  scrollToTurn(turn);
}

function scrollToTurn(turn) {
  if (turn !== undefined) document.getElementById(`turn-${turn}`)?.scrollIntoView({ block: "start" });
}

function colouringOf(query) {
  return COLOURINGS.some(([key]) => key === query.colour) ? query.colour : "advantage";
}

function turnHead({ episode }, index) {
  const turn = episode.turns[index];
  const isBranch = turn.parent !== null && turn.parent !== undefined && turn.parent !== index - 1;
  const facts = [isBranch && `continues turn ${turn.parent + 1}`, (turn.parent === null || turn.parent === undefined) && index > 0 && "new segment", `${formatCount(turn.completion.length)} tokens`,
    turn.version !== null && `weights version ${turn.version}`, turn.datum !== null && turn.datum !== undefined && `datum ${turn.datum}`, turn.stop && `stop: ${turn.stop}`, turn.reward !== null && turn.reward !== undefined && `reward ${formatReward(turn.reward)}`, turn.seconds && formatDuration(turn.seconds)];
  return h("header", { class: "turn-head" }, h("h3", null, `Turn ${index + 1}`), h("span", { class: "muted" }, facts.filter(Boolean).join(" · ")));
}

function drawChat(context) {
  const { episode } = context;
  if (!episode.turns.length) return emptyNote("No turn is recorded.");
  return episode.turns.map((turn, index) => {
    const forced = forcedTexts(episode, index);
    return h("section", { class: "turn", id: `turn-${index}`, "aria-label": `Turn ${index + 1}` }, turnHead(context, index),
      turn.images?.length > 0 && !turn.messages.some(({ content }) => Array.isArray(content)) && turn.images.map(drawImage),
      drawMessages(turn.messages, { forced }), forced.length > 0 && h("p", { class: "sub" }, "Forced, not sampled: ", forced.map((text) => [h("mark", { class: "forced" }, textLine(text, 80)), " "])));
  });
}

function drawRendered(context, query) {
  const turns = context.turns.map((tokens, index) => ({ index, tokens, head: turnHead(context, index) }));
  context.tokens = drawTokens(context.episode, turns, colouringOf(query));
  const choice = selectBox(COLOURINGS, colouringOf(query), (colour) => setQuery({ colour }));
  return [h("div", { class: "toolbar" }, field("Colour by", choice)), context.tokens.node];
}

function drawEnvView(context) {
  const frame = drawFrame(context.episode.view, context.episode);
  context.close = frame.close;
  return frame.node;
}
