// The list of runs, one run, and several compared.
import { html, useEffect, useMemo, useState, ago, asText, exported, figure, go, isNumber, linkTo, percent, plural, runColour, runUrl, useGet, waitingFor, Note, Pill, StatePill } from "./base.js";
import { Chart, Curves, baselinesOf, curveNames, seriesOf, useChartControls, useMetrics } from "./chart.js";
import { EpisodesView } from "./episodes.js";
import { GanttView } from "./gantt.js";

// ---- the list -----------------------------------------------------------------------------------

export function RunsView() {
  const state = useGet("/api/runs", { every: 3000 });
  const [picked, setPicked] = useState([]);
  const [search, setSearch] = useState("");
  const waiting = waitingFor(state, "the runs");
  if (waiting) return waiting;
  const { root, runs, skipped } = state.data;
  const wanted = search.trim().toLowerCase();
  const shown = runs.filter((run) => !wanted || [run.name, run.env, run.algorithm, run.model, run.state].some((text) => asText(text).toLowerCase().includes(wanted)));
  const pick = (name) => setPicked(picked.includes(name) ? picked.filter((one) => one !== name) : [...picked, name]);
  const there = picked.filter((name) => runs.some((run) => run.name === name));
  return html`<section aria-label="Runs">
    <div class="title"><h1>Runs</h1><span class="quiet mono">${asText(root)}</span></div>
    <div class="controls">
      <label class="field inline grow"><span>Find</span><input type="search" placeholder="name, environment, algorithm" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
      ${exported && runs.length < 2 ? null : html`<button type="button" class="primary" disabled=${there.length < 2} onClick=${() => go(compareLink(there))}>
        Compare${there.length ? ` ${there.length}` : ""}</button>`}
    </div>
    ${shown.length ? html`<div class="scroll"><table class="list runs">
      <thead><tr><th><span class="hidden">Compare</span></th><th>Run</th><th>State</th><th>Progress</th><th>Environment</th><th>Algorithm</th><th class="number">Success</th><th class="number">Reward</th><th>Doctor</th><th>Changed</th></tr></thead>
      <tbody>${shown.map((run) => html`<${RunRow} key=${run.name} run=${run} picked=${picked.includes(run.name)} onPick=${() => pick(run.name)} />`)}</tbody>
    </table></div>` : html`<p class="quiet">${runs.length ? "No run matches." : "There are no runs here yet. `turnwise train frozen_lake` makes one."}</p>`}
    ${(skipped || []).map((one) => html`<${Note} key=${one.name} kind="warn"><b>${asText(one.name)}</b>: ${asText(one.reason)}<//>`)}
  </section>`;
}

const compareLink = (names) => `#/compare/${names.map(encodeURIComponent).join(",")}`;

function RunRow({ run, picked, onPick }) {
  return html`<tr onClick=${(event) => event.target.closest("a, input") || go(linkTo(["run", run.name]))}>
    <td class="tick"><input type="checkbox" aria-label=${`Compare ${run.name}`} checked=${picked} onChange=${onPick} /></td>
    <td data-label="Run"><a class="open" href=${linkTo(["run", run.name])}>${run.name}</a><div class="quiet small">${[run.model, isNumber(run.seed) ? `seed ${run.seed}` : ""].filter(Boolean).map(asText).join(" · ")}</div></td>
    <td data-label="State"><${StatePill} state=${run.state} /></td>
    <td data-label="Progress"><${Progress} step=${run.step} steps=${run.steps} /></td>
    <td data-label="Environment">${asText(run.env)}</td>
    <td data-label="Algorithm">${asText(run.algorithm)}</td>
    <td data-label="Success" class="number">${run.loading ? "…" : successWords(run)}</td>
    <td data-label="Reward" class="number">${figure(run.reward_last)}</td>
    <td data-label="Doctor">${run.problems ? html`<${Pill} kind="fair">${plural(run.problems, "problem")}<//>` : run.problems === 0 ? html`<span class="quiet">fine</span>` : "–"}</td>
    <td data-label="Changed" class="quiet">${ago(run.updated)}</td>
  </tr>`;
}

function successWords(run) {
  if (!isNumber(run.success_before) && !isNumber(run.success_after)) return "–";
  if (!isNumber(run.success_after)) return percent(run.success_before);
  return html`<span><span class="quiet">${percent(run.success_before)}</span> → <b>${percent(run.success_after)}</b></span>`;
}

function Progress({ step, steps }) {
  if (!isNumber(step)) return "–";
  const share = steps ? Math.min(1, step / steps) : 0;
  return html`<span class="progress"><span class="meter" aria-hidden="true"><i style=${{ width: `${Math.round(100 * share)}%` }}></i></span><span>${step}${steps ? ` / ${steps}` : ""}</span></span>`;
}

// ---- one run ------------------------------------------------------------------------------------

const TABS = [["", "Overview"], ["episodes", "Episodes"], ["timeline", "Timeline"], ["config", "Config"]];

export function RunView({ run, tab, query }) {
  const [live, setLive] = useState(true);
  const state = useGet(runUrl(run), { every: live ? 4000 : 0 });
  const going = state.data ? state.data.state === "running" : true;
  useEffect(() => setLive(going), [going]);
  const metrics = useMetrics(run, going);
  const waiting = waitingFor(state, `the run ${run}`);
  if (waiting) return waiting;
  const detail = state.data;
  const step = lastStep(metrics.rows) ?? detail.step;
  return html`<section aria-label=${`Run ${run}`}>
    <div class="title">
      <h1>${run}</h1>
      <${StatePill} state=${detail.state} />
      <span class="quiet" role="status">step ${figure(step)}${isNumber(detail.steps_planned) ? ` of ${detail.steps_planned}` : ""}</span>
      ${going && !exported ? html`<span class="live" title="New rows are read every two seconds."><i></i>live</span>` : null}
      ${state.error ? html`<${Pill} kind="bad" title=${state.error}>server away<//>` : null}
    </div>
    <nav class="tabs" aria-label="Parts of the run">${TABS.map(([name, label]) => html`<a key=${name} href=${linkTo(name ? ["run", run, name] : ["run", run])} aria-current=${name === tab ? "page" : undefined}>${label}</a>`)}</nav>
    ${(detail.skipped || []).map((words, index) => html`<${Note} key=${index} kind="warn">${asText(words)}<//>`)}
    ${tab === "episodes" ? html`<${EpisodesView} run=${run} detail=${detail} query=${query} />`
      : tab === "timeline" ? html`<${GanttView} run=${run} detail=${detail} query=${query} />`
      : tab === "config" ? html`<${ConfigView} text=${asText(detail.config)} />`
      : html`<${Overview} run=${run} detail=${detail} metrics=${metrics} />`}
  </section>`;
}

const lastStep = (rows) => rows.reduce((last, row) => Math.max(last ?? 0, row.step ?? 0), null);

function Overview({ run, detail, metrics }) {
  const { controls, search, ...look } = useChartControls();
  const rows = useMemo(() => [...metrics.rows, ...metrics.timings], [metrics.rows, metrics.timings]);
  const names = useMemo(() => curveNames(rows), [rows]);
  const marks = (detail.events || []).filter((event) => isNumber(event.step));
  const draw = (name) => html`<${RunChart} key=${name} name=${name} rows=${rows} marks=${marks} findings=${detail.findings || []} look=${look} />`;
  return html`
    <div class="overview">
      <${Outcome} rows=${detail.outcome || []} />
      <${Findings} findings=${detail.findings || []} events=${detail.events || []} />
    </div>
    <${Ledger} ledger=${detail.ledger} />
    <h2>Curves</h2>
    ${controls}
    ${metrics.error ? html`<${Note} kind="error">${metrics.error}<//>` : null}
    ${names.length ? html`<${Curves} names=${names} draw=${draw} search=${search} />` : html`<p class="quiet">${metrics.loaded ? "No metrics are written yet." : "Loading metrics…"}</p>`}`;
}

function RunChart({ name, rows, marks, findings, look }) {
  const curves = useMemo(() => [{ label: name, colour: runColour(0), ...seriesOf(rows, name) }], [rows, name]);
  const lines = useMemo(() => baselinesOf(rows, name), [rows, name]);
  const about = findings.filter((one) => mentions(one, name));
  return html`<${Chart} title=${name} curves=${curves} lines=${lines} marks=${marks} ...${look}>
    ${about.map((one, index) => html`<p key=${index} class=${`finding-at ${severityOf(one)}`} title=${asText(one.advice)}><b>${asText(one.name).replaceAll("_", " ")}</b> ${asText(one.evidence)}</p>`)}
  <//>`;
}

/** Whether a finding was read from this metric, or speaks of it. */
const mentions = (finding, name) => (finding.metrics || []).includes(name) || new RegExp(`(^|[^\\w/])${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}($|[^\\w/])`).test(`${finding.evidence} ${finding.advice}`);

function Outcome({ rows }) {
  if (!rows.length) return html`<div class="card"><h2>Held-out tasks</h2><p class="quiet">Nothing is evaluated yet.</p></div>`;
  const word = (one) => (one.label === "baseline" ? asText(one.player) : asText(one.label));
  return html`<div class="card"><h2>Held-out tasks <span class="quiet">95 % intervals</span></h2>
    <div class="scroll"><table class="outcome-table">
      <thead><tr><th></th><th class="graph"></th><th>Success</th><th>Reward</th></tr></thead>
      <tbody>${rows.map((one, index) => html`<tr key=${index} class=${one.label === "baseline" ? "baseline" : ""}>
        <th>${word(one)}</th>
        <td class="graph">${one.success ? html`<${IntervalBar} values=${one.success} />` : null}</td>
        <td>${one.success ? html`<b>${percent(one.success[1])}</b> <span class="quiet small">[${tenths(one.success[0])}, ${tenths(one.success[2])}]</span>` : html`<span class="quiet">not reported</span>`}</td>
        <td>${one.reward ? html`${figure(one.reward[1])} <span class="quiet small">[${figure(one.reward[0])}, ${figure(one.reward[2])}]</span>` : "–"}</td>
      </tr>`)}</tbody>
    </table></div>
    <p class="quiet small">${episodeWords(rows)}</p></div>`;
}

const tenths = (share) => (isNumber(share) ? (100 * share).toFixed(1) : "–");

/** How many episodes the rows rest on. */
function episodeWords(rows) {
  const counts = [...new Set(rows.map((one) => one.episodes))];
  return counts.length === 1 ? `${plural(counts[0] ?? 0, "episode")} each` : `episodes: ${rows.map((one) => one.episodes ?? "–").join(", ")}`;
}

function IntervalBar({ values: [low, middle, high] }) {
  const across = (value) => 2 + 96 * Math.max(0, Math.min(1, value || 0));
  return html`<svg class="interval" viewBox="0 0 100 14" preserveAspectRatio="none" aria-hidden="true">
    <line class="axis" x1="2" x2="98" y1="7" y2="7" />
    <rect class="range" x=${across(low)} y="4" width=${Math.max(0.5, across(high) - across(low))} height="6" />
    <rect class="middle" x=${across(middle) - 0.75} y="1" width="1.5" height="12" />
  </svg>`;
}

const severityOf = (finding) => (["problem", "warning", "note"].includes(finding.severity) ? `is-${finding.severity}` : "is-warning");

function Findings({ findings, events }) {
  const kinds = [...new Set(events.map((event) => event.kind))];
  return html`<div class="card"><h2>Doctor</h2>
    ${findings.length ? findings.map((one, index) => html`<div key=${index} class=${`finding ${severityOf(one)}`}>
      <b>${asText(one.name).replaceAll("_", " ")}</b> <span class="quiet small">${asText(one.severity)}</span>
      <div>${asText(one.evidence)}</div><div class="quiet">${asText(one.advice)}</div></div>`) : html`<p class="quiet">Nothing to look at.</p>`}
    ${kinds.length ? html`<details class="fold" open=${events.length <= 4}><summary>What happened <span class="quiet">${events.length}</span></summary>
      <ul class="events">${events.slice(-200).map((event, index) => html`<li key=${index}><b>${asText(event.kind)}</b>${event.count > 1 ? html` <span class="quiet">${event.count} times, last</span>` : null}${isNumber(event.step) ? html` <span class="quiet">step ${event.step}</span>` : null} ${asText(event.message)}</li>`)}</ul></details>` : null}
  </div>`;
}

function Ledger({ ledger }) {
  if (!ledger || !ledger.steps) return null;
  const broken = ledger.broken > 0;
  return html`<p class=${broken ? "note warn" : "quiet"}>Token fidelity: ${(ledger.sampled ?? 0).toLocaleString("en")} tokens sampled, ${(ledger.trained ?? 0).toLocaleString("en")} trained in ${plural(ledger.steps, "step")}${broken ? `, ${ledger.broken} not as sampled` : ", each as it was sampled"}.</p>`;
}

function ConfigView({ text }) {
  const [search, setSearch] = useState("");
  const wanted = search.trim().toLowerCase();
  const lines = text.split("\n");
  return html`<section aria-label="Config">
    <div class="controls"><label class="field inline grow"><span>Find</span><input type="search" placeholder="a key or a value" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label></div>
    <pre class="config">${lines.map((line, index) => {
      const [, indent, key, rest] = /^(\s*(?:- )?)([\w.-]+:)?(.*)$/.exec(line) || [null, "", "", line];
      const found = wanted && line.toLowerCase().includes(wanted);
      return html`<span key=${index} class=${found ? "found" : wanted ? "dim" : ""}>${indent}${key ? html`<b>${key}</b>` : null}${rest}${"\n"}</span>`;
    })}</pre></section>`;
}

// ---- several runs -------------------------------------------------------------------------------

export function CompareView({ runs }) {
  const [all, setAll] = useState({});
  const keep = (run, rows) => setAll((old) => (old[run] === rows ? old : { ...old, [run]: rows }));
  const state = useGet(`/api/compare?runs=${runs.map(encodeURIComponent).join(",")}`);
  const { controls, search, ...look } = useChartControls();
  const names = useMemo(() => [...new Set(runs.flatMap((run) => curveNames(all[run] || [])))].sort(), [all, runs.join()]);
  const draw = (name) => html`<${ComparedChart} key=${name} name=${name} runs=${runs} all=${all} look=${look} />`;
  return html`<section aria-label="Comparison">
    <div class="title"><h1>Compare ${plural(runs.length, "run")}</h1></div>
    <ul class="run-keys">${runs.map((run, index) => html`<li key=${run}><i class="swatch" style=${{ background: runColour(index) }}></i><a href=${linkTo(["run", run])}>${run}</a><${RunRows} run=${run} keep=${keep} /></li>`)}</ul>
    ${waitingFor(state, "the comparison") || html`<div class="overview"><${Paired} answer=${state.data} /><${ConfigDiff} rows=${state.data.config || []} runs=${runs} /></div>`}
    <h2>Curves</h2>
    ${controls}
    ${names.length ? html`<${Curves} names=${names} draw=${draw} search=${search} />` : html`<p class="quiet">${runs.every((run) => all[run]) ? "No metrics are written yet." : "Loading metrics…"}</p>`}
  </section>`;
}

/** Reads the rows of one run for the comparison; draws its state. */
function RunRows({ run, keep }) {
  const state = useGet(runUrl(run), { every: 4000 });
  const metrics = useMetrics(run, state.data?.state === "running");
  const rows = useMemo(() => [...metrics.rows, ...metrics.timings], [metrics.rows, metrics.timings]);
  useEffect(() => {
    if (metrics.loaded) keep(run, rows);
  }, [run, rows, metrics.loaded]);
  if (state.error) return html` <${Pill} kind="bad">${state.error}<//>`;
  return state.data ? html` <${StatePill} state=${state.data.state} />` : null;
}

function ComparedChart({ name, runs, all, look }) {
  const curves = useMemo(
    () => runs.map((run, index) => ({ label: run, colour: runColour(index), ...seriesOf(all[run] || [], name) })).filter((curve) => curve.x.length),
    [all, name, runs.join()],
  );
  return curves.length ? html`<${Chart} title=${name} curves=${curves} lines=${baselinesOf(all[runs[0]] || [], name)} ...${look} />` : null;
}

function Paired({ answer }) {
  const pairs = answer.pairs || (answer.paired ? [answer.paired] : []);
  return html`<div class="card"><h2>Paired ${pairs.length > 1 ? "tests" : "test"} <span class="quiet">same held-out tasks</span></h2>
    ${pairs.map((pair, index) => html`<${Pair} key=${index} pair=${pair} />`)}
    ${pairs.length ? null : html`<p class="quiet">The runs share no evaluated tasks.</p>`}
    ${(answer.skipped || []).map((words, index) => html`<p key=${index} class="quiet small">${asText(words)}</p>`)}
  </div>`;
}

function Pair({ pair }) {
  const { low, difference, high } = pair;
  const known = [low, difference, high].every(isNumber);
  const most = known ? Math.max(Math.abs(low), Math.abs(high), 1e-9) * 1.1 : 1;
  const across = (value) => 50 + (48 * value) / most;
  const words = `${figure(difference)} [${figure(low)}, ${figure(high)}]${isNumber(pair.p) ? `, p = ${figure(pair.p)}` : ""}${isNumber(pair.tasks) ? `, ${plural(pair.tasks, "task")}` : ""}`;
  const [first, second] = (pair.runs || []).map(asText);
  return html`<p>${asText(pair.text)}</p>
    ${known ? html`<svg class="interval tall" viewBox="0 0 100 22" preserveAspectRatio="none" role="img" aria-label=${`difference ${words}`}>
      <line class="axis" x1="2" x2="98" y1="11" y2="11" /><line class="zero" x1="50" x2="50" y1="1" y2="21" />
      <rect class="range" x=${across(low)} y="7" width=${Math.max(0.5, across(high) - across(low))} height="8" />
      <rect class="middle" x=${across(difference) - 0.3} y="3" width="0.6" height="16" /></svg>
      ${first ? html`<div class="ends quiet small"><span>← ${second} better</span><span>${first} better →</span></div>` : null}
      <p class="quiet small">${asText(pair.of) || "success"}${first ? `, ${first} minus ${second}` : ""}: ${words}</p>` : null}`;
}

function ConfigDiff({ rows, runs }) {
  return html`<div class="card"><h2>Config <span class="quiet">${rows.length ? plural(rows.length, "difference") : ""}</span></h2>
    ${rows.length ? html`<div class="scroll"><table class="diff"><thead><tr><th>key</th>${runs.map((run, index) => html`<th key=${run}><i class="swatch" style=${{ background: runColour(index) }}></i>${run}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.key}><th class="mono">${asText(row.key)}</th>${runs.map((run) => html`<td key=${run} class="mono">${row.values?.[run] === undefined ? html`<span class="quiet">unset</span>` : JSON.stringify(row.values[run])}</td>`)}</tr>`)}</tbody>
    </table></div>` : html`<p class="quiet">The configs are equal.</p>`}</div>`;
}
