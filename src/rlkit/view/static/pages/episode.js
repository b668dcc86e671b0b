/** An episode: its conversation, its exact tokens, its files, and the renderer of its environment. */
import { drawImage, drawMessages } from "rlkit/chat";
import { drawFiles } from "rlkit/files";
import { drawFrame } from "rlkit/frame";
import { COLOURINGS, drawTokens, replyRuns } from "rlkit/tokens";
import { drawTree } from "rlkit/tree";
import { apiPath, emptyNote, errorBlock, factList, formatCount, formatDuration, formatReward, formatTokens, h,
  headline, isKnown, joinFacts, loadPage, makeHash, makeRunView, memberName, metricFacts, pageHead, replace, setQuery,
  statusBadge, stepPlace, tabLinks, taskLead, textLine, trainingFacts } from "rlkit/ui";

export default async function showEpisode([, id, kind, step, , ...place], query) {
  const path = apiPath("run", id, kind, step, "episode", ...place);
  const page = await loadPage(id, query, path);
  let shown = {};
  const at = (other, changed) => other && makeHash(["run", id, kind, step, "episode", ...other], changed);
  const [head, tabs, body] = [h("div"), h("div"), h("div.episode-body")];
  const draw = () => {
    const { query: state, data: [episode] } = page;
    const views = listViews(episode, path);
    const [view, , drawView] = views.find(([key]) => key === state.view) ?? views[0];
    if (episode !== shown.episode) replace(head, drawHead(id, episode, title));
    else if (view === shown.view) return shown.colour?.(colouringOf(state));
    const hrefOf = (changes) => at(place, { ...page.query, ...changes });
    const links = views.map(([key, label]) => [key, label, hrefOf({ view: key === "chat" ? null : key })]);
    replace(tabs, tabLinks("Views of the episode", links, view));
    shown = { episode, view, ...drawView(state) };
    const hasTree = (view === "chat" || view === "tokens") && episode.turns.length > 1;
    body.classList.toggle("with-tree", hasTree);
    const goTo = (turn) => (setQuery({ turn }), scrollToTurn(turn));
    replace(body, hasTree && drawTree(episode, (turn) => hrefOf({ turn }), goTo), h("div", shown.node));
  };
  const [position, member, attempt] = place.map(Number);
  const title = memberName({ member, attempt });
  const group = [`Group ${position}`, kind, step, "group", position];
  const places = [stepPlace(kind, step), group, [title, kind, step, "episode", ...place]];
  const { previous, next } = page.data[0].neighbours;
  const kept = { view: query.view, colour: query.colour };
  const others = { previous: at(previous, kept), next: at(next, kept), opened: () => scrollToTurn(query.turn) };
  return makeRunView(page, kind, places, [head, tabs, body], draw, others);
}

/** Return the views: [key, label, function that returns {node}, with colour(key) if it has colours]. */
function listViews(episode, path) {
  const { turns, files, view } = episode;
  const hasTokens = turns.some(({ prompt, completion }) => prompt.length + completion.length);
  return [
    ["chat", "Chat", () => ({ node: drawChat(episode) })],
    hasTokens && ["tokens", "Rendered tokens", (query) => drawTokens(episode, drawTurnHead, colouringOf(query))],
    files?.length && ["files", `Files (${files.length})`, () => ({ node: drawFiles(path, files) })],
    view && ["env", "Environment's view", () => ({ node: drawFrame(view, episode) })],
  ].filter(Boolean);
}

function drawHead(id, episode, title) {
  const { task, status, reward, seconds, masked, kind, metrics, info, error } = episode;
  const ranges = episode.turns.flatMap(({ sampled, demonstration }) => demonstration ? [] : sampled);
  const sampled = ranges.reduce((sum, [start, end]) => sum + end - start, 0);
  const lead = h("p.lead", `${title} · `, taskLead(id, episode));
  return pageHead([textLine(task, 120), " ", statusBadge(status)], lead,
    headline("Reward", formatReward(reward)),
    factList([
      ["Sampled tokens", sampled ? formatCount(sampled) : null],
      ["Duration", isKnown(seconds) ? formatDuration(seconds) : null],
      ...trainingFacts(episode, kind === "step"), ["Masked", masked ? "yes" : null],
    ]),
    metricFacts({ ...metrics, ...info, view: undefined }), errorBlock(error));
}

const scrollToTurn = (turn) => document.getElementById(`turn-${turn}`)?.scrollIntoView({ block: "start" });

const colouringOf = ({ colour }) => COLOURINGS.some(([key]) => key === colour) ? colour : "advantage";

function drawTurnHead(episode, index) {
  const { parent, completion, version, datum, stop, reward, seconds, demonstration } = episode.turns[index];
  const facts = joinFacts([
    isKnown(parent) && parent !== index - 1 && `continues turn ${parent + 1}`,
    !isKnown(parent) && index > 0 && "new segment", completion.length > 0 && formatTokens(completion.length),
    demonstration && "demonstration: given, not sampled",
    isKnown(version) && `weights version ${version}`, isKnown(datum) && `datum ${datum}`, stop && `stop: ${stop}`,
    isKnown(reward) && `reward ${formatReward(reward)}`, isKnown(seconds) && formatDuration(seconds),
  ]);
  return h("header.turn-head", h("h3", `Turn ${index + 1}`), h("span.muted", facts));
}

function drawChat(episode) {
  if (!episode.turns.length) return emptyNote("No turn is recorded.");
  return episode.turns.map(({ messages, images }, index) => {
    const runs = replyRuns(episode, index);
    const forced = runs.filter(([, isForced]) => isForced).map(([text]) => text);
    const isTextOnly = !messages.some(({ content }) => Array.isArray(content));
    const marks = forced.map((text) => [h("mark.forced", textLine(text, 80)), " "]);
    return h("section.turn", { id: `turn-${index}`, "aria-label": `Turn ${index + 1}` },
      drawTurnHead(episode, index), isTextOnly && (images ?? []).map(drawImage),
      drawMessages(messages, { replies: { [index]: runs } }),
      forced.length > 0 && h("p.sub", "Forced, not sampled: ", marks));
  });
}
