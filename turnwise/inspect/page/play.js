// Play: a person plays an environment, or watches a policy or a model of an API play it turn by turn.
import { html, useEffect, useLayoutEffect, useRef, useState, asText, figure, plural, send, signed, useGet, useKeys, waitingFor, Check, Choice, Field, Note } from "./base.js";
import { Board, MessageView, RichText } from "./board.js";
import { Alternatives, Legend, TokenText, colourRange } from "./tokens.js";

const ARROWS = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" };

export function PlayView({ query }) {
  const envs = useGet("/api/envs");
  const [view, setView] = useState(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [settings, setSettings] = useState({ env: query.env || "frozen_lake", options: "", seed: "0", player: query.player || "person", url: "" });
  const session = useRef(null);
  session.current = view?.session ?? null;
  // The server keeps few games: one that is left is given back.
  const leave = () => session.current && send("DELETE", `/api/play/${encodeURIComponent(session.current)}`).catch(() => {});
  useEffect(() => leave, []);
  async function ask(call) {
    setBusy(true);
    setError(null);
    try {
      setView(await call());
    } catch (problem) {
      setError(problem.message);
    }
    setBusy(false);
  }
  function start(chosen) {
    setSettings(chosen);
    ask(async () => {
      const player = chosen.player === "openai" ? `openai:${chosen.url.trim()}` : chosen.player;
      const next = await send("POST", "/api/play", { env: chosen.env, options: readOptions(chosen.options), seed: readSeed(chosen.seed), player });
      leave(); // only now: what cannot be started ends no game
      return next;
    });
  }
  const act = (action) => ask(() => send("POST", `/api/play/${encodeURIComponent(view.session)}/step`, action === null ? {} : { action }));
  const waiting = waitingFor(envs, "the environments");
  if (waiting) return waiting;
  return html`<section aria-label="Play">
    <div class="title"><h1>Play</h1></div>
    <${StartForm} known=${envs.data} settings=${settings} onStart=${start} busy=${busy} />
    ${error ? html`<${Note} kind="error">${error}<//>` : null}
    ${view ? html`<${Game} view=${view} busy=${busy} failed=${error !== null} onAct=${act} onAgain=${() => start({ ...settings, seed: String(Number(settings.seed || 0) + 1) })} />` : null}
  </section>`;
}

function readSeed(text) {
  const seed = Number(text || 0);
  if (!Number.isInteger(seed) || seed < 0) throw new Error(`The seed is a whole number from 0, got ${text}.`);
  return seed;
}

/** {size: 4} from "size=4 slippery=true" or from JSON. */
export function readOptions(text) {
  const trimmed = text.trim();
  if (!trimmed) return {};
  if (trimmed.startsWith("{")) {
    try {
      return JSON.parse(trimmed);
    } catch {
      throw new Error("The options are neither KEY=VALUE pairs nor a JSON object.");
    }
  }
  const options = {};
  for (const pair of trimmed.split(/\s+/)) {
    const at = pair.indexOf("=");
    if (at < 1) throw new Error(`An option is written KEY=VALUE, got ${pair}.`);
    const value = pair.slice(at + 1);
    try {
      options[pair.slice(0, at)] = JSON.parse(value);
    } catch {
      options[pair.slice(0, at)] = value;
    }
  }
  return options;
}

function StartForm({ known, settings, onStart, busy }) {
  const [form, setForm] = useState(settings);
  useEffect(() => setForm(settings), [settings]); // another game has another seed
  const set = (name) => (value) => setForm({ ...form, [name]: value });
  const typed = (name) => (event) => set(name)(event.target.value);
  const env = known.envs.find((one) => one.name === form.env);
  const players = known.players || [{ name: "person" }, { name: "random" }, { name: "expert" }];
  const listed = players.filter((one) => !one.name.startsWith("openai:"));
  const refused = players.find((one) => one.name === form.player)?.refused;
  // A policy plays best what it was trained on.
  function choosePlayer(player) {
    const own = players.find((one) => one.name === player)?.env;
    const env_ = known.envs.some((one) => one.name === own) ? own : form.env;
    setForm({ ...form, player, env: env_ });
  }
  return html`<form class="filters start" onSubmit=${(event) => (event.preventDefault(), onStart(form))}>
    <${Choice} label="Environment" value=${form.env} options=${known.envs.map((one) => [one.name, one.name])} onChange=${set("env")} />
    <${Choice} label="Player" value=${form.player} options=${[...listed.map((one) => [one.name, playerWord(one)]), ["openai", "a model behind an OpenAI API"]]} onChange=${choosePlayer} />
    ${form.player === "openai" ? html`<${Field} label="URL#MODEL" wide><input required value=${form.url} placeholder="http://127.0.0.1:8000/v1#model" onInput=${typed("url")} /><//>` : null}
    <${Field} label="Seed"><input type="number" min="0" step="1" value=${form.seed} onInput=${typed("seed")} /><//>
    <${Field} label="Options" wide><input value=${form.options} placeholder="KEY=VALUE ..." onInput=${typed("options")} /><//>
    <button type="submit" class="primary" disabled=${busy || Boolean(refused)}>Start</button>
    ${env?.summary ? html`<p class="quiet wide">${asText(env.summary)}</p>` : null}
    ${env?.options ? html`<p class="quiet wide">Options: <span class="mono">${asText(env.options)}</span></p>` : null}
    ${refused ? html`<p class="quiet wide">${asText(refused)}</p>` : null}
  </form>`;
}

const PLAYER_WORDS = { person: "you", random: "random player", expert: "expert" };
const playerWord = (one) => asText(one.label) || PLAYER_WORDS[one.name] || one.name;

function Game({ view, busy, failed, onAct, onAgain }) {
  const person = (view.player ?? "person") === "person";
  const past = useRef(null);
  const turns = view.turns || [];
  // The conversation has a window of its own: the board and the buttons stay where they are.
  useLayoutEffect(() => {
    past.current.scrollTop = past.current.scrollHeight;
  }, [turns.length, view.session]);
  // The button that began the game was disabled meanwhile, and lost the focus.
  useLayoutEffect(() => past.current.focus({ preventScroll: true }), [view.session]);
  return html`<div class="with-side play">
    <div class="conversation" ref=${past} tabindex="0" role="log" aria-label="Conversation">
      ${(view.messages || []).length && !turns.length ? view.messages.map((message, index) => html`<${MessageView} key=${index} message=${message} />`) : html`<${Past} view=${view} turns=${turns} />`}
      ${view.error ? html`<${Note} kind="error">${asText(view.error)}<//>` : null}
    </div>
    <aside class="side" aria-label="The game">
      <div class="card game">
        <h3>${asText(view.env) || "Game"} <span class="quiet">turn ${turns.length + (view.done ? 0 : 1)} · reward ${figure(view.reward ?? 0)}</span></h3>
        ${view.board ? html`<${Board} text=${view.board} />` : null}
        ${view.done ? html`<${Ending} view=${view} onAgain=${onAgain} />` : person
          ? html`<${Hand} view=${view} busy=${busy} onAct=${onAct} />`
          : html`<${Watch} busy=${busy} failed=${failed} onAct=${onAct} done=${view.done} turns=${turns.length} />`}
      </div>
      ${!person && turns.length ? html`<${NextTokens} turn=${turns[turns.length - 1]} />` : null}
    </aside>
  </div>`;
}

/** The conversation so far: the opening messages, then every turn with its tokens. */
function Past({ view, turns }) {
  const told = turns.reduce((sum, turn) => sum + 1 + (turn.messages || []).length, 0);
  const opening = (view.messages || []).slice(0, Math.max(0, (view.messages || []).length - told));
  const range = colourRange([{ turns }], "logprob");
  const coloured = turns.some((turn) => (turn.tokens || []).length);
  return html`
    ${coloured ? html`<div class="controls"><span class="quiet">Colour: log-prob</span><${Legend} name="logprob" range=${range} /></div>` : null}
    ${opening.map((message, index) => html`<${MessageView} key=${`o${index}`} message=${message} />`)}
    ${turns.map((turn, index) => html`<section key=${index} class="turn" aria-label=${`Turn ${index + 1}`}>
      <div class="message from-assistant"><div class="who">${asText(turn.role) || "player"} <span class="quiet">turn ${index + 1}</span></div>
        ${(turn.tokens || []).length ? html`<${TokenText} turn=${turn} colouring="logprob" range=${range} label=${`Reply of turn ${index + 1}`} />` : html`<${RichText} text=${turn.text} />`}
        <div class="outcome"><span class=${`reward ${turn.reward > 0 ? "plus" : turn.reward < 0 ? "minus" : "zero"}`}>${signed(turn.reward)}</span></div></div>
      ${(turn.messages || []).map((message, place) => html`<${MessageView} key=${place} message=${message} />`)}
    </section>`)}`;
}

/** What a person can do: buttons, arrow keys, a line of text, tools. */
function Hand({ view, busy, onAct }) {
  const [text, setText] = useState("");
  const field = useRef(null);
  const actions = (view.actions || []).map(asText);
  const named = (word) => actions.find((action) => action.toLowerCase() === word);
  const play = (action) => busy || onAct(action);
  const keys = {};
  for (const [key, word] of Object.entries(ARROWS)) if (named(word)) keys[key] = () => play(named(word));
  actions.slice(0, 9).forEach((action, index) => {
    keys[String(index + 1)] = () => play(action);
  });
  useKeys(keys);
  const arrows = ["up", "left", "down", "right"].every(named);
  const say = (event) => {
    event.preventDefault();
    if (busy || !text.trim()) return;
    onAct(text);
    setText("");
  };
  return html`<div class="hand">
    ${actions.length && actions.length <= 60 ? html`<div class=${arrows && actions.length === 4 ? "pad" : "buttons"} role="group" aria-label="Actions">
      ${actions.map((action, index) => html`<button key=${action} type="button" disabled=${busy} class=${`act ${arrows ? `to-${action.toLowerCase()}` : ""}`} title=${index < 9 ? `Key ${index + 1}` : undefined} onClick=${() => play(action)}>${action}</button>`)}
    </div>` : null}
    <form onSubmit=${say} class="say">
      <input ref=${field} aria-label="Your reply" value=${text} placeholder=${actions.length ? "or type a reply" : "type a reply"} onInput=${(event) => setText(event.target.value)} />
      <button type="submit" disabled=${busy || !text.trim()}>Send</button>
    </form>
    ${(view.tools || []).length ? html`<details class="fold" open><summary>Tools</summary><ul class="tools">${view.tools.map((tool, index) => html`<${ToolRow} key=${index} tool=${tool} onUse=${(call) => (setText(call), field.current?.focus())} />`)}</ul></details>` : null}
    ${arrows ? html`<p class="quiet small">The arrow keys play too.</p>` : null}
  </div>`;
}

function ToolRow({ tool, onUse }) {
  const made = tool.function || tool;
  const names = Object.keys(made.parameters?.properties || {});
  return html`<li><button type="button" class="link mono" onClick=${() => onUse(`${asText(made.name)} ${names.map((name) => `${name}=`).join(" ")}`.trim())}>${asText(made.name)}(${names.join(", ")})</button>
    <span class="quiet small"> ${asText(made.description)}</span></li>`;
}

function Watch({ busy, failed, onAct, done, turns }) {
  const [auto, setAuto] = useState(false);
  const next = () => busy || done || onAct(null);
  useKeys({ n: next, " ": next });
  useEffect(() => {
    if (failed) setAuto(false); // a game that is gone is not asked for ever
  }, [failed]);
  useEffect(() => {
    if (!auto || failed || busy || done) return undefined;
    const timer = setTimeout(() => onAct(null), turns ? 900 : 0);
    return () => clearTimeout(timer);
  }, [auto, failed, busy, done, turns]);
  return html`<div class="hand"><button type="button" class="primary" disabled=${busy} onClick=${next}>${busy ? "Thinking…" : "Next turn"}</button>
    <${Check} label="play on by itself" checked=${auto} onChange=${setAuto} /></div>`;
}

/** The probabilities that led to the last reply, token by token. */
function NextTokens({ turn }) {
  const lists = turn.alternatives || [];
  const [at, setAt] = useState(0);
  if (!lists.length) return null;
  const place = Math.min(at, lists.length - 1);
  return html`<div class="card"><h3>Next-token probabilities</h3>
    <div class="chain" role="group" aria-label="Tokens of the reply">${(turn.tokens || []).slice(0, lists.length).map((token, index) => html`<button key=${index} type="button" class="mono" aria-pressed=${String(index === place)} onClick=${() => setAt(index)}>${asText(token.text) || "∅"}</button>`)}</div>
    <${Alternatives} list=${lists[place]} chosen=${turn.tokens?.[place]?.text} />
    ${lists.every((list) => list.length < 2) ? html`<p class="quiet small">The server gives logprobs of what was said, and no top_logprobs: what else could have been said is not known.</p>` : null}</div>`;
}

function Ending({ view, onAgain }) {
  const word = view.success === true ? "Won" : view.success === false ? "Lost" : "Over";
  return html`<div class=${`ending ${view.success === true ? "good" : view.success === false ? "bad" : ""}`} role="status">
    <span><b>${word}</b> after ${plural((view.turns || []).length, "turn")}, reward ${figure(view.reward ?? 0)}</span> <span class="quiet small">${asText(view.status).replaceAll("_", " ")}</span>
    <button type="button" class="primary" onClick=${onAgain}>Another game</button></div>`;
}
