/** The exact tokens of an episode, each a span whose class is its colour. Chunks off the screen are not laid out. */
import { drawImage } from "rlkit/chat";
import { formatNumber, formatSigned, h, isKnown, markInvisible, replace } from "rlkit/ui";

const CHUNK_TOKENS = 300;
const MAX_CHUNK_TOKENS = 1200;
const SURPRISE_NATS = [0.1, 0.5, 1, 2, 4];
const GAP_NATS = [0.01, 0.05, 0.2, 0.5];

/** What tokens can be coloured by: [key, label]. */
export const COLOURINGS = [["advantage", "Advantage"], ["logprob", "Log-probability"], ["gap", "Sampler–trainer gap"], ["mask", "Mask"], ["version", "Weights version"]];

/**
 * Return the tokens that a turn adds: its part of the prompt, then its reply. Each has id, piece, place
 * (prompt, sampled or forced), position in the reply and, where known, logprob, trainer, advantage.
 */
export function turnTokens(episode, index) {
  const turn = episode.turns[index];
  const tokens = [];
  const add = (id, facts) => tokens.push({ id, turn: index, count: 1, ...facts });
  for (const id of turn.prompt) {
    if (id === -1 && tokens.at(-1)?.id === -1) tokens.at(-1).count++;
    else add(id, { place: "prompt", position: -1 });
  }
  const isSampled = new Uint8Array(turn.completion.length);
  for (const [low, high] of turn.sampled) isSampled.fill(1, low, high);
  const columns = [turn.logprobs, turn.trainer_logprobs, turn.advantages].map((values) => alignValues(values, isSampled));
  turn.completion.forEach((id, position) => {
    const [logprob, trainer, advantage] = columns.map((values) => values[position] ?? null);
    add(id, { place: isSampled[position] ? "sampled" : "forced", position, logprob, trainer, advantage });
  });
  addPieces(tokens, episode);
  return tokens;
}

function alignValues(values, isSampled) {
  if (!values) return [];
  if (values.length === isSampled.length) return values;
  let next = 0;
  return Array.from(isSampled, (flag) => (flag ? values[next++] : null));
}

function addPieces(tokens, episode) {
  const special = new Set(episode.special);
  let openBytes = [];
  for (const token of tokens) {
    const piece = token.id === -1 ? `‹image${token.count > 1 ? ` × ${token.count}` : ""}›` : episode.pieces[token.id];
    token.isSpecial = special.has(token.id) || token.id === -1;
    token.piece = piece ?? `‹${token.id}›`;
    if (!Array.isArray(piece)) openBytes = [];
    if (!Array.isArray(piece)) continue;
    // Bytes of one character: the last token shows the character, the others a mark.
    token.piece = piece.map((byte) => `‹${byte.toString(16).padStart(2, "0")}›`).join("");
    openBytes.push(...piece);
    const character = decodeBytes(openBytes);
    if (character === null) continue;
    token.character = character;
    openBytes = [];
  }
}

function decodeBytes(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes));
  } catch {
    return null;
  }
}

/** Return the texts among the tokens of a turn that were put into its reply and not sampled. */
export function forcedTexts(tokens) {
  const texts = [];
  tokens.forEach(({ place, piece, character }, index) => {
    if (place !== "forced") return;
    if (index > 0 && tokens[index - 1].place === "forced") texts[texts.length - 1] += character ?? piece;
    else texts.push(character ?? piece);
  });
  return texts;
}

/** Draw the tokens of turns. turns: [{index, tokens, head}]; control: chooses the colouring. Return {node, colour(key)}. */
export function drawTokens(episode, turns, colouring, control) {
  const all = turns.flatMap(({ tokens }) => tokens);
  const spans = [];
  const details = h("div", { class: "token-details", role: "status" });
  const legend = h("div", { class: "token-legend" });
  const select = makeSelector(episode, all, spans, details);
  const drawTurn = ({ index, tokens, head }) => h("section", { class: "turn", id: `turn-${index}` }, head, (episode.turns[index].images ?? []).map(drawImage), drawChunks(tokens, spans));
  const point = ({ target }) => target.index !== undefined && select(target.index);
  const move = (event) => {
    const distance = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!distance) return;
    event.preventDefault();
    select(select.current + distance, true);
  };
  const label = "Tokens. The left and right arrow keys move.";
  const text = h("div", { class: "tokens", tabIndex: 0, role: "group", "aria-label": label, onmouseover: point, onclick: point, onkeydown: move }, turns.map(drawTurn));
  const colour = (key) => {
    const classOf = makeColouring(key, episode, all);
    all.forEach((token, index) => (spans[index].className = token.isSpecial ? `${classOf(token)} special` : classOf(token)));
    replace(legend, legendEntries(key, episode, all));
  };
  colour(colouring);
  replace(details, h("span", { class: "muted" }, "Point at a token, or focus the text and press ← or →."));
  return { node: [h("div", { class: "token-bar" }, h("div", { class: "toolbar" }, control, legend), details), text], colour };
}

function drawChunks(tokens, spans) {
  const chunks = [];
  let [chunk, size] = [null, 0];
  for (const token of tokens) {
    chunk ??= chunks[chunks.push(h("div", { class: "chunk" })) - 1];
    const span = document.createElement("span");
    span.index = spans.push(span) - 1;
    span.textContent = visiblePiece(token);
    chunk.append(span);
    size++;
    if ((size >= CHUNK_TOKENS && token.piece.endsWith("\n")) || size >= MAX_CHUNK_TOKENS) [chunk, size] = [null, 0];
  }
  return chunks;
}

function visiblePiece({ piece, character }) {
  const text = character ?? piece;
  return markInvisible(text.length > 400 ? `${text.slice(0, 400)}…` : text).replaceAll("\n", "↵\n").replaceAll("\t", "→\t") || "‹empty›";
}

function makeSelector(episode, tokens, spans, details) {
  let active = null;
  const select = (index, isKey = false) => {
    const bounded = Math.max(0, Math.min(tokens.length - 1, index));
    if (!tokens.length || bounded === select.current) return;
    active?.classList.remove("active");
    select.current = bounded;
    active = spans[bounded];
    active.classList.add("active");
    if (isKey) active.scrollIntoView({ block: "nearest" });
    replace(details, tokenFacts(episode, tokens[bounded]));
  };
  select.current = -1;
  return select;
}

function tokenFacts(episode, token) {
  const { id, piece, character, place, position, logprob, trainer, advantage } = token;
  const { version, datum } = episode.turns[token.turn];
  const fact = (term, value) => isKnown(value) && h("span", null, h("span", { class: "muted" }, term), " ", h("b", null, value));
  return [
    h("code", { class: "piece" }, markInvisible(JSON.stringify(piece).slice(0, 80))), character && fact("character", markInvisible(character)), fact("id", id === -1 ? "image" : id), fact("", place),
    isKnown(logprob) && [fact("log p", formatNumber(logprob, 4)), fact("p", formatNumber(Math.exp(logprob), 4))],
    isKnown(trainer) && [fact("trainer", formatNumber(trainer, 4)), fact("gap", formatSigned(logprob - trainer, 4))],
    fact("advantage", isKnown(advantage) ? formatSigned(advantage, 3) : null), fact("turn", `${token.turn + 1}${position >= 0 ? `, token ${position}` : ""}`), fact("version", version), fact("datum", datum),
  ];
}

/** Return a function from a token to the class of its colour. */
function makeColouring(key, episode, tokens) {
  const largest = largestAdvantage(tokens);
  const bucketOf = (value, bounds) => bounds.reduce((bucket, bound) => bucket + (Math.abs(value) >= bound), 0);
  const signedClass = (value, bucket) => (bucket === 0 ? "zero" : `${value < 0 ? "n" : "p"}${bucket}`);
  const versions = versionList(episode);
  const classes = {
    advantage: ({ advantage }) => (isKnown(advantage) ? signedClass(advantage, Math.ceil(Math.abs(advantage / largest) * 4 - 1e-6)) : "zero"),
    logprob: ({ logprob }) => (isKnown(logprob) ? `s${bucketOf(logprob, SURPRISE_NATS)}` : "zero"),
    gap: ({ logprob, trainer }) => (isKnown(logprob) && isKnown(trainer) ? signedClass(logprob - trainer, bucketOf(logprob - trainer, GAP_NATS)) : "zero"),
    mask: ({ advantage }) => (isKnown(advantage) ? "p2" : "n2"),
    version: ({ turn }) => `v${versions.indexOf(episode.turns[turn].version) % 6}`,
  };
  return (token) => (token.place === "sampled" ? classes[key](token) : token.place);
}

function largestAdvantage(tokens) {
  return tokens.reduce((most, { advantage }) => Math.max(most, Math.abs(advantage ?? 0)), 0) || 1;
}

function versionList(episode) {
  return [...new Set(episode.turns.map((turn) => turn.version))].sort((a, b) => a - b);
}

function legendEntries(key, episode, tokens) {
  const entry = (kind, label) => h("span", { class: "key" }, h("i", { class: `swatch ${kind}` }), label);
  const scale = (kinds, low, high) => h("span", { class: "scale" }, low, h("span", { class: "steps", "aria-hidden": "true" }, kinds.map((kind) => h("i", { class: `swatch ${kind}` }))), high);
  const diverging = ["n4", "n3", "n2", "n1", "zero", "p1", "p2", "p3", "p4"];
  const largest = largestAdvantage(tokens).toFixed(2);
  const source = { gap: "trainer", mask: "advantage" }[key] ?? key;
  const note = key !== "version" && !tokens.some((token) => isKnown(token[source])) && h("span", { class: "warn" }, key === "mask" ? "no token is trained on" : "not recorded for this episode");
  const scales = {
    advantage: () => scale(diverging, `−${largest}`, `+${largest}`),
    logprob: () => scale(["s0", "s1", "s2", "s3", "s4", "s5"], "likely, above −0.1", "unlikely, below −4 nats"),
    gap: () => scale(diverging, "trainer likelier, −0.5 nats", "sampler likelier, +0.5 nats"),
    mask: () => [entry("p2", "trained on"), entry("n2", "sampled, not trained on")],
    version: () => versionList(episode).slice(0, 12).map((version, index) => entry(`v${index % 6}`, `version ${version}`)),
  };
  return [note || scales[key](), entry("prompt", "prompt"), tokens.some(({ place }) => place === "forced") && entry("forced", "forced")];
}
