// Curves: rows of metrics as series, smoothing, and one chart drawn by uPlot.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState, useDark, useWidth, asText, figure, isNumber, get, exported, runUrl } from "./base.js";

/** What most people look at first; the rest is folded by its prefix. */
export const FIRST_CURVES = [
  "eval/success", "eval/reward", "rollout/success", "rollout/reward", "rollout/reward_std", "rollout/zero_variance_groups",
  "rollout/format_valid", "rollout/reply_tokens", "train/entropy", "train/approx_kl", "train/policy_loss", "train/value_loss",
  "critic/explained_variance", "train/gap_mean",
];

/** {rows, timings, live}: all rows so far; while `live`, new ones are added every two seconds. */
export function useMetrics(run, live) {
  const [state, setState] = useState({ run, rows: [], timings: [], error: null, loaded: false });
  const place = useRef({ run: null, position: "", timings: "" });
  useEffect(() => {
    let over = false;
    let timer = 0;
    if (place.current.run !== run) {
      place.current = { run, position: "", timings: "" };
      setState({ run, rows: [], timings: [], error: null, loaded: false });
    }
    async function ask() {
      let more = false;
      try {
        // The places are the server's own words; an export has one answer with all rows.
        const { position, timings } = place.current;
        const answer = await get(runUrl(run, "/metrics", exported ? {} : { after: position, timings_after: timings }));
        if (over) return;
        place.current = { run, position: answer.position ?? "", timings: answer.timings_position ?? "" };
        setState((old) => addRows(old, answer));
        more = Boolean(answer.more);
      } catch (error) {
        if (!over) setState((old) => ({ ...old, error: error.message, loaded: true }));
      }
      if (!over && !exported && (more || live)) timer = setTimeout(ask, more ? 0 : 2000);
    }
    // A run that has ended is read once; one that just ended is read once more.
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [run, live]);
  return state;
}

function addRows(old, answer) {
  const rows = answer.rows || [];
  const timings = answer.timings || [];
  const same = old.loaded && !old.error && !rows.length && !timings.length && !answer.reset && !answer.timings_reset;
  if (same) return old;
  return {
    ...old,
    rows: answer.reset ? rows : [...old.rows, ...rows],
    timings: answer.timings_reset ? timings : [...old.timings, ...timings],
    error: null,
    loaded: true,
  };
}

/** All names that are drawn: without interval ends and baselines. */
export function curveNames(rows) {
  const names = new Set();
  for (const row of rows) for (const name of Object.keys(row)) if (name !== "step" && name !== "not_finite") names.add(name);
  const ends = (name) => /_(low|high)$/.test(name) && names.has(name.replace(/_(low|high)$/, ""));
  return [...names].filter((name) => !name.startsWith("baseline/") && !ends(name)).sort();
}

/** {x, y, low, high} of one name. */
export function seriesOf(rows, name) {
  const x = [];
  const y = [];
  const low = [];
  const high = [];
  for (const row of rows) {
    if (!(name in row)) continue;
    x.push(row.step ?? 0);
    y.push(row[name]);
    low.push(row[`${name}_low`] ?? null);
    high.push(row[`${name}_high`] ?? null);
  }
  return { x, y, low, high };
}

/** Horizontal lines for a curve: [{label, value}] from baseline/PLAYER_success and the like. */
export function baselinesOf(rows, name) {
  const found = new Map();
  const [room, what] = name.split("/");
  if (room !== "eval" && room !== "rollout") return [];
  for (const row of rows) {
    for (const [key, value] of Object.entries(row)) {
      const match = /^baseline\/(.+)_(success|reward)$/.exec(key);
      if (match && match[2] === what && isNumber(value)) found.set(match[1], value);
    }
  }
  return [...found].map(([label, value]) => ({ label, value }));
}

/** Exponential moving average without the pull to zero at the start. */
export function smooth(values, weight) {
  if (!weight) return values;
  let last = 0;
  let mass = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    last = last * weight + (1 - weight) * value;
    mass = mass * weight + (1 - weight);
    return last / mass;
  });
}

/** Curves on one axis of steps: [steps, ...values per curve], null where a curve has none. */
function aligned(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = curves.map((curve) => {
    const column = new Array(steps.length).fill(undefined);
    curve.x.forEach((step, index) => {
      column[place.get(step)] = curve.y[index];
    });
    return column;
  });
  return [steps, ...columns];
}

function bounds(curves, lines) {
  let low = Infinity;
  let high = -Infinity;
  const see = (value) => {
    if (!isNumber(value)) return;
    low = Math.min(low, value);
    high = Math.max(high, value);
  };
  for (const curve of curves) for (const list of [curve.y, curve.low, curve.high]) (list || []).forEach(see);
  for (const line of lines) see(line.value);
  if (low > high) return [0, 1];
  const size = [high - low, Math.abs(high), 1].find((one) => one > 1e-12); // rounding is no range
  const room = size * 0.06;
  return [low - room, high + room];
}

// A logarithm needs positive numbers: other charts stay as they are.
const allPositive = (curves) => curves.every((curve) => curve.y.every((value) => !isNumber(value) || value > 0));

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Draws intervals, reference lines and events under the curves. */
function underlay(current) {
  return (plot) => {
    const { curves, lines, marks, bands } = current();
    const canvas = plot.ctx;
    const ratio = devicePixelRatio;
    const { left, top, width, height } = plot.bbox;
    const across = (value) => plot.valToPos(value, "x", true);
    const down = (value) => plot.valToPos(value, "y", true);
    canvas.save();
    canvas.beginPath();
    canvas.rect(left, top, width, height);
    canvas.clip();
    for (const mark of marks) {
      canvas.strokeStyle = cssColour("--mark");
      canvas.lineWidth = ratio;
      canvas.setLineDash([2 * ratio, 3 * ratio]);
      canvas.beginPath();
      canvas.moveTo(across(mark.step), top);
      canvas.lineTo(across(mark.step), top + height);
      canvas.stroke();
    }
    canvas.setLineDash([]);
    if (bands) for (const curve of curves) drawBand(canvas, curve, across, down, ratio);
    drawLines(canvas, lines, down, { left, width, ratio });
    canvas.restore();
  };
}

/** Names the reference lines, over the curves. */
function overlay(current) {
  return (plot) => {
    const canvas = plot.ctx;
    canvas.save();
    nameLines(canvas, current().lines, (value) => plot.valToPos(value, "y", true), { ...plot.bbox, ratio: devicePixelRatio });
    canvas.restore();
  };
}

function drawBand(canvas, curve, across, down, ratio) {
  const points = curve.x
    .map((step, index) => [step, curve.low?.[index], curve.high?.[index]])
    .filter(([, low, high]) => isNumber(low) && isNumber(high));
  if (!points.length) return;
  canvas.fillStyle = curve.ink;
  canvas.strokeStyle = curve.ink;
  canvas.globalAlpha = 0.16;
  canvas.beginPath();
  points.forEach(([step, , high], index) => (index ? canvas.lineTo(across(step), down(high)) : canvas.moveTo(across(step), down(high))));
  [...points].reverse().forEach(([step, low]) => canvas.lineTo(across(step), down(low)));
  canvas.closePath();
  canvas.fill();
  canvas.globalAlpha = 0.55;
  canvas.lineWidth = ratio;
  if (points.length <= 40) {
    for (const [step, low, high] of points) {
      canvas.beginPath();
      canvas.moveTo(across(step), down(low));
      canvas.lineTo(across(step), down(high));
      canvas.stroke();
    }
  }
  canvas.globalAlpha = 1;
}

function drawLines(canvas, lines, down, { left, width, ratio }) {
  canvas.strokeStyle = cssColour("--reference");
  canvas.lineWidth = ratio;
  canvas.setLineDash([5 * ratio, 4 * ratio]);
  for (const line of lines) {
    canvas.beginPath();
    canvas.moveTo(left, down(line.value));
    canvas.lineTo(left + width, down(line.value));
    canvas.stroke();
  }
}

function nameLines(canvas, lines, down, { left, width, top, height, ratio }) {
  const tall = 12 * ratio;
  const used = [];
  canvas.font = `${11 * ratio}px system-ui, sans-serif`;
  canvas.textAlign = "left";
  canvas.textBaseline = "top";
  for (const line of [...lines].sort((a, b) => b.value - a.value)) {
    const y = down(line.value);
    if (y < top - 1 || y > top + height + 1) continue;
    // Above the line; below it at the top edge; beside a name that is already there.
    const place = y - tall - 2 * ratio < top ? y + 2 * ratio : y - tall - 2 * ratio;
    const near = used.filter((other) => Math.abs(other.place - place) < tall);
    const x = near.length ? Math.max(...near.map((other) => other.end)) + 8 * ratio : left + 5 * ratio;
    const long = canvas.measureText(line.label).width;
    used.push({ place, end: x + long });
    canvas.globalAlpha = 0.8;
    canvas.fillStyle = cssColour("--card");
    canvas.fillRect(x - 2 * ratio, place, long + 4 * ratio, tall);
    canvas.globalAlpha = 1;
    canvas.fillStyle = cssColour("--reference");
    canvas.fillText(line.label, Math.min(x, left + width), place);
  }
}

const axisOf = (dark, more) => ({
  stroke: dark ? "#9aa4b2" : "#5b6472",
  font: "11px system-ui, sans-serif",
  grid: { stroke: dark ? "#2a3038" : "#e8ebef", width: 1 },
  ticks: { show: false },
  ...more,
});

function plotOptions({ width, height, dark, curves, smoothing, log, current, onCursor }) {
  const series = [{}];
  for (const curve of curves) {
    const few = curve.x.length <= 40;
    const style = { stroke: curve.ink, spanGaps: true, points: { show: few && !smoothing, size: 5, fill: curve.ink, stroke: curve.ink } };
    if (smoothing) series.push({ ...style, width: 1, alpha: 0.3, points: { show: false } });
    series.push({ ...style, width: 2 });
  }
  return {
    width,
    height,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "steps" }, points: { size: 7 }, y: false, drag: { x: true, y: false } },
    scales: {
      x: { time: false, range: (plot, low, high) => (plot.data[0].length === 1 ? [plot.data[0][0] - 1, plot.data[0][0] + 1] : [low, high]) },
      y: log && allPositive(curves) ? { distr: 3 } : { range: () => bounds(current().curves, current().lines) },
    },
    axes: [
      axisOf(dark, { size: 26, space: 50, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000] }),
      axisOf(dark, { size: 52, space: 32, values: (plot, values) => values.map((value) => (value === null ? "" : figure(value))) }),
    ],
    series,
    hooks: { drawAxes: [underlay(current)], draw: [overlay(current)], setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)] },
  };
}

function plotData(curves, smoothing) {
  const plain = aligned(curves);
  if (!smoothing) return plain;
  const data = [plain[0]];
  for (const column of plain.slice(1)) data.push(column, smooth(column, smoothing));
  return data;
}

/**
 * One chart. curves: [{label, colour, x, y, low, high}], lines: [{label, value}], marks: [{step, kind, message}].
 * The numbers under the cursor, or the last ones, stand above it.
 */
export function Chart({ title, curves, lines = [], marks = [], smoothing = 0, log = false, bands = true, height = 170, children }) {
  const dark = useDark();
  const [box, width] = useWidth();
  const plot = useRef(null);
  const drawn = useRef(null);
  const [cursor, setCursor] = useState(null);
  // A canvas does not know CSS variables.
  const inked = useMemo(() => curves.map((curve) => ({ ...curve, ink: cssColour(curve.colour.slice(4, -1)) })), [curves, dark]);
  const latest = useRef(null);
  latest.current = { curves: inked, lines, marks, bands };
  const shape = `${dark} ${smoothing} ${log && allPositive(inked)} ${inked.map((curve) => curve.ink + (curve.x.length <= 40)).join()}`;
  const data = useMemo(() => plotData(inked, smoothing), [inked, smoothing]);

  useLayoutEffect(() => {
    if (!width) return undefined;
    const options = plotOptions({ width, height, dark, curves: inked, smoothing, log, current: () => latest.current, onCursor: setCursor });
    plot.current = new uPlot(options, data, box.current);
    drawn.current = data;
    return () => {
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, width > 0]);
  useLayoutEffect(() => {
    if (plot.current && width) plot.current.setSize({ width, height });
  }, [width, height]);
  useLayoutEffect(() => {
    if (!plot.current) return;
    if (drawn.current === data) {
      plot.current.redraw(false);
      return;
    }
    // A person who has zoomed in keeps the view while new rows come.
    const { min, max } = plot.current.scales.x;
    const old = drawn.current[0];
    const zoomed = isNumber(min) && isNumber(max) && old.length > 1 && (min > old[0] || max < old[old.length - 1]);
    drawn.current = data;
    plot.current.setData(data, !zoomed);
    if (zoomed) plot.current.redraw();
  }, [data, lines.length, marks.length, bands]);

  const step = cursor === null ? null : data[0][cursor];
  const readings = inked.map((curve) => readingAt(curve, step));
  const last = inked[0] && inked[0].x.length ? inked[0].x[inked[0].x.length - 1] : null;
  return html`<figure class="chart">
    <figcaption>
      <b>${title}</b>
      <span class="reading">
        ${step === null ? "" : html`<span class="quiet">step ${figure(step)}</span>`}
        ${readings.map((reading, index) => html`<span class="value" key=${index}>
          ${inked.length > 1 ? html`<i class="swatch" style=${{ background: inked[index].colour }}></i>` : null}${reading}</span>`)}
      </span>
    </figcaption>
    ${marks.filter((mark) => mark.step === step).map((mark, index) => html`<div key=${index} class="at-mark">${asText(mark.kind)}: ${asText(mark.message)}</div>`)}
    <div class="plot" ref=${box} role="img" aria-label=${`${title}, ${inked.map((curve, index) => `${curve.label}: ${readings[index]}`).join("; ")}${last === null ? "" : ` at step ${last}`}`}></div>
    ${children}
  </figure>`;
}

function readingAt(curve, step) {
  let index = curve.x.length - 1;
  if (step !== null) {
    index = curve.x.lastIndexOf(step);
    if (index < 0) return "–";
  }
  if (index < 0) return "–";
  const low = curve.low?.[index];
  const high = curve.high?.[index];
  const interval = isNumber(low) && isNumber(high) ? ` [${figure(low)}, ${figure(high)}]` : "";
  return `${figure(curve.y[index])}${interval}`;
}

/** The controls that all charts of a view share. */
export function useChartControls() {
  const [smoothing, setSmoothing] = useState(0);
  const [log, setLog] = useState(false);
  const [bands, setBands] = useState(true);
  const [search, setSearch] = useState("");
  const controls = html`<div class="controls">
    <label class="field inline"><span>Smoothing</span>
      <input type="range" min="0" max="0.98" step="0.02" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} />
      <output>${smoothing ? smoothing.toFixed(2) : "off"}</output></label>
    <label class="check"><input type="checkbox" checked=${bands} onChange=${(event) => setBands(event.target.checked)} /> <span>intervals</span></label>
    <label class="check"><input type="checkbox" checked=${log} onChange=${(event) => setLog(event.target.checked)} /> <span>log scale</span></label>
    <label class="field inline grow"><span>Find</span>
      <input type="search" placeholder="a metric, such as kl" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
  </div>`;
  return { controls, smoothing, log, bands, search: search.trim().toLowerCase() };
}

/** Charts by name: the first ones open, the others folded by prefix, or those that a search finds. */
export function Curves({ names, draw, search }) {
  if (search) {
    const found = names.filter((name) => name.toLowerCase().includes(search));
    return found.length
      ? html`<div class="charts">${found.map(draw)}</div>`
      : html`<p class="quiet">No metric contains “${search}”.</p>`;
  }
  const first = FIRST_CURVES.filter((name) => names.includes(name));
  const rest = names.filter((name) => !first.includes(name));
  const rooms = [...new Set(rest.map((name) => name.split("/")[0]))];
  return html`<div class="charts">${first.map(draw)}</div>
    ${rooms.map((room) => html`<${Folded} key=${room} title=${room} names=${rest.filter((name) => name.split("/")[0] === room)} draw=${draw} />`)}`;
}

function Folded({ title, names, draw }) {
  const [open, setOpen] = useState(false);
  return html`<details class="fold" open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${title} <span class="quiet">${names.length}</span></summary>
    ${open ? html`<div class="charts">${names.map(draw)}</div>` : null}
  </details>`;
}
