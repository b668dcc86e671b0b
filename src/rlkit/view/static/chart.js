/** Draw a chart of numbers over steps with uPlot, in the colours of the theme. */
import { h, replace, themeColour } from "rlkit/dom";
import { formatNumber, isKnown } from "rlkit/format";
import { markInvisible, textLine } from "rlkit/text";

const { uPlot } = globalThis;
const SYNC = "steps";
const FONT = "11px system-ui, sans-serif";

/**
 * Draw a chart and return {node, close}. In the series, `raw` are values before smoothing, `parts` values before stacking.
 * chart: title, x (steps), series: [{label, values, colour, low?, high?, raw?, parts?, isArea?}], guides: [number],
 * markers: [{step, last}], isLog, onStep(step), height.
 */
export function drawChart(chart) {
  const legend = h("div", { class: "legend" });
  const plotHost = h("div", { class: "plot", role: "img", "aria-label": describeChart(chart) });
  const node = h("figure", { class: "chart" }, h("figcaption", null, h("span", { class: "chart-title" }, textLine(chart.title)), legend), plotHost);
  let plot = null;
  const make = () => {
    plot?.destroy();
    const { data, series, bands } = makeSeries(chart);
    const showLegend = (index) => replace(legend, chart.series.map((curve) => legendEntry(curve, index, chart.x)));
    plot = new uPlot({ ...chartOptions(chart, plotHost, showLegend), series, bands }, data, plotHost);
    showLegend(null);
  };
  const observer = new ResizeObserver(() => plot ? plot.setSize({ width: plotHost.clientWidth, height: chart.height ?? 150 }) : make());
  observer.observe(plotHost);
  const redraw = () => plot && make();
  addEventListener("themechange", redraw);
  const close = () => {
    observer.disconnect();
    removeEventListener("themechange", redraw);
    plot?.destroy();
  };
  return { node, close };
}

function describeChart({ title, x, series }) {
  const lines = series.map(({ label, values }) => {
    const points = values.map((value, index) => [x[index], value]).filter(([, value]) => isKnown(value));
    if (!points.length) return `${label}: no values`;
    const [first, last] = [points[0], points.at(-1)];
    return `${label}: ${formatNumber(first[1])} at step ${first[0]}, ${formatNumber(last[1])} at step ${last[0]}`;
  });
  return markInvisible(`${title}. ${lines.join(". ")}`);
}

function legendEntry({ label, raw, parts, values, colour }, index, x) {
  const numbers = parts ?? raw ?? values;
  const at = index ?? numbers.findLastIndex(isKnown);
  const swatch = h("i", { class: "swatch", style: { background: `var(--${colour})` } });
  return h("span", { class: "key" }, swatch, label && textLine(label, 60), h("b", null, formatNumber(numbers[at])),
    index !== null && h("span", { class: "muted" }, `@${x[index]}`));
}

function makeSeries({ x, series }) {
  const [data, options, bands] = [[x], [{}], []];
  const add = (values, option) => (data.push(values), options.push(option), data.length - 1);
  for (const { values, colour, low, high, raw, isArea } of series) {
    const stroke = themeColour(colour);
    const hasPoints = values.filter(isKnown).length < 30;
    if (low && high) {
      const [top, bottom] = [add(high, { stroke: "transparent", points: { show: false } }), add(low, { stroke: "transparent", points: { show: false } })];
      bands.push({ series: [top, bottom], fill: fade(stroke, 0.16) });
    }
    if (raw) add(raw, { stroke: fade(stroke, 0.3), width: 1, points: { show: false } });
    const points = { show: hasPoints && !isArea, size: 5, fill: stroke, stroke };
    add(values, { stroke, width: 1.75, fill: isArea ? themeColour(`${colour}-area`) : undefined, points, spanGaps: true });
  }
  return { data, series: options, bands };
}

function fade(colour, opacity) {
  return `rgba(${colour.match(/[\d.]+/g).slice(0, 3).join(", ")}, ${opacity})`;
}

function chartOptions({ x, series, isLog, onStep, height = 150, guides = [], markers = [] }, host, showLegend) {
  const axis = { stroke: themeColour("muted"), font: FONT, grid: { stroke: themeColour("grid"), width: 1 }, ticks: { show: false } };
  return {
    width: host.clientWidth, height, legend: { show: false }, padding: [8, 8, 0, 0],
    cursor: { sync: { key: SYNC, setSeries: false }, y: false, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: isLog ? undefined : series.some(({ isArea }) => isArea) ? (_, low, high) => [0, high * 1.04 || 1] : paddedRange } },
    axes: [
      { ...axis, size: 26, space: 60, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 100000] },
      { ...axis, size: 46, space: 34, values: (_, ticks) => ticks.map((tick) => (tick === null ? null : formatNumber(tick))) },
    ],
    hooks: {
      setCursor: [(plot) => showLegend(plot.cursor.idx ?? null)],
      drawClear: [(plot) => drawMarkers(plot, markers, guides)],
      ready: [(plot) => onStep && plot.over.addEventListener("click", () => plot.cursor.idx !== null && onStep(x[plot.cursor.idx]))],
    },
  };
}

function paddedRange(_plot, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const space = 0.06 * (high - low);
  return [low >= 0 && low < 0.4 * high ? 0 : low - space, high + space];
}

function drawMarkers(plot, markers, guides) {
  const { ctx, bbox } = plot;
  const [ratio, colour] = [devicePixelRatio, themeColour("warn")];
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
  for (const guide of guides) ctx.stroke(new Path2D(`M${bbox.left},${plot.valToPos(guide, "y", true)}h${bbox.width}`));
  ctx.restore();
}
