/** Draw a chart of numbers over steps with uPlot, in the colours of the theme. */
import { computeColour, h, replace, svg } from "rlkit/dom";
import { formatNumber, isKnown } from "rlkit/format";
import { swatch } from "rlkit/parts";
import { textLine } from "rlkit/text";

const { uPlot } = globalThis;
const SYNC = "steps";
const FONT = "11px system-ui, sans-serif";
const STEP_INTERVALS = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 100000];

/**
 * Return the node of a chart, which is drawn while it is on the page.
 * chart: title, x (steps), series, guides: [number], markers: [{step, last}], isLog, onStep(step), height, digits,
 * least: range of the axis if all values are smaller, so that noise around 0 looks small.
 * series: [{label, values, colour, low?, high?, raw?, parts?, area?, isStepped?, kind?, dash?}]; `raw` are values
 * before smoothing, `parts` before stacking, `area` is the colour below. Series of one label share an entry of the
 * legend; `kind` tells them apart.
 */
export function drawChart(chart) {
  const legend = h("div.legend");
  const host = h("div.plot", { role: "img", "aria-label": describeChart(chart) });
  const title = h("span.chart-title", textLine(chart.title));
  const node = h("figure.chart", h("figcaption", title, legend), host);
  const showLegend = (index) => replace(legend, drawLegend(chart, index));
  let plot = null;
  const redraw = () => {
    plot?.destroy();
    const { data, ...lines } = makeSeries(chart);
    plot = new uPlot({ ...chartOptions(chart, host, showLegend), ...lines }, data, host);
    showLegend(null);
  };
  // The observer also tells that the chart has left the page.
  const fit = () => {
    if (!host.isConnected) plot = plot?.destroy();
    else if (plot) plot.setSize({ width: host.clientWidth, height: plot.height });
    else redraw();
  };
  new ResizeObserver(fit).observe(host);
  host.addEventListener("themechange", redraw);
  return node;
}

function describeChart({ title, x, series, digits }) {
  const lines = series.map(({ label, kind, values }) => {
    const ends = [values.findIndex(isKnown), values.findLastIndex(isKnown)];
    const texts = ends.map((index) => `${formatNumber(values[index], digits)} at step ${x[index]}`);
    return `${label}${kind ? ` ${kind}` : ""}: ${ends[0] < 0 ? "no values" : texts.join(", ")}`;
  });
  return `${title}. ${lines.join(". ")}`;
}

/** Return the values at an index, or the last ones, and the steps' line styles if there are several kinds of series. */
function drawLegend({ series, x, digits }, index) {
  const entries = [...Map.groupBy(series, ({ label }) => label)].map(([label, curves]) => {
    const values = curves.map(({ raw, parts, values: drawn }) => {
      const numbers = parts ?? raw ?? drawn;
      return formatNumber(numbers[index ?? numbers.findLastIndex(isKnown)], digits);
    });
    const name = label && textLine(label, 60);
    return h("span.key", swatch(curves[0].colour), name, h("b", values.join(" · ")));
  });
  const kinds = new Map(series.filter(({ kind }) => kind).map(({ kind, dash }) => [kind, dash]));
  const styles = [...kinds].map(([kind, dash]) => {
    const line = svg("path", { d: "M0 5h22", stroke: "currentColor", "stroke-dasharray": dash.join(" ") });
    const sample = svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, line);
    return h("span.key", sample, textLine(kind, 60));
  });
  return [entries, kinds.size > 1 && styles, index !== null && h("span.key", `@${x[index]}`)];
}

function makeSeries({ x, series }) {
  const [data, options, bands, noPoints] = [[x], [{}], [], { show: false }];
  const add = (values, option) => (data.push(values), options.push(option), data.length - 1);
  for (const { values, colour, dash, low, high, raw, area, isStepped } of series) {
    const stroke = computeColour(colour);
    if (low && high) {
      const edges = [high, low].map((edge) => add(edge, { stroke: "transparent", points: noPoints }));
      bands.push({ series: edges, fill: fade(stroke, 0.16) });
    }
    if (raw) add(raw, { stroke: fade(stroke, 0.3), width: 1, points: noPoints });
    const fill = area ? computeColour(area) : undefined;
    const paths = isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    const points = { show: !area && values.filter(isKnown).length < 30, size: 5, fill: stroke, stroke };
    add(values, { stroke, width: 1.75, dash, fill, paths, points, spanGaps: true });
  }
  return { data, series: options, bands };
}

const fade = (colour, opacity) => `rgba(${colour.match(/[\d.]+/g).slice(0, 3).join(", ")}, ${opacity})`;
const stepRange = ({ data: [x] }, low, high) => (x.length === 1 ? [x[0] - 0.5, x[0] + 0.5] : [low, high]);

function chartOptions(chart, host, showLegend) {
  const { x, series, isLog, onStep, height = 150, guides = [], markers = [], digits = 3, least = 0 } = chart;
  const grid = { stroke: computeColour("var(--grid)"), width: 1 };
  const axis = { stroke: computeColour("var(--muted)"), font: FONT, grid, ticks: { show: false } };
  const showTicks = (_plot, ticks) => ticks.map((tick) => (tick === null ? null : formatNumber(tick, digits)));
  const areaRange = (_plot, _low, high) => [0, high * 1.04 || 1];
  const range = isLog ? undefined : series.some(({ area }) => area) ? areaRange : paddedRange(digits > 3, least);
  const openStep = ({ cursor }) => cursor.idx !== null && onStep(x[cursor.idx]);
  return {
    width: host.clientWidth, height, legend: { show: false }, padding: [8, 16, 0, 0],
    cursor: { sync: { key: SYNC, setSeries: false }, y: false, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false, range: stepRange }, y: { distr: isLog ? 3 : 1, range } },
    axes: [
      { ...axis, size: 26, space: 60, grid: { show: false }, incrs: STEP_INTERVALS },
      { ...axis, size: digits > 3 ? 72 : 46, space: 34, values: showTicks },
    ],
    hooks: {
      setCursor: [(plot) => showLegend(plot.cursor.idx ?? null)],
      drawClear: [(plot) => drawMarkers(plot, markers, guides)],
      ready: [(plot) => onStep && plot.over.addEventListener("click", () => openStep(plot))],
    },
  };
}

/** Return the range of an axis: that of the values with some space, and with 0 if it is near and not `isClose`. */
const paddedRange = (isClose, least) => (_plot, low, high) => {
  if (low === null) return [0, 1];
  if (Math.max(high, -low) < least / 2) return [-least / 2, least / 2];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const space = 0.06 * (high - low);
  return [!isClose && low >= 0 && low < 0.4 * high ? 0 : low - space, high + space];
};

function drawMarkers(plot, markers, guides) {
  const { ctx, bbox } = plot;
  const [ratio, colour] = [devicePixelRatio, computeColour("var(--warn)")];
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - 8 * ratio, bbox.width, bbox.height + 8 * ratio);
  ctx.clip();
  for (const { step, last } of markers) {
    const [left, right] = [step, last ?? step].map((value) => plot.valToPos(value, "x", true));
    ctx.fillStyle = fade(colour, 0.35);
    ctx.fillRect(left, bbox.top - 2 * ratio, right - left, 2 * ratio);
    ctx.fillRect(left, bbox.top, ratio, bbox.height);
    ctx.fillStyle = colour;
    ctx.fill(new Path2D(`M${left - 5 * ratio},${bbox.top - 7 * ratio}h${10 * ratio}L${left},${bbox.top}z`));
  }
  ctx.strokeStyle = fade(colour, 0.8);
  ctx.setLineDash([4 * ratio, 4 * ratio]);
  const drawGuide = (y) => ctx.stroke(new Path2D(`M${bbox.left},${y}h${bbox.width}`));
  guides.forEach((guide) => drawGuide(plot.valToPos(guide, "y", true)));
  ctx.restore();
}
