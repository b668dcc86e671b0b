/**
 * Build DOM nodes. Text always becomes a text node, so no text of a model is ever read as markup. No character of a
 * text is invisible, and none changes the direction of its surroundings.
 */
const SVG = "http://www.w3.org/2000/svg";
const PLAIN = /^[\t\n\x20-\x7e]*$/;

// Controls, soft hyphen, bidi marks and overrides, zero-width and tag characters, lone surrogates, floods of accents.
const INVISIBLE = new RegExp([
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180e]",
  "[\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0e\\ufeff\\uffa0\\ufff0-\\ufffb]",
  "[\\u{e0000}-\\u{e0fff}]|\\p{Cs}",
  "(?<=\\p{M}{8})\\p{M}",
].join("|"), "gu");

// Attributes that people see or hear.
const SPOKEN = new Set(["title", "aria-label", "alt"]);

/** Return text in which each invisible character is a mark such as ‹U+202E›. */
export function markInvisible(text) {
  const whole = String(text);
  return PLAIN.test(whole) ? whole : whole.replace(INVISIBLE, markCharacter);
}

const markCharacter = (char) => `‹U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;

/**
 * Return an element.
 * name: tag and classes, such as `p.lead`. content: props, if the first is a plain object, and children: nodes,
 * strings, numbers, arrays of these; null, undefined and false are ignored. props: `class`, `style` (an object, set
 * through the CSSOM), `dataset`, `on…` handlers, DOM properties or attributes.
 */
export const h = (name, ...content) => build(name, content, (tag) => document.createElement(tag));

/** Return an SVG element; arguments as for `h`. */
export const svg = (name, ...content) => build(name, content, (tag) => document.createElementNS(SVG, tag));

function build(name, content, create) {
  const [tag, ...classes] = name.split(".");
  const node = create(tag);
  const [props, children] = content[0]?.constructor === Object ? [content[0], content.slice(1)] : [{}, content];
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(props)) setProp(node, key, value);
  return append(node, children);
}

function setProp(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (SPOKEN.has(name)) node.setAttribute(name, markInvisible(value));
  else if (name === "class") node.setAttribute("class", value);
  else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
  else if (name === "dataset") Object.assign(node.dataset, value);
  else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name in node && node.namespaceURI !== SVG && name !== "list" && name !== "role") node[name] = value;
  else node.setAttribute(name, value === true ? "" : value);
}

function append(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : markInvisible(child));
  }
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

/**
 * Call `draw`, which replaces nodes within a node. What has the focus keeps it; a node with a key, a link, or a control
 * with a spoken label, gives it to its successor.
 */
export function keepFocus(node, draw) {
  const focused = document.activeElement;
  const name = ["data-key", "href"].find((attribute) => focused.hasAttribute(attribute)) ?? "aria-label";
  const key = node.contains(focused) ? focused.getAttribute(name) : null;
  draw();
  const successor = () => key && [...node.querySelectorAll(`[${name}]`)].find((one) => one.getAttribute(name) === key);
  const target = focused.isConnected ? focused : successor();
  target?.focus({ preventScroll: true });
}

/** Return a colour of CSS as the browser computes it in this theme, for canvases. */
export function computeColour(value) {
  const probe = h("i", { style: { color: value, display: "none" } });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
