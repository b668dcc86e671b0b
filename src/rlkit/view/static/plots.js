/** Small drawings in SVG: sparklines, intervals, constructions of a search, and its archive of states. */
import { formatNumber, h, isKnown, plural, svg } from "rlkit/ui";

/** Return a line of values; gaps are skipped. */
export function sparkline(values, low, high) {
  const [width, height, margin] = [96, 20, 3];
  const x = (index) => margin + ((width - 2 * margin) * index) / Math.max(1, values.length - 1);
  const y = (value) => height - margin - ((height - 2 * margin) * (value - low)) / (high - low || 1);
  const points = values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
  const end = values.length && svg("circle", { cx: x(values.length - 1), cy: y(values.at(-1)), r: 2 });
  return svg("svg.sparkline", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("polyline", { points: points.join(" ") }), end || null);
}

/** Return an interval [low, high] with its mean on a scale from `start` to `end`. */
export function intervalBar({ mean, low, high }, start, end) {
  const percent = (size) => `${(100 * size) / (end - start || 1)}%`;
  const range = isKnown(low) ? `, 95 % interval ${formatNumber(low)} to ${formatNumber(high)}` : "";
  const label = `${formatNumber(mean)}${range}`;
  return h("div.interval", { role: "img", "aria-label": label, title: label },
    isKnown(low) && h("i.range", { style: { left: percent(low - start), width: percent(high - low) } }),
    isKnown(mean) && h("i.mean", { style: { left: percent(mean - start) } }));
}

/** Return a drawing of a construction: heights as steps, rows of two as points, rows of three as circles. */
export function valuesPicture(values, label) {
  if (!Array.isArray(values) || !values.length) return null;
  const props = { class: "construction", role: "img", "aria-label": label };
  return Array.isArray(values[0]) ? circlesPicture(values, props) : stepsPicture(values, props);
}

function circlesPicture(rows, props) {
  const [[left, right], [bottom, top]] = [0, 1].map((axis) => [
    Math.min(0, ...rows.map((row) => row[axis] - (row[2] ?? 0))),
    Math.max(1, ...rows.map((row) => row[axis] + (row[2] ?? 0))),
  ]);
  const size = Math.max(right - left, top - bottom);
  const dots = rows.map(([x, y, radius]) =>
    svg("circle", { class: radius ? "disc" : "dot", cx: x - left, cy: size + bottom - y, r: radius || size / 96 }));
  const frame = svg("rect.frame", { width: size, height: size });
  const viewBox = [-size / 60, -size / 60, size * 31 / 30, size * 31 / 30].join(" ");
  return svg("svg", { ...props, viewBox }, frame, dots);
}

function stepsPicture(values, props) {
  const low = Math.min(0, ...values);
  const high = Math.max(low + 1e-9, ...values);
  const corners = values.map((value) => `V${high - value}h1`).join("");
  const viewBox = [0, 0, values.length, high - low].join(" ");
  return svg("svg", { ...props, viewBox, preserveAspectRatio: "none", style: { "aspect-ratio": 2.3 } },
    svg("path.steps", { d: `M0 ${high}${corners}V${high}Z` }));
}

/** Return the states of a search: a dot a state, right of its parent, higher if its value is larger. */
export function statesPicture(states, lineage) {
  const [width, height, margin] = [900, 320, 44];
  const places = new Map(states.map(({ id }, place) => [id, place]));
  const finiteValues = states.map(({ value }) => value).filter(Number.isFinite);
  const [low, high] = [Math.min(...finiteValues), Math.max(...finiteValues)];
  const x = (place) => margin + ((width - margin - 12) * place) / Math.max(1, states.length - 1);
  const y = (value) => height - 24 - ((height - 40) * ((value ?? low) - low)) / (high - low || 1);
  const kind = (name, isBest) => (isBest ? `${name} best` : name);
  const edges = states.map(({ id, parent, value }, place) => {
    const start = places.get(parent);
    if (start === undefined) return null;
    const isBest = lineage.has(id) && lineage.has(parent);
    const [x1, y1] = [x(start), y(states[start].value)];
    return svg("line", { class: kind("edge", isBest), x1, y1, x2: x(place), y2: y(value) });
  });
  const dots = states.map((state, place) => {
    const isBest = lineage.has(state.id);
    const origin = state.parent ? `from ${state.parent}` : "a seed";
    const fate = isKnown(state.expansions) ? plural(state.expansions, "expansion") : "dropped by the archive";
    const label = `${state.id}: ${formatNumber(state.value, 7)}, ${fate}, ${origin}`;
    const props = { class: kind(state.seed ? "state seed" : "state", isBest), r: isBest ? 4.5 : 3 };
    return svg("circle", { ...props, cx: x(place), cy: y(state.value) }, svg("title", label));
  });
  const ticks = [low, (low + high) / 2, high].map((value) => [
    svg("text", { x: 4, y: y(value) + 4 }, formatNumber(value, 4)),
    svg("line.grid", { x1: margin, x2: width, y1: y(value), y2: y(value) }),
  ]);
  const label = `${states.length} states; the lineage of the best has ${lineage.size}`;
  return svg("svg.states", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ticks, edges, dots, svg("text", { x: width / 2, y: height - 4 }, "states, each right of its parent"));
}

/** Return the ids of a state and of its ancestors. */
export function lineageOf(id, states) {
  const parents = new Map(states.map((state) => [state.id, state.parent]));
  const ids = new Set();
  for (let next = id; parents.has(next) && !ids.has(next); next = parents.get(next)) ids.add(next);
  return ids;
}
