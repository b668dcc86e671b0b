/** Show text of models. No character is invisible, none changes the direction of its surroundings. */
import { h } from "rlkit/dom";

const LIMIT_CHARS = 50_000;
const LINE_LIMIT_CHARS = 4_000;

// Controls, soft hyphen, bidi marks and overrides, zero-width and tag characters, lone surrogates.
const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}/gu;

/** Return text in which each invisible character is a mark such as ‹U+202E›. */
export function markInvisible(text) {
  return String(text).replace(INVISIBLE, (char) => `‹U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
}

/** Return a block element with the text; long texts and long lines are cut, with a button that shows all. */
export function textBlock(text, kind = "prose", limit = LIMIT_CHARS) {
  const whole = String(text ?? "");
  const block = h("div", { class: `text ${kind}`, dir: "auto" });
  const end = cutPosition(whole, limit);
  const showAll = () => block.replaceChildren(markInvisible(whole));
  const button = h("button", { class: "more", type: "button", onclick: showAll }, `Show all ${whole.length.toLocaleString("en")} characters`);
  block.append(markInvisible(cutText(whole, end)), ...(end < whole.length ? [button] : []));
  return block;
}

/** Return a short inline element with the first `limit` characters of a text. */
export function textLine(text, limit = 200) {
  const whole = String(text ?? "");
  const short = whole.length > limit ? `${cutText(whole, limit)}…` : whole;
  return h("bdi", { title: whole.length > limit ? markInvisible(cutText(whole, 2000)) : null }, markInvisible(short.replace(/\s+/g, " ")));
}

function cutPosition(text, limit) {
  let start = 0;
  while (start < Math.min(text.length, limit)) {
    let end = text.indexOf("\n", start);
    if (end < 0) end = text.length;
    if (end - start > LINE_LIMIT_CHARS) return Math.min(limit, start + LINE_LIMIT_CHARS);
    start = end + 1;
  }
  return Math.min(text.length, limit);
}

/** Return the start of a text, which never ends within a character. */
function cutText(text, end) {
  return text.slice(0, end).replace(/[\ud800-\udbff]$/, "");
}
