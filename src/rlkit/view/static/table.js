/** Long lists: rows are drawn when they come near the screen. */
import { h } from "rlkit/dom";

const ROWS_AT_ONCE = 50;

/** Return a table in a frame that scrolls sideways; `heads` are labels, or [label, class]. */
export function makeTable(label, heads, rows = []) {
  const cells = heads.map((head) => {
    const [text, kind] = Array.isArray(head) ? head : [head, null];
    return text ? h("th", { scope: "col", class: kind }, text) : h("td", { class: kind });
  });
  const table = h("table", h("caption.hidden", label), h("thead", h("tr", cells)), h("tbody", rows));
  return h("div.table-frame", { tabIndex: 0, role: "region", "aria-label": label }, table);
}

/**
 * Return {node, show(items, emptyText)}: a table as of `makeTable`. `show` draws as many rows as it had, and others
 * when the end comes into view.
 */
export function makeList(label, heads, drawRow) {
  const node = makeTable(label, heads);
  const body = node.querySelector("tbody");
  const sentinel = h("tr.sentinel", { "aria-hidden": "true" });
  let rest = [];
  const drawMore = (count) => {
    sentinel.before(...rest.slice(0, count).map((item) => drawRow(item)));
    rest = rest.slice(count);
    observer.unobserve(sentinel);
    if (rest.length) observer.observe(sentinel);
    else sentinel.remove();
  };
  const look = (entries) => entries.some((entry) => entry.isIntersecting) && drawMore(ROWS_AT_ONCE);
  const observer = new IntersectionObserver(look, { rootMargin: "800px" });
  const show = (items, emptyText) => {
    const count = Math.max(ROWS_AT_ONCE, body.rows.length);
    rest = items;
    body.replaceChildren(sentinel);
    drawMore(count);
    if (!items.length) body.append(h("tr", h("td.empty", { colSpan: 20 }, emptyText)));
  };
  return { node, show };
}

/** Return a row of cells: contents, or [content, class]. The keys j, k and Enter use the first link in it. */
export const makeRow = (cells) => h("tr", { dataset: { row: "" } }, cells.map(drawCell));

/** Return a row whose first cell is its head. */
export const makeHeadedRow = ([head, kind], ...cells) =>
  h("tr", h("th", { scope: "row", class: kind }, head), cells.map(drawCell));

function drawCell(cell) {
  const hasKind = Array.isArray(cell) && cell.length === 2 && typeof cell[1] === "string";
  const [content, kind] = hasKind ? cell : [cell, null];
  return h("td", { class: kind }, content);
}
