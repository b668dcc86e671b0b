/** Show texts of models: blocks that are cut where they are long, and short lines. */
import { h, replace } from "rlkit/dom";

const LIMIT_CHARS = 50_000;
const LINE_LIMIT_CHARS = 4_000;
const LONG_LINE = new RegExp(`^[^\\n]{${LINE_LIMIT_CHARS + 1}}`, "m");

/** Return a block element with the text; long texts and long lines are cut, with a button that shows all. */
export function textBlock(text, kind = "prose", limit = LIMIT_CHARS) {
  const whole = String(text ?? "");
  const end = cutPosition(whole, limit);
  const block = h("div", { class: `text ${kind}`, dir: "auto" }, cutText(whole, end));
  const onclick = () => replace(block, whole);
  const label = `Show all ${whole.length.toLocaleString("en")} characters`;
  if (end < whole.length) block.append(h("button.more", { type: "button", onclick }, label));
  return block;
}

/** Return a short inline element with the first `limit` characters of a text. */
export function textLine(text, limit = 200) {
  const whole = String(text ?? "");
  const isLong = whole.length > limit;
  const short = isLong ? `${cutText(whole, limit)}…` : whole;
  return h("bdi", { title: isLong ? cutText(whole, 2000) : null }, short.replace(/\s+/g, " "));
}

function cutPosition(text, limit) {
  const start = text.slice(0, limit).search(LONG_LINE);
  return Math.min(text.length, limit, start < 0 ? Infinity : start + LINE_LIMIT_CHARS);
}

/** Return the start of a text, which never ends within a character. */
const cutText = (text, end) => text.slice(0, end).replace(/[\ud800-\udbff]$/, "");

/** Return [text, flag] pairs, with the texts of neighbours of the same flag joined. */
export function joinRuns(pairs) {
  const runs = [];
  for (const [text, flag] of pairs) {
    if (runs.at(-1)?.[1] === flag) runs.at(-1)[0] += text;
    else runs.push([text, flag]);
  }
  return runs;
}
