// What every view uses: the library, the one door to data, routes, numbers as text, small parts.
// All text reaches the page through text nodes; nothing here or elsewhere writes markup.

export const { html, render, useState, useEffect, useLayoutEffect, useMemo, useRef, useErrorBoundary } = htmPreact;

// ---- data -----------------------------------------------------------------------------------

// An export carries its answers in the page. Then nothing is asked from a server.
const inlined = document.getElementById("data");
export const exported = inlined ? JSON.parse(inlined.textContent) : null;

/** The answer to a url of the contract. The only place where the page asks for data. */
export async function get(url) {
  if (exported) {
    if (Object.hasOwn(exported, url)) return exported[url];
    throw new Error("This file does not contain that part of the run.");
  }
  return readAnswer(await fetch("." + url, { headers: { Accept: "application/json" } }));
}

/** The answer to a request that changes something on the server (play). */
export async function send(method, url, body = {}) {
  const headers = { Accept: "application/json", "Content-Type": "application/json" };
  return readAnswer(await fetch("." + url, { method, headers, body: JSON.stringify(body) }));
}

async function readAnswer(answer) {
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    throw new Error(`The server answered ${answer.status} with something that is not JSON.`);
  }
  if (!answer.ok) throw new Error((value && value.error) || `The server answered ${answer.status}.`);
  return value;
}

/** A url with its parameters in the given order; empty ones are left out. */
export function urlOf(path, parameters = {}) {
  const parts = Object.entries(parameters)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
  return parts.length ? `${path}?${parts.join("&")}` : path;
}

export const runUrl = (run, rest = "", parameters = {}) => urlOf(`/api/run/${encodeURIComponent(run)}${rest}`, parameters);

/** {data, error, loading} of a url. `every`: ask again after so many milliseconds. */
export function useGet(url, { every = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true, url: null });
  useEffect(() => {
    if (!url) return undefined;
    let over = false;
    let timer = 0;
    async function ask() {
      try {
        const data = await get(url);
        if (!over) setState({ data, error: null, loading: false, url });
      } catch (error) {
        // What is already shown stays while the server is away.
        if (!over) setState((old) => ({ data: old.url === url ? old.data : null, error: error.message, loading: false, url }));
      }
      if (!over && every && !exported) timer = setTimeout(ask, every);
    }
    setState((old) => ({ ...old, loading: true }));
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [url, every]);
  return state;
}

// ---- routes ---------------------------------------------------------------------------------

/** {parts, query} of the address after #. */
export function readRoute() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodePart);
  return { parts, query: Object.fromEntries(new URLSearchParams(search)) };
}

function decodePart(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function linkTo(parts, query = {}) {
  return urlOf(`#/${parts.map(encodeURIComponent).join("/")}`, query);
}

export function go(hash, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = hash;
  }
}

export function useRoute() {
  const [route, setRoute] = useState(readRoute);
  useLayoutEffect(() => {
    const changed = () => setRoute(readRoute());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

// ---- keys, colours of the system, sizes -------------------------------------------------------

/** Calls keys[event.key](event) unless the person is typing, or holds a modifier. Listeners are layout
    effects: what is seen takes keys at once, and not only after the next frame. */
export function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => {
    function pressed(event) {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      const at = event.target;
      if (at.closest && at.closest("input, textarea, select")) return;
      if (event.key === " " && at.closest && at.closest("button, a, summary")) return; // it presses what has the focus
      const action = Object.hasOwn(latest.current, event.key) ? latest.current[event.key] : null;
      if (action) {
        event.preventDefault();
        action(event);
      }
    }
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

const darkQuery = matchMedia("(prefers-color-scheme: dark)");

export function useDark() {
  const [dark, setDark] = useState(darkQuery.matches);
  useLayoutEffect(() => {
    const changed = () => setDark(darkQuery.matches);
    darkQuery.addEventListener("change", changed);
    return () => darkQuery.removeEventListener("change", changed);
  }, []);
  return dark;
}

/** The width of an element in pixels, and the ref to give it. */
export function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    if (!ref.current) return undefined;
    const measure = () => ref.current && setWidth(Math.floor(ref.current.clientWidth));
    const observer = new ResizeObserver(measure);
    observer.observe(ref.current);
    measure();
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

// ---- numbers and texts ------------------------------------------------------------------------

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number in at most four digits. */
export function figure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // what is left of sums that cancel
  const text = size >= 1e5 || size < 1e-3 ? size.toExponential(1).replace("e+", "e") : size >= 1000 ? Math.round(size).toLocaleString("en") : String(Number(size.toPrecision(3)));
  return value < 0 ? `−${text}` : text;
}

export const signed = (value) => (isNumber(value) && value > 0 ? `+${figure(value)}` : figure(value));
export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–");
export const seconds = (value) => (!isNumber(value) ? "–" : value === 0 ? "0 s" : value < 1 ? `${value < 0.001 ? (1000 * value).toFixed(2) : Math.round(1000 * value)} ms` : `${figure(value)} s`);
export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

export function ago(unix) {
  if (!isNumber(unix)) return "–";
  const past = Math.max(0, Date.now() / 1000 - unix);
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return `${Math.floor(past / 86400)} d ago`;
}

/** Any value of the server as text: never as an object that the library would take for markup. */
export function asText(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : typeof value === "object" ? JSON.stringify(value) : String(value);
}

// ---- small parts ------------------------------------------------------------------------------

export const RUN_COLOURS = 8;
export const runColour = (index) => `var(--line-${index % RUN_COLOURS})`;

export function Note({ kind = "info", children }) {
  return html`<div class=${`note ${kind}`} role=${kind === "error" ? "alert" : "status"}>${children}</div>`;
}

/** What stands in place of an answer that is not there. Null when there is one. */
export function waitingFor(state, what) {
  if (state.data) return null;
  if (state.error) return html`<${Note} kind="error">${what}: ${state.error}<//>`;
  return html`<p class="quiet" role="status">Loading ${what}…</p>`;
}

export function Pill({ kind, children, title }) {
  return html`<span class=${`pill ${kind}`} title=${title}>${children}</span>`;
}

const STATE_WORDS = { running: "running", ended: "ended", stopped: "stopped" };
export const StatePill = ({ state }) => html`<${Pill} kind=${`state-${STATE_WORDS[state] || "unknown"}`}>${asText(state) || "unknown"}<//>`;

export function StatusPill({ status, error }) {
  const word = asText(status);
  const kind = word === "completed" ? "good" : word.startsWith("truncated") ? "fair" : "bad";
  return html`<${Pill} kind=${kind} title=${asText(error) || undefined}>${word.replaceAll("_", " ")}<//>`;
}

export function SuccessMark({ success }) {
  if (success === null || success === undefined) return html`<span class="quiet" title="The environment does not report success.">–</span>`;
  return success ? html`<span class="yes">✓<span class="hidden"> success</span></span>` : html`<span class="no">✗<span class="hidden"> no success</span></span>`;
}

export function Field({ label, children, wide }) {
  return html`<label class=${wide ? "field wide" : "field"}><span>${label}</span>${children}</label>`;
}

let lastId = 0;

// The label stands beside the control: around it, the options would be part of its name.
export function Choice({ label, value, options, onChange }) {
  const [id] = useState(() => `choice-${(lastId += 1)}`);
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <select id=${id} value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${String(key) === String(value)}>${text}</option>`)}
    </select>
  </div>`;
}

/** One of a few, as a row of buttons. */
export function Segments({ label, value, options, onChange }) {
  return html`<div class="segments" role="group" aria-label=${label}>
    ${options.map(([key, text, title]) => html`<button key=${key} type="button" title=${title} aria-pressed=${String(value === key)} onClick=${() => onChange(key)}>${text}</button>`)}
  </div>`;
}

export function Check({ label, checked, onChange }) {
  return html`<label class="check"><input type="checkbox" checked=${checked} onChange=${(event) => onChange(event.target.checked)} /> <span>${label}</span></label>`;
}

/** A long text, cut until it is asked for. */
export function LongText({ text, most = 4000, children }) {
  const [whole, setWhole] = useState(false);
  if (text.length <= most || whole) return children(text);
  return html`${children(text.slice(0, most))}
    <button type="button" class="link" onClick=${() => setWhole(true)}>Show all ${text.length.toLocaleString("en")} characters</button>`;
}
