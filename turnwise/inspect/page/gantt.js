// When the episodes of a rollout waited for the generator and for their environments.
import { html, useState, asText, exported, go, isNumber, linkTo, plural, runUrl, seconds, useGet, useWidth, waitingFor, Choice, Note, Segments } from "./base.js";

const MOST_ROWS = 120;
const KIND_WORDS = { generate: "generation", env: "environment", wait: "waiting" };

/** Bars with a start each: where none is stored they lie end to end. Gaps are waiting. */
export function laidOut(episode) {
  const bars = [];
  let now = 0;
  for (const bar of episode.bars || []) {
    const start = isNumber(bar.start) && bar.start >= 0 ? bar.start : now;
    if (start > now + 1e-6) bars.push({ kind: "wait", start: now, seconds: start - now, turn: bar.turn });
    bars.push({ ...bar, start });
    now = Math.max(now, start + (bar.seconds || 0));
  }
  const real = bars.filter((bar) => bar.kind !== "wait");
  return { row: episode.row, id: episode.id, bars, begin: real.length ? Math.min(...real.map((bar) => bar.start)) : 0, end: now };
}

// The reset of an environment belongs to no turn.
const isTurn = (bar) => isNumber(bar.turn);
const barWords = (bar) => `${isTurn(bar) ? `turn ${bar.turn + 1}, ${KIND_WORDS[bar.kind] || asText(bar.kind)}` : "reset"}: ${seconds(bar.seconds)} from ${seconds(bar.start)}`;
const rowWords = (row) => `${asText(row.id)}: ${plural(new Set(row.bars.filter(isTurn).map((bar) => bar.turn)).size, "turn")} in ${seconds(row.end - row.begin)}, from ${seconds(row.begin)} to ${seconds(row.end)}`;

export function GanttView({ run, detail, query }) {
  const split = query.split === "eval" ? "eval" : "step";
  const known = detail.steps?.[split] || [];
  const step = query.step && known.includes(Number(query.step)) ? query.step : known.length ? String(known[known.length - 1]) : null;
  const change = (changes) => go(linkTo(["run", run, "timeline"], { split, step, ...changes }), { replace: true });
  const state = useGet(step === null ? null : runUrl(run, "/gantt", { split, step }));
  const bar = html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
    <${Segments} label="Split" value=${split} options=${[["step", "Training"], ["eval", "Evaluation"]]} onChange=${(next) => change({ split: next, step: "" })} />
    <${Choice} label="Step" value=${step || ""} options=${known.map((one) => [String(one), String(one)])} onChange=${(next) => change({ step: next })} />
  </form>`;
  if (step === null) return html`${bar}<p class="quiet">${exported ? "No episodes are in this file." : "No episodes are stored yet."}</p>`;
  return html`<section aria-label="Timeline">${bar}${waitingFor(state, "the timings") || html`<${Gantt} run=${run} split=${split} step=${step} answer=${state.data} />`}</section>`;
}

function Gantt({ run, split, step, answer }) {
  const [box, width] = useWidth();
  const [sort, setSort] = useState("order");
  const [all, setAll] = useState(false);
  const [over, setOver] = useState(null);
  const rows = (answer.episodes || []).map(laidOut);
  if (!rows.length) return html`<p class="quiet">${asText(answer.note) || "No timings are stored for this step."}</p>`;
  if (sort === "longest") rows.sort((a, b) => b.end - b.begin - (a.end - a.begin));
  const shown = all ? rows : rows.slice(0, MOST_ROWS);
  const end = Math.max(...rows.map((row) => row.end), 1e-6);
  const each = shown.length > 60 ? 8 : 14;
  const left = width < 600 ? 34 : 150;
  const room = Math.max(10, width - left - 8);
  const across = (value) => left + (room * value) / end;
  const sum = (kind) => rows.reduce((total, row) => total + row.bars.filter((bar) => bar.kind === kind).reduce((part, bar) => part + (bar.seconds || 0), 0), 0);
  const idle = sum("wait") + rows.reduce((total, row) => total + end - row.end, 0);
  const share = (value) => `${((100 * value) / (end * rows.length)).toFixed(value > 0 && value / (end * rows.length) < 0.01 ? 2 : 0)} %`;
  const open = (row) => go(linkTo(["run", run, split, step, String(row.row)]));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => part * end);
  return html`
    <div class="controls">
      <p class="count">${plural(rows.length, "episode")} in ${seconds(end)}:
        <span class="key"><i class="swatch generate"></i>generation ${share(sum("generate"))}</span>
        <span class="key"><i class="swatch env"></i>environment ${share(sum("env"))}</span>
        <span class="key"><i class="swatch wait"></i>waiting ${share(idle)}</span></p>
      <${Choice} label="Sort by" value=${sort} options=${[["order", "order"], ["longest", "longest first"]]} onChange=${setSort} />
    </div>
    ${answer.note ? html`<p class="quiet">${asText(answer.note)}</p>` : null}
    ${(answer.skipped || []).map((words, index) => html`<${Note} key=${index} kind="warn">${asText(words)}<//>`)}
    <div class="gantt" onMouseLeave=${() => setOver(null)}><div ref=${box}>
      ${width ? html`<svg width=${width} height=${shown.length * each + 26} role="group" aria-label=${`Timeline of ${plural(shown.length, "episode")} over ${seconds(end)}`}>
        ${ticks.map((tick, index) => html`<g key=${index}><line class="grid" x1=${across(tick)} x2=${across(tick)} y1="16" y2=${shown.length * each + 20} />
          <text x=${across(tick)} y="11" text-anchor=${index === 0 ? "start" : index === 4 ? "end" : "middle"}>${seconds(tick)}</text></g>`)}
        ${shown.map((row, place) => html`<g key=${row.row} class="episode-bars" tabindex="0" role="link" aria-label=${rowWords(row)} onClick=${() => open(row)}
            onKeyDown=${(event) => event.key === "Enter" && open(row)} onMouseEnter=${() => setOver(row)} onFocus=${() => setOver(row)}>
          <rect class="hit" x="0" y=${20 + place * each} width=${width} height=${each} />
          ${each > 10 ? html`<text x="0" y=${20 + place * each + each - 4}>${width < 600 ? row.row : asText(row.id).slice(0, 22)}</text>` : null}
          <rect class="wait" x=${across(0)} y=${21 + place * each} width=${across(end) - across(0)} height=${each - 2} />
          ${row.bars.filter((bar) => bar.kind !== "wait").map((bar, index) => html`<rect key=${index} class=${bar.kind === "env" ? "env" : "generate"} x=${across(bar.start)} y=${21 + place * each}
            width=${Math.max(0.75, (room * (bar.seconds || 0)) / end - 0.5)} height=${each - 2}><title>${barWords(bar)}</title></rect>`)}
        </g>`)}
      </svg>` : null}
    </div></div>
    <p class="quiet reading" role="status">${over ? rowWords(over) : "Point at a row, or walk with Tab. A click or Enter opens the episode."}</p>
    ${rows.length > shown.length ? html`<button type="button" onClick=${() => setAll(true)}>Show all ${rows.length}</button>` : null}`;
}
