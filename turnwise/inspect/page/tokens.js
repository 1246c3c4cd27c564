// Tokens and their colours: by advantage, value and the like, with a legend and a card of numbers.
import { html, useEffect, useLayoutEffect, useRef, useState, asText, figure, isNumber, signed, Choice } from "./base.js";

// kind: diverging around zero, sequential from low to high, or yes and no.
export const COLOURINGS = {
  advantage: { label: "advantage", kind: "diverging", low: "worse than expected", high: "better" },
  value: { label: "value", kind: "sequential" },
  return: { label: "return", kind: "sequential" },
  logprob: { label: "log-prob", kind: "sequential", low: "unlikely", high: "likely" },
  gap: { label: "sampler gap", kind: "diverging", low: "trainer less likely", high: "more likely" },
  entropy: { label: "entropy", kind: "sequential", low: "sure", high: "unsure" },
  mask: { label: "trained or not", kind: "mask" },
  none: { label: "none", kind: "none" },
};

/** The colourings that the tokens of these episodes have numbers for. */
export function offeredColourings(episodes) {
  const tokens = episodes.flatMap((episode) => (episode.turns || []).flatMap((turn) => turn.tokens || []));
  return Object.keys(COLOURINGS).filter((name) => name === "none" || name === "mask" || tokens.some((token) => isNumber(token[name])));
}

/** [low, high] over the episodes shown, so that one colour means one number. */
export function colourRange(episodes, name) {
  const { kind } = COLOURINGS[name];
  if (kind === "mask" || kind === "none") return [0, 1];
  let low = Infinity;
  let high = -Infinity;
  for (const episode of episodes) {
    const scale = episode.scales?.[name];
    const ends = Array.isArray(scale) ? scale : isNumber(scale) ? [-scale, scale] : [];
    const found = ends.every(isNumber) && ends.length ? ends : episode.turns.flatMap((turn) => (turn.tokens || []).map((token) => token[name]));
    for (const value of found) {
      if (!isNumber(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [0, 1];
  if (kind !== "diverging") return [low, high];
  const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return [-size, size];
}

/** The background of a token. Strength never exceeds what keeps the text readable. */
export function tokenColour(token, name, [low, high]) {
  const { kind } = COLOURINGS[name];
  if (kind === "none") return undefined;
  if (kind === "mask") return token.mask ? "var(--trained)" : "var(--untrained)";
  const value = token[name];
  if (!isNumber(value)) return undefined;
  if (kind === "diverging") {
    const share = Math.min(1, Math.abs(value) / high);
    return mixed(value < 0 ? "--worse" : "--better", share);
  }
  return mixed("--ramp", high > low ? (value - low) / (high - low) : 0.5);
}

const mixed = (name, share) => `color-mix(in srgb, var(${name}) ${(6 + 94 * Math.max(0, Math.min(1, share))).toFixed(0)}%, transparent)`;

export function Legend({ name, range }) {
  const { kind, low, high } = COLOURINGS[name];
  if (kind === "none") return null;
  if (kind === "mask") {
    return html`<div class="legend"><span class="chip trained">trained</span> <span class="chip untrained">not trained</span></div>`;
  }
  const ends = kind === "diverging" ? [range[0], 0, range[1]] : [range[0], range[1]];
  return html`<div class="legend">
    <div class=${`bar ${kind}`}></div>
    <div class="ends">${ends.map((value, index) => html`<span key=${index}>${kind === "diverging" ? signed(value) : figure(value)}</span>`)}</div>
    ${low ? html`<div class="ends quiet"><span>${low}</span><span>${high}</span></div>` : null}
  </div>`;
}

export function ColourChoice({ value, offered, onChange }) {
  return html`<${Choice} label="Colour tokens by" value=${value} options=${offered.map((name) => [name, COLOURINGS[name].label])} onChange=${onChange} />`;
}

/** Whether the element is on the screen or close to it; always, unless `lazy`. */
function useNear(box, lazy) {
  const [near, setNear] = useState(!lazy);
  useEffect(() => {
    if (!lazy) return setNear(true);
    const observer = new IntersectionObserver((entries) => setNear(entries[entries.length - 1].isIntersecting), { rootMargin: "500px" });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, [lazy]);
  return near;
}

// A token that is only white space would not be seen.
const visible = (text) => {
  const whole = asText(text);
  if (whole === "") return "∅";
  return whole.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
};

/**
 * The tokens of one turn. Hovering shows a card; a click pins it; with the focus inside, the arrow
 * keys walk from token to token.
 */
export function TokenText({ turn, colouring, range, label, lazy = false }) {
  const box = useRef(null);
  const near = useNear(box, lazy);
  const [shown, setShown] = useState(null); // {index, x, y}
  const tokens = turn.tokens || [];
  function show(index) {
    const span = box.current.querySelector(`[data-token="${index}"]`);
    if (!span) return;
    const outer = box.current.getBoundingClientRect();
    const inner = span.getClientRects()[0] || span.getBoundingClientRect();
    setShown({ index, x: inner.left - outer.left, y: inner.bottom - outer.top + 4, room: outer.width });
  }
  function over(event) {
    const span = event.target.closest("[data-token]");
    if (span) show(Number(span.dataset.token));
  }
  function pressed(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") setShown(null);
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    show(Math.max(0, Math.min(tokens.length - 1, (shown ? shown.index : -1) + move)));
  }
  return html`<div class="tokens" ref=${box} tabindex="0" role="group" aria-label=${label}
      onMouseOver=${over} onMouseLeave=${() => setShown(null)} onClick=${over} onKeyDown=${pressed} onBlur=${() => setShown(null)}>
    ${near ? null : tokens.map((token) => visible(token.text)).join("")}
    ${!near ? null : tokens.map((token, index) => html`<span key=${index} data-token=${index}
      class=${`token${token.mask === false && colouring === "mask" ? " untrained" : ""}${shown && shown.index === index ? " at" : ""}`}
      style=${{ background: tokenColour(token, colouring, range) || "" }}>${visible(token.text)}</span>`)}
    ${shown && tokens[shown.index] ? html`<${TokenCard} token=${tokens[shown.index]} shown=${shown} alternatives=${turn.alternatives?.[shown.index]} />` : null}
  </div>`;
}

function TokenCard({ token, shown, alternatives }) {
  const card = useRef(null);
  const [left, setLeft] = useState(shown.x);
  useLayoutEffect(() => {
    const width = card.current.offsetWidth;
    setLeft(Math.max(0, Math.min(shown.x, shown.room - width)));
  }, [shown.x, shown.room]);
  const rows = ["advantage", "value", "return", "logprob", "gap", "entropy"].filter((name) => isNumber(token[name]));
  return html`<div class="token-card" ref=${card} role="status" style=${{ left: `${left}px`, top: `${shown.y}px` }}>
    <div class="mono">${JSON.stringify(asText(token.text))}</div>
    <table>
      ${rows.map((name) => html`<tr key=${name}><th>${COLOURINGS[name].label}</th><td>${COLOURINGS[name].kind === "diverging" ? signed(token[name]) : figure(token[name])}</td></tr>`)}
      ${isNumber(token.logprob) ? html`<tr><th>probability</th><td>${figure(Math.exp(token.logprob))}</td></tr>` : null}
      ${token.mask === undefined ? null : html`<tr><th>trained</th><td>${token.mask ? "yes" : "no"}</td></tr>`}
    </table>
    ${alternatives && alternatives.length ? html`<${Alternatives} list=${alternatives} chosen=${token.text} />` : null}
  </div>`;
}

/** The likeliest next tokens as bars. */
export function Alternatives({ list, chosen }) {
  return html`<ol class="alternatives">
    ${list.map((one, index) => html`<li key=${index} class=${one.text === chosen ? "chosen" : ""}>
      <span class="mono">${JSON.stringify(asText(one.text))}</span>
      <span class="meter" aria-hidden="true"><i style=${{ width: `${Math.round(100 * Math.max(0, Math.min(1, one.p || 0)))}%` }}></i></span>
      <span class="number">${isNumber(one.p) ? `${(100 * one.p).toFixed(one.p < 0.1 ? 1 : 0)} %` : "–"}</span>
    </li>`)}
  </ol>`;
}
