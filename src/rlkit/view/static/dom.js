/** Build DOM nodes. Text always becomes a text node, so no text of a model is ever read as markup. */
const SVG = "http://www.w3.org/2000/svg";

/**
 * Return an element.
 * props: `class`, `style` (an object, set through the CSSOM), `dataset`, `on…` handlers, DOM properties
 * or attributes. children: nodes, strings, numbers, arrays of these; null, undefined and false are ignored.
 */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Return an SVG element; arguments as for `h`. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) setProp(node, name, value);
  return append(node, children);
}

function setProp(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "class") node.setAttribute("class", value);
  else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
  else if (name === "dataset") Object.assign(node.dataset, value);
  else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name in node && node.namespaceURI !== SVG && name !== "list" && name !== "role") node[name] = value;
  else node.setAttribute(name, value === true ? "" : value);
}

function append(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replace the children of a node. */
export function replace(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

/** Return a function that calls `action` once, `delay_ms` after its last call. */
export function debounce(action, delay_ms) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), delay_ms);
  };
}

/** Return a colour of the theme as the browser computes it, for canvases. */
export function themeColour(name) {
  const probe = h("i", { style: { color: `var(--${name})`, display: "none" } });
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
