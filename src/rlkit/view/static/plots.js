/** Small drawings in SVG: sparklines, intervals, constructions of a search, and its archive of states. */
import { formatNumber, h, isKnown, svg } from "rlkit/ui";

/** Return a line of values; gaps are skipped. */
export function sparkline(values, low, high) {
  const [width, height] = [96, 20];
  const span = high - low || 1;
  const points = values.map((value, index) => [3 + ((width - 6) * index) / Math.max(1, values.length - 1), height - 3 - ((height - 6) * (value - low)) / span]);
  const line = points.map((point) => point.map((number) => number.toFixed(1)).join(",")).join(" ");
  return svg("svg", { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, svg("polyline", { points: line }),
    points.length > 0 && svg("circle", { cx: points.at(-1)[0], cy: points.at(-1)[1], r: 2 }));
}

/** Return an interval [low, high] with its mean on a scale from `start` to `end`. */
export function intervalBar({ mean, low, high }, start, end) {
  const place = (value) => `${(100 * (value - start)) / (end - start || 1)}%`;
  const label = `${formatNumber(mean)}${isKnown(low) ? `, 95 % interval ${formatNumber(low)} to ${formatNumber(high)}` : ""}`;
  return h("div", { class: "interval", role: "img", "aria-label": label, title: label },
    isKnown(low) && h("i", { class: "range", style: { left: place(low), width: `${(100 * (high - low)) / (end - start || 1)}%` } }),
    isKnown(mean) && h("i", { class: "mean", style: { left: place(mean) } }));
}

/** Return a drawing of a construction: heights as steps, rows of two as points, rows of three as circles. */
export function valuesPicture(values, label) {
  const size = 240;
  const props = { class: "construction", role: "img", "aria-label": label };
  if (!Array.isArray(values) || !values.length) return null;
  if (!Array.isArray(values[0])) return stepPicture(values, props);
  const [xs, ys] = [0, 1].map((column) => values.map((row) => row[column]));
  const radii = values.map((row) => row[2] ?? 0);
  const left = Math.min(0, ...xs.map((x, index) => x - radii[index]));
  const bottom = Math.min(0, ...ys.map((y, index) => y - radii[index]));
  const span = Math.max(...xs.map((x, index) => x + radii[index]), 1) - left;
  const tall = Math.max(...ys.map((y, index) => y + radii[index]), 1) - bottom;
  const scale = size / Math.max(span, tall);
  const dots = values.map((row, index) => svg("circle", { class: radii[index] ? "disc" : "dot", cx: ((xs[index] - left) * scale).toFixed(2), cy: (size - (ys[index] - bottom) * scale).toFixed(2), r: radii[index] ? (radii[index] * scale).toFixed(2) : 2.5 }));
  return svg("svg", { ...props, viewBox: `-4 -4 ${size + 8} ${size + 8}` }, svg("rect", { class: "frame", x: 0, y: 0, width: size, height: size }), dots);
}

function stepPicture(values, props) {
  const [width, height] = [360, 150];
  const low = values.reduce((least, value) => Math.min(least, value), 0);
  const high = values.reduce((most, value) => Math.max(most, value), low + 1e-9);
  const y = (value) => (height - (height * (value - low)) / (high - low)).toFixed(2);
  const corners = values.map((value, index) => `H${((width * index) / values.length).toFixed(2)}V${y(value)}`).join("");
  return svg("svg", { ...props, viewBox: `0 -4 ${width} ${height + 8}`, preserveAspectRatio: "none" }, svg("path", { class: "steps", d: `M0 ${y(0)}${corners}H${width}V${y(0)}Z` }));
}

/** Return the archive of a search: a dot a state, from left to right as they came, higher if its value is larger. */
export function statesPicture(states, sign, onState) {
  const [width, height, margin] = [900, 320, 44];
  const index = new Map(states.map(({ id }, position) => [id, position]));
  const finite = states.map(({ value }) => value).filter(Number.isFinite);
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const x = (position) => margin + ((width - margin - 12) * position) / Math.max(1, states.length - 1);
  const y = (value) => height - 24 - ((height - 40) * ((value ?? low) - low)) / (high - low || 1);
  const lineage = bestLineage(states, sign, index);
  const edges = states.map((state, position) => {
    const parent = index.get(state.parent);
    return parent !== undefined && svg("line", { class: lineage.has(state.id) && lineage.has(state.parent) ? "edge best" : "edge", x1: x(parent), y1: y(states[parent].value), x2: x(position), y2: y(state.value) });
  });
  const dots = states.map((state, position) => svg("circle", {
    class: `state${state.seed ? " seed" : ""}${lineage.has(state.id) ? " best" : ""}`, cx: x(position), cy: y(state.value), r: lineage.has(state.id) ? 4.5 : 3, onclick: () => onState(state) }, svg("title", null, `${state.id}: ${formatNumber(state.value, 6)}, ${state.expansions} expansions`)));
  const ticks = [low, (low + high) / 2, high].map((value) => [svg("text", { x: 4, y: y(value) + 4 }, formatNumber(value, 4)), svg("line", { class: "grid", x1: margin, x2: width, y1: y(value), y2: y(value) })]);
  return svg("svg", { class: "states", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${states.length} states; the lineage of the best has ${lineage.size}` }, ticks, edges, dots,
    svg("text", { x: margin, y: height - 4 }, "first state"), svg("text", { x: width - 12, y: height - 4, "text-anchor": "end" }, "newest state"));
}

/** Return the ids of the best state and its ancestors. */
export function bestLineage(states, sign, index) {
  const best = states.reduce((top, state) => (Number.isFinite(state.value) && (!top || sign * state.value > sign * top.value) ? state : top), null);
  const ids = new Set();
  for (let state = best; state && !ids.has(state.id); state = states[index.get(state.parent)]) ids.add(state.id);
  return ids;
}
