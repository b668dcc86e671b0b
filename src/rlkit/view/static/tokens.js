/** The exact tokens of an episode, each a span whose class is its colour. Chunks off the screen are not laid out. */
import { drawImage } from "rlkit/chat";
import { choiceControl, formatNumber, formatSigned, h, isKnown, joinFacts, joinRuns, markInvisible, replace,
  swatch } from "rlkit/ui";

const IMAGE = -1; // the id of a place of an image
const [CHUNK_TOKENS, MAX_CHUNK_TOKENS] = [300, 1200];
const MAX_PIECE_CHARS = 400;
const SURPRISE_NATS = [0.1, 0.5, 1, 2, 4];
const GAP_NATS = [0.01, 0.05, 0.2, 0.5];
const SURPRISES = ["s0", "s1", "s2", "s3", "s4", "s5"];
const DIVERGING = ["n4", "n3", "n2", "n1", "zero", "p1", "p2", "p3", "p4"];
const SPAN = document.createElement("span");
const HINT = "Point at a token, or focus the text and press ← or →.";

/** What tokens can be coloured by: [key, label]. */
export const COLOURINGS = [
  ["advantage", "Advantage"], ["logprob", "Log-probability"], ["gap", "Sampler–trainer gap"], ["mask", "Mask"],
  ["version", "Weights version"],
];

/**
 * Return the tokens that a turn adds: its part of the prompt, then its reply. Each has id, piece, the text that ends
 * with it, place (prompt, sampled or forced), position in the reply and, where known, logprob, trainer, gap, advantage.
 */
function turnTokens(episode, turn) {
  const { prompt, completion, sampled, logprobs, trainer_logprobs: trainers, advantages } = episode.turns[turn];
  const tokens = [];
  for (const id of prompt) {
    if (id === IMAGE && tokens.at(-1)?.id === IMAGE) tokens.at(-1).count++;
    else tokens.push({ id, turn, count: 1, place: "prompt", position: -1 });
  }
  const isSampled = new Uint8Array(completion.length);
  for (const [start, end] of sampled) isSampled.fill(1, start, end);
  completion.forEach((id, position) => {
    const place = isSampled[position] ? "sampled" : "forced";
    const logprob = isSampled[position] ? (logprobs?.[position] ?? null) : null; // 0 is recorded for forced tokens
    const [trainer, advantage] = [trainers?.[position] ?? null, advantages?.[position] ?? null];
    const gap = logprob !== null && trainer !== null ? logprob - trainer : null;
    tokens.push({ id, turn, count: 1, place, position, logprob, trainer, gap, advantage });
  });
  addTexts(tokens, episode);
  return tokens;
}

function addTexts(tokens, { pieces, special }) {
  const [specials, decoder, shown] = [new Set([...special, IMAGE]), new TextDecoder(), new Map()];
  let isOpen = false; // a character may lack its end
  for (const token of tokens) {
    const piece = pieces[token.id] ?? nameToken(token);
    const isBytes = Array.isArray(piece);
    if (isOpen && !isBytes) decoder.decode(); // forgets it
    isOpen = isBytes;
    // Bytes of a character: the last token has the character as its text, the others have none.
    token.text = isBytes ? decoder.decode(Uint8Array.from(piece), { stream: true }).replaceAll("\ufffd", "") : piece;
    token.piece = isBytes ? piece.map((byte) => `‹${byte.toString(16).padStart(2, "0")}›`).join("") : piece;
    token.isSpecial = specials.has(token.id);
    const whole = token.text || token.piece;
    if (!shown.has(whole)) shown.set(whole, showText(whole)); // most pieces occur often
    token.shown = shown.get(whole);
  }
}

const nameToken = ({ id, count }) => id === IMAGE ? `‹image${count > 1 ? ` × ${count}` : ""}›` : `‹${id}›`;

/** Return the text of the reply of a turn as [text, isForced] runs; none if all of it was sampled. */
export function replyRuns(episode, turn) {
  const { completion, sampled } = episode.turns[turn];
  const [start, end] = sampled[0] ?? [0, 0];
  const tokens = end - start === completion.length ? [] : turnTokens(episode, turn);
  const reply = tokens.filter(({ place }) => place !== "prompt");
  return joinRuns(reply.map(({ text, place }) => [text, place === "forced"]));
}

/** Draw the tokens of all turns, each below its head; return {node, colour(key)}. */
export function drawTokens(episode, drawHead, colouring) {
  const turns = episode.turns.map((_, turn) => turnTokens(episode, turn));
  const tokens = turns.flat();
  const spans = tokens.map(drawSpan);
  const legend = h("div.token-legend");
  const details = h("div.token-details", { role: "status" }, h("span.muted", HINT));
  let current = -1;
  const select = (index) => {
    const bounded = Math.max(0, Math.min(tokens.length - 1, index));
    if (!tokens.length || bounded === current) return;
    spans[current]?.classList.remove("active");
    spans[bounded].classList.add("active");
    current = bounded;
    replace(details, tokenFacts(episode, tokens[current]));
  };
  const colour = (key) => {
    const { classOf, entries } = makeColouring(key, episode, tokens);
    tokens.forEach((token, index) => (spans[index].className = classOf(token)));
    spans[current]?.classList.add("active");
    replace(legend, entries);
  };
  colour(colouring);
  let next = 0;
  const drawTurn = ({ length }, turn) => h("section.turn", { id: `turn-${turn}` }, drawHead(episode, turn),
    (episode.turns[turn].images ?? []).map(drawImage), drawChunks(tokens, spans, next, (next += length)));
  const onmouseover = ({ target }) => target.parentNode.className === "chunk" && select(spans.indexOf(target));
  const onkeydown = (event) => {
    const distance = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!distance) return;
    event.preventDefault();
    select(current + distance);
    spans[current]?.scrollIntoView({ block: "nearest" });
  };
  const label = "Tokens. The left and right arrow keys move.";
  const props = { class: "tokens", tabIndex: 0, role: "group", "aria-label": label };
  const text = h("div", { ...props, onmouseover, onclick: onmouseover, onkeydown }, turns.map(drawTurn));
  const control = choiceControl("Colour by", "colour", COLOURINGS, { colour: colouring });
  const bar = h("div.token-bar", h("div.toolbar", control, legend), details);
  return { node: [bar, text], colour };
}

function showText(whole) {
  const short = whole.length > MAX_PIECE_CHARS ? `${whole.slice(0, MAX_PIECE_CHARS)}…` : whole;
  return markInvisible(short.replaceAll("\n", "↵\n").replaceAll("\t", "→\t") || "‹empty›");
}

function drawSpan({ shown }) {
  const span = SPAN.cloneNode(); // faster than h()
  span.textContent = shown;
  return span;
}

/** Return the spans of tokens in chunks, which end with a line if they can. */
function drawChunks(tokens, spans, start, end) {
  const chunks = [];
  for (let [first, last] = [start, start + 1]; first < end; last++) {
    const isFull = last - first >= CHUNK_TOKENS && tokens[last - 1].piece.endsWith("\n");
    if (last < end && last - first < MAX_CHUNK_TOKENS && !isFull) continue;
    const chunk = h("div.chunk");
    for (let index = first; index < last; index++) chunk.appendChild(spans[index]); // faster than append(...)
    chunks.push(chunk);
    first = last;
  }
  return chunks;
}

function tokenFacts(episode, { id, turn, piece, text, place, position, logprob, trainer, gap, advantage }) {
  const { version, datum, demonstration } = episode.turns[turn];
  const origin = demonstration && place === "sampled" ? "demonstration: given, not sampled" : place;
  const facts = [
    ["character", text && text !== piece ? text : null], ["id", id === IMAGE ? "image" : id], ["", origin],
    ["log p", logprob, formatNumber(logprob, 4)], ["p", logprob, formatNumber(Math.exp(logprob), 4)],
    ["trainer", trainer, formatNumber(trainer, 4)], ["gap", gap, formatSigned(gap, 4)],
    ["advantage", advantage, formatSigned(advantage, 3)],
    ["turn", joinFacts([String(turn + 1), position >= 0 && `token ${position}`], ", ")],
    ["version", version], ["datum", datum],
  ].filter(([, value]) => isKnown(value));
  return [h("code.piece", JSON.stringify(piece).slice(0, 80)), facts.map(([term, value, shown = value]) =>
    h("span", h("span.muted", term), " ", h("b", shown)))];
}

/** Return {classOf(token), entries} of a colouring; entries: of its legend. */
function makeColouring(key, { turns }, tokens) {
  const most = tokens.reduce((size, { advantage }) => Math.max(size, Math.abs(advantage ?? 0)), 0) || 1;
  const versions = [...new Set(turns.map(({ version }) => version))].sort((a, b) => a - b);
  const versionClass = (version) => `v${versions.indexOf(version) % 6}`;
  const isRecorded = turns.some(({ advantages }) => advantages);
  const { needs = key, colourOf, scale, missing = "zero" } = {
    advantage: {
      colourOf: ({ advantage }) => signedClass(advantage, Math.ceil((4 * Math.abs(advantage)) / most - 1e-6)),
      scale: drawScale(DIVERGING, `−${most.toFixed(2)}`, `+${most.toFixed(2)}`),
    },
    logprob: {
      colourOf: ({ logprob }) => `s${countReached(logprob, SURPRISE_NATS)}`,
      scale: drawScale(SURPRISES, "likely, above −0.1", "unlikely, below −4 nats"),
    },
    gap: {
      colourOf: ({ gap }) => signedClass(gap, countReached(gap, GAP_NATS)),
      scale: drawScale(DIVERGING, "trainer likelier, −0.5 nats", "sampler likelier, +0.5 nats"),
    },
    mask: {
      needs: "advantage", colourOf: () => "p2", missing: "n2",
      scale: [drawKey("p2", "trained on"), drawKey("n2", "sampled, not trained on")],
    },
    version: {
      needs: "turn", colourOf: ({ turn }) => versionClass(turns[turn].version),
      scale: versions.slice(0, 12).map((version) => drawKey(versionClass(version), `version ${version}`)),
    },
  }[key];
  const classOf = (token) => {
    const kind = token.place !== "sampled" ? token.place : isKnown(token[needs]) ? colourOf(token) : missing;
    return token.isSpecial ? `${kind} special` : kind;
  };
  const hasForced = tokens.some(({ place }) => place === "forced");
  const note = isRecorded ? "no token is trained on" : "not recorded for this episode";
  const first = tokens.some((token) => isKnown(token[needs])) ? scale : h("span.warn", note);
  return { classOf, entries: [first, drawKey("prompt", "prompt"), hasForced && drawKey("forced", "forced")] };
}

const signedClass = (value, bucket) => bucket === 0 ? "zero" : `${value < 0 ? "n" : "p"}${bucket}`;

const countReached = (value, bounds) => bounds.filter((bound) => Math.abs(value) >= bound).length;

const drawKey = (kind, label) => h("span.key", swatch(null, kind), label);

function drawScale(kinds, low, high) {
  const steps = kinds.map((kind) => swatch(null, kind));
  return h("span.scale", low, h("span.steps", { "aria-hidden": "true" }, steps), high);
}
