// One episode as a conversation, or two of a group side by side.
import { html, useEffect, useMemo, useState, asText, figure, go, isNumber, linkTo, plural, runUrl, seconds, signed, useGet, useKeys, useWidth, waitingFor, Note, Pill, StatusPill, SuccessMark } from "./base.js";
import { Board, MessageView, RichText } from "./board.js";
import { MOST_MEMBERS, askEpisodes, episodeLink, filterOfEpisode } from "./episodes.js";
import { ColourChoice, Legend, TokenText, colourRange, offeredColourings } from "./tokens.js";

const lastColouring = { name: "advantage" };
// In longer episodes, tokens are drawn one by one only where they can be seen.
const MANY_TOKENS = 3000;

export function EpisodeView({ run, split, step, row, query }) {
  const state = useGet(runUrl(run, "/episode", { split, step, row }));
  const other = useGet(query.with === undefined ? null : runUrl(run, "/episode", { split, step, row: query.with }));
  const near = useNeighbours(run, split, step, row, query);
  const [colouring, setColouring] = useState(lastColouring.name);
  const [selected, setSelected] = useState(0);
  const fresh = state.data && String(state.data.row ?? row) === String(row) ? state.data : null;
  const episodes = useMemo(() => [fresh, query.with === undefined ? null : other.data].filter(Boolean), [fresh, other.data, query.with]);
  const offered = useMemo(() => offeredColourings(episodes), [episodes]);
  const used = offered.includes(colouring) ? colouring : offered[0];
  const range = useMemo(() => colourRange(episodes, used), [episodes, used]);
  useEffect(() => setSelected(0), [run, split, step, row]);
  function colour(name) {
    lastColouring.name = name;
    setColouring(name);
  }
  // Side by side, both episodes show the same turn.
  function turnTo(turn) {
    const last = Math.max(...episodes.map((episode) => episode.turns.length), 1) - 1;
    const next = Math.max(0, Math.min(last, turn));
    setSelected(next);
    const shown = episodes.map((episode, place) => document.getElementById(`turn-${place}-${next}`)).find(Boolean);
    shown?.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }
  const open = (one) => one && go(one);
  useKeys({
    j: () => open(near.next), k: () => open(near.previous), ArrowRight: () => open(near.next), ArrowLeft: () => open(near.previous),
    n: () => turnTo(selected + 1), p: () => turnTo(selected - 1),
    c: () => colour(offered[(offered.indexOf(used) + 1) % offered.length]),
  });
  const waiting = waitingFor({ ...state, data: fresh }, "the episode");
  if (waiting) return waiting;
  const beside = query.with !== undefined;
  return html`<article class="episode-page">
    <div class="toolbar">
      <nav class="near" aria-label="Episodes">
        <${NearLink} to=${near.previous} key_="k">‹ Previous<//>
        <span class="quiet">${near.total ? `${near.at + 1} of ${near.total.toLocaleString("en")}` : ""}</span>
        <${NearLink} to=${near.next} key_="j">Next ›<//>
      </nav>
      <${ColourChoice} value=${used} offered=${offered} onChange=${colour} />
      <${Legend} name=${used} range=${range} />
      ${offered.includes("entropy") ? null : html`<span class="quiet">No entropy is stored for ${split === "eval" ? "evaluations" : "this step"}.</span>`}
      ${beside ? html`<a class="button" href=${linkTo(["run", run, split, step, row])}>Close the second</a>` : null}
    </div>
    ${beside && other.error ? html`<${Note} kind="error">${other.error}<//>` : null}
    <div class=${beside ? "pair" : ""}>
      ${episodes.map((episode, index) => html`<${OneEpisode} key=${index} run=${run} place=${index} episode=${episode} colouring=${used} range=${range}
        selected=${selected} onSelect=${turnTo} narrow=${beside} address=${[split, step]} />`)}
    </div>
    <p class="quiet keys">Keys: <kbd>j</kbd> <kbd>k</kbd> or <kbd>→</kbd> <kbd>←</kbd> next and previous episode, <kbd>n</kbd> <kbd>p</kbd> next and previous turn, <kbd>c</kbd> another colour.</p>
  </article>`;
}

function NearLink({ to, key_, children }) {
  return to ? html`<a class="button" href=${to} title=${`Key ${key_}`}>${children}</a>` : html`<span class="button off" aria-disabled="true">${children}</span>`;
}

/** {previous, next, at, total}: addresses of the neighbours in the list that led here. */
function useNeighbours(run, split, step, row, query) {
  const [found, setFound] = useState({});
  const filter = filterOfEpisode(split, step, query);
  const known = query.at === undefined ? -1 : Number(query.at);
  useEffect(() => {
    let over = false;
    // An address without a place in a list: the place is looked for among the first episodes.
    const offset = Math.max(0, known - 1);
    askEpisodes(run, filter, { offset, limit: known < 0 ? MOST_MEMBERS : 3 }).then(
      (answer) => {
        if (over) return;
        const at = known < 0 ? answer.episodes.findIndex((one) => String(one.row) === row && String(one.step) === step) : known;
        if (at < 0) return setFound({});
        const link = (index) => (index >= 0 && answer.episodes[index - offset] ? episodeLink(run, answer.episodes[index - offset], filter, index) : null);
        setFound({ previous: link(at - 1), next: link(at + 1), at, total: answer.total });
      },
      () => over || setFound({}),
    );
    return () => {
      over = true;
    };
  }, [run, JSON.stringify(filter), known, known < 0 ? row : ""]);
  return found;
}

function OneEpisode({ run, place, episode, colouring, range, selected, onSelect, narrow, address }) {
  const turns = episode.turns || [];
  const turn = turns[selected];
  const lazy = useMemo(() => turns.reduce((sum, one) => sum + (one.tokens || []).length, 0) > MANY_TOKENS, [episode]);
  const conversation = html`<div class="conversation">
    ${episode.error ? html`<${Note} kind="error">${asText(episode.error)}<//>` : null}
    ${(episode.skipped || []).map((words, index) => html`<${Note} key=${index} kind="warn">${asText(words)}<//>`)}
    ${(episode.tools || []).length ? html`<details class="fold"><summary>${plural(episode.tools.length, "tool")}</summary><pre class="drawing">${JSON.stringify(episode.tools, null, 1)}</pre></details>` : null}
    ${(episode.prompt || []).map((message, index) => html`<${MessageView} key=${index} message=${message} />`)}
    ${turns.map((one, index) => html`<${TurnView} key=${index} place=${place} index=${index} turn=${one} episode=${episode} colouring=${colouring} range=${range}
      selected=${index === selected} onSelect=${onSelect} lazy=${lazy} />`)}
  </div>`;
  return html`<div class="episode">
    <header class="facts">
      <h2 class="mono">${asText(episode.id)}</h2>
      <${StatusPill} status=${episode.status} error=${episode.error} />
      <span><${SuccessMark} success=${episode.success} /></span>
      <span>reward <b>${figure(episode.reward)}</b></span>
      <span class="quiet">${asText(episode.env)} · group ${asText(episode.group)} · ${plural(turns.length, "turn")}</span>
      <span class="quiet mono clip" title=${asText(episode.task?.id)}>${asText(episode.task?.id)} seed ${asText(episode.task?.seed)}</span>
    </header>
    <${TimeLine} turns=${turns} selected=${selected} onSelect=${onSelect} />
    ${narrow
      ? conversation
      : html`<div class="with-side">
          ${conversation}
          <aside class="side" aria-label="Selected turn">
            ${turn ? html`<${TurnFacts} turn=${turn} before=${turn.before} index=${selected} count=${turns.length} />` : null}
            <${ContextTree} contexts=${episode.contexts || []} turns=${turns} onSelect=${onSelect} selected=${turn?.context} />
            <${Siblings} run=${run} episode=${episode} address=${address} />
          </aside>
        </div>`}
  </div>`;
}

function TurnView({ place, index, turn, episode, colouring, range, selected, onSelect, lazy }) {
  const before = index ? episode.turns[index - 1].context : turn.context;
  const context = (episode.contexts || [])[turn.context];
  const said = (turn.tokens || []).length
    ? html`<${TokenText} turn=${turn} colouring=${colouring} range=${range} lazy=${lazy} label=${`Reply of turn ${index + 1}, ${plural(turn.tokens.length, "token")}`} />`
    : html`<${RichText} text=${turn.text} />`;
  return html`
    ${index && turn.context !== before ? html`<div class="boundary"><span>context ${turn.context}${context?.why ? `: ${asText(context.why)}` : ""}</span></div>` : null}
    <section id=${`turn-${place}-${index}`} class=${selected ? "turn selected" : "turn"} aria-label=${`Turn ${index + 1}`} onClick=${() => onSelect(index)}>
      <div class="message from-assistant">
        <div class="who">${asText(turn.role) || "assistant"} <span class="quiet">turn ${index + 1}${turn.trained === false ? ", not trained" : ""}</span></div>
        ${said}
        <div class="outcome">
          ${turn.action !== null && turn.action !== undefined && asText(turn.action) !== asText(turn.text).trim() ? html`<span>action <span class="mono">${asText(turn.action)}</span></span>` : null}
          ${turn.valid === false ? html`<${Pill} kind="bad">not valid<//>` : null}
          <${RewardChip} reward=${turn.reward} />
        </div>
      </div>
      ${(turn.messages || []).map((message, place_) => html`<${MessageView} key=${place_} message=${message} />`)}
    </section>`;
}

function RewardChip({ reward }) {
  const kind = reward > 0 ? "plus" : reward < 0 ? "minus" : "zero";
  return html`<span class=${`reward ${kind}`}>${signed(reward)}</span>`;
}

function TurnFacts({ turn, before, index, count }) {
  const rows = [
    ["action", turn.action],
    ["valid", turn.valid === null || turn.valid === undefined ? "" : turn.valid ? "yes" : "no"],
    ["reward", signed(turn.reward)],
    ...Object.entries(turn.reward_parts || {}).map(([name, value]) => [`· ${name}`, signed(value)]),
    ...Object.entries(turn.info || {}).filter(([name]) => name !== "valid"),
    ["generation", isNumber(turn.generate_seconds) && turn.generate_seconds ? seconds(turn.generate_seconds) : ""],
    ["environment", isNumber(turn.env_seconds) && turn.env_seconds ? seconds(turn.env_seconds) : ""],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<div class="card">
    <h3>Turn ${index + 1} <span class="quiet">of ${count}</span></h3>
    ${before || turn.board ? html`<div class="boards">
      ${before ? html`<figure><figcaption>before</figcaption><${Board} text=${before} label="board before the reply" small /></figure>` : null}
      ${turn.board ? html`<figure><figcaption>after</figcaption><${Board} text=${turn.board} label="board after the reply" small /></figure>` : null}
    </div>` : null}
    <dl class="pairs">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${asText(value)}</dd></div>`)}</dl>
  </div>`;
}

/** Turns on a line: a bar per reward, a dot where a context begins. A click selects. */
function TimeLine({ turns, selected, onSelect }) {
  const [box, width] = useWidth();
  const most = Math.max(...turns.map((turn) => Math.abs(turn.reward ?? 0)), 1e-9);
  const each = turns.length ? Math.max(3, Math.min(90, width / turns.length)) : 0;
  const total = Math.max(width, each * turns.length);
  const middle = 25;
  const gap = each > 12 ? 3 : 0.5;
  return html`<div class="timeline" ref=${box} role="group" aria-label="Turns and their rewards">
    ${width ? html`<svg width=${total} height="64" viewBox=${`0 0 ${total} 64`}>
      <line class="axis" x1="0" x2=${each * turns.length} y1=${middle} y2=${middle} />
      ${turns.map((turn, index) => {
        const height = (20 * Math.abs(turn.reward ?? 0)) / most;
        const begins = index > 0 && turn.context !== turns[index - 1].context;
        return html`<g key=${index} class=${index === selected ? "slot selected" : "slot"} role="button" tabindex=${each > 12 ? 0 : -1}
            aria-label=${`Turn ${index + 1}, reward ${figure(turn.reward)}`} aria-current=${index === selected ? "true" : undefined}
            onClick=${() => onSelect(index)} onKeyDown=${(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), onSelect(index))}>
          <title>turn ${index + 1}: ${asText(turn.action) || "no action"}, reward ${figure(turn.reward)}</title>
          <rect class="hit" x=${index * each} y="0" width=${each} height="64" rx="4" />
          <rect class=${`box${turn.valid === false ? " invalid" : ""}${turn.trained === false ? " frozen" : ""}`} x=${index * each + gap / 2} y=${middle - 2} width=${Math.max(1, each - gap)} height="4" rx="2" />
          ${height ? html`<rect class=${turn.reward < 0 ? "minus" : "plus"} x=${index * each + gap / 2} y=${turn.reward < 0 ? middle + 2 : middle - 2 - height} width=${Math.max(1, each - gap)} height=${height} rx="1.5" />` : null}
          ${begins ? html`<line class="border" x1=${index * each} x2=${index * each} y1="2" y2="50" />` : null}
          ${each > 26 ? html`<text x=${index * each + each / 2} y="60" text-anchor="middle">${index + 1}</text>` : null}
        </g>`;
      })}
    </svg>` : null}
  </div>`;
}

/** The contexts of an episode as a tree; nothing where there is only one. */
function ContextTree({ contexts, turns, onSelect, selected }) {
  if (contexts.length < 2) return null;
  const children = (parent) => contexts.map((one, index) => ({ ...one, index })).filter((one) => (one.parent ?? null) === parent && one.index !== parent);
  const firstTurn = (index) => turns.findIndex((turn) => turn.context === index);
  const count = (index) => turns.filter((turn) => turn.context === index).length;
  // A parent that comes later would be a circle: such rows are shown at the root.
  const drawn = new Set();
  const node = (one) => {
    if (drawn.has(one.index)) return null;
    drawn.add(one.index);
    return html`<li key=${one.index}>
      <button type="button" class="link" aria-current=${one.index === selected ? "true" : undefined} onClick=${() => firstTurn(one.index) >= 0 && onSelect(firstTurn(one.index))}>
        context ${one.index}</button> <span class="quiet">${plural(count(one.index), "turn")} from turn ${(one.from_turn ?? 0) + 1}${one.why ? `: ${asText(one.why)}` : ""}</span>
      ${children(one.index).length ? html`<ul>${children(one.index).map(node)}</ul>` : null}
    </li>`;
  };
  const roots = children(null).map(node);
  const rest = contexts.map((one, index) => ({ ...one, index })).filter((one) => !drawn.has(one.index)).map(node);
  return html`<div class="card"><h3>Contexts</h3><ul class="tree">${roots}${rest}</ul></div>`;
}

function Siblings({ run, episode, address }) {
  const [split, step] = address;
  const others = (episode.siblings || []).filter((one) => one.row !== episode.row);
  if (!others.length) return null;
  return html`<div class="card"><h3>Same group</h3>
    <ul class="siblings">${others.map((one) => html`<li key=${one.row}>
      <a href=${linkTo(["run", run, split, step, String(one.row)])}>episode ${one.row}</a> <span><${SuccessMark} success=${one.success} /> ${figure(one.reward)}</span>
      <a class="button" href=${linkTo(["run", run, split, step, String(episode.row)], { with: one.row })}>beside</a>
    </li>`)}</ul></div>`;
}
