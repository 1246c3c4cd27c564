// The list of episodes with its filters, and the groups of a step.
import { html, useEffect, useState, useRef, asText, exported, figure, get, go, isNumber, linkTo, plural, readRoute, runUrl, useGet, useKeys, waitingFor, Choice, Field, Note, Segments, StatusPill, SuccessMark } from "./base.js";

export const PAGE = 100;
export const MOST_MEMBERS = 1000;
const FILTERS = ["status", "env", "success", "min_reward", "max_reward", "text", "sort"];

/** The filter in an address, complete: split, step and the rest. */
export function filterOf(query, steps) {
  const split = query.split === "eval" || (query.split !== "step" && !steps?.step?.length && steps?.eval?.length) ? "eval" : "step";
  const known = steps?.[split] || [];
  const step = query.step || (known.length ? String(known[known.length - 1]) : "all");
  const filter = { split, step };
  for (const name of FILTERS) if (query[name]) filter[name] = query[name];
  return filter;
}

/** The answer of the list of episodes. An export filters what it carries itself. */
export async function askEpisodes(run, filter, { offset = 0, limit = PAGE } = {}) {
  if (!exported) return get(runUrl(run, "/episodes", { ...filter, offset, limit }));
  const answers = await storedAnswers(run, filter);
  const there = answers.flatMap((answer) => answer.episodes);
  const found = there.filter((one) => passes(one, run, filter)).sort(ORDERS[filter.sort] || ORDERS.order);
  return { total: found.length, episodes: found.slice(offset, offset + limit), statuses: countBy(there, "status"), envs: countBy(there, "env"), skipped: answers.flatMap((answer) => answer.skipped || []) };
}

/** The answers of an export, of one step or of all its steps. */
async function storedAnswers(run, filter) {
  const known = (await get(runUrl(run))).steps?.[filter.split] || [];
  const chosen = filter.step === "all" ? known : known.filter((step) => String(step) === String(filter.step));
  return Promise.all(chosen.map((step) => get(runUrl(run, "/episodes", { split: filter.split, step }))));
}

const ORDERS = {
  order: (a, b) => a.step - b.step || a.row - b.row,
  "-reward": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  reward: (a, b) => (a.reward ?? -Infinity) - (b.reward ?? -Infinity),
  "-tokens": (a, b) => b.tokens - a.tokens,
  "-turns": (a, b) => b.turns - a.turns,
};

function passes(one, run, filter) {
  if (filter.status && one.status !== filter.status) return false;
  if (filter.env && one.env !== filter.env) return false;
  if (filter.success === "yes" && one.success !== true) return false;
  if (filter.success === "no" && one.success !== false) return false;
  if (filter.min_reward && !(one.reward >= Number(filter.min_reward))) return false;
  if (filter.max_reward && !(one.reward <= Number(filter.max_reward))) return false;
  if (!filter.text) return true;
  const whole = exported[runUrl(run, "/episode", { split: one.split, step: one.step, row: one.row })];
  // The texts that the server searches: the system message is the same everywhere.
  const said = (messages) => (messages || []).filter((message) => message.role !== "system").map((message) => message.content);
  const texts = [one.task, one.error, one.first, ...(whole ? [...said(whole.prompt), ...whole.turns.flatMap((turn) => [turn.text, turn.action, ...said(turn.messages)])] : [])];
  return texts.some((text) => asText(text).toLowerCase().includes(filter.text.toLowerCase()));
}

function countBy(rows, name) {
  const counts = {};
  for (const row of rows) counts[row[name]] = (counts[row[name]] || 0) + 1;
  return counts;
}

/** The address of an episode: its place in the filtered list goes along, for the next one. */
export function episodeLink(run, one, filter, at) {
  const { split, step, ...rest } = filter || {};
  const query = { ...rest, ...(step === "all" ? { of: "all" } : {}), at };
  return linkTo(["run", run, one.split, String(one.step), String(one.row)], query);
}

/** The filter that an episode's address carries. */
export function filterOfEpisode(split, step, query) {
  const filter = { split, step: query.of === "all" ? "all" : step };
  for (const name of FILTERS) if (query[name]) filter[name] = query[name];
  return filter;
}

export function EpisodesView({ run, detail, query }) {
  const filter = filterOf(query, detail.steps);
  const offset = Number(query.offset) || 0;
  const grouped = query.view === "groups" && filter.step !== "all";
  // The filter is read when the change happens: an input acts a moment after it was typed into, and
  // another filter may have changed since.
  const change = (changes) => {
    const { parts, query: now } = readRoute();
    if (parts[0] !== "run" || parts[1] !== run || parts[2] !== "episodes") return; // the view was left
    const next = { ...filterOf(now, detail.steps), view: now.view, ...changes };
    go(linkTo(["run", run, "episodes"], next), { replace: true });
  };
  // The address names the step, so that the list does not move on under a person's hand.
  useEffect(() => {
    if (!query.step && filter.step !== "all") change({});
  }, [query.step, filter.step]);
  const known = detail.steps?.[filter.split] || [];
  // All steps of a live run become more.
  const key = JSON.stringify([filter, offset, filter.step === "all" ? known.length : null]);
  const state = useEpisodes(run, filter, offset, key);
  if (!(detail.steps?.step?.length || detail.steps?.eval?.length)) return html`<p class="quiet">${exported ? "No episodes are in this file." : "No episodes are stored yet."}</p>`;
  return html`<section aria-label="Episodes">
    <${FilterBar} filter=${filter} known=${known} answer=${state.data} change=${change} grouped=${grouped} />
    ${state.error ? html`<${Note} kind="error">${state.error}<//>` : null}
    ${grouped
      ? html`<${GroupList} run=${run} filter=${filter} />`
      : html`<${EpisodeTable} run=${run} filter=${filter} failed=${state.error !== null} answer=${state.data} offset=${offset} change=${change} />`}
  </section>`;
}

function useEpisodes(run, filter, offset, key, limit = PAGE) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    let over = false;
    let timer = 0;
    async function ask() {
      try {
        const data = await askEpisodes(run, filter, { offset, limit });
        if (over) return;
        setState({ data, error: null });
        // A long run's files are indexed in the background.
        if (data.indexed && data.indexed.files < data.indexed.of) timer = setTimeout(ask, 1000);
      } catch (error) {
        if (!over) setState({ data: null, error: error.message });
      }
    }
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [run, key]);
  return state;
}

function FilterBar({ filter, known, answer, change, grouped }) {
  // A value that no episode of this step has is offered too while it filters.
  function counts(table, used) {
    const found = Object.entries(table || {});
    if (used && !found.some(([name]) => name === used)) found.push([used, table ? 0 : "…"]);
    return found.map(([name, count]) => [name, `${name.replaceAll("_", " ")} (${count})`]);
  }
  const place = known.indexOf(Number(filter.step));
  const statuses = counts(answer?.statuses, filter.status);
  const envs = counts(answer?.envs, filter.env);
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
    <${Segments} label="Split" value=${filter.split} options=${[["step", "Training"], ["eval", "Evaluation"]]} onChange=${(split) => change({ split, step: "" })} />
    <div class="stepper">
      <${Choice} label="Step" value=${filter.step} options=${[["all", "all"], ...known.map((step) => [String(step), String(step)])]} onChange=${(step) => change({ step })} />
      <button type="button" aria-label="Earlier step" disabled=${place <= 0} onClick=${() => change({ step: String(known[place - 1]) })}>‹</button>
      <button type="button" aria-label="Later step" disabled=${place < 0 || place >= known.length - 1} onClick=${() => change({ step: String(known[place + 1]) })}>›</button>
    </div>
    <${Segments} label="View" value=${grouped ? "groups" : "list"} options=${[["list", "List"], ["groups", "Groups"]]}
      onChange=${(view) => change({ view: view === "list" ? "" : view, ...(filter.step === "all" && view === "groups" ? { step: String(known[known.length - 1]) } : {}) })} />
    ${grouped ? null : html`<${Late} label="Text" type="search" placeholder="in replies and messages" value=${filter.text || ""} onChange=${(text) => change({ text })} wide />
      <${MoreFilters}>
      <${Choice} label="Status" value=${filter.status || ""} options=${[["", "any"], ...statuses]} onChange=${(status) => change({ status })} />
      ${envs.length > 1 || filter.env ? html`<${Choice} label="Environment" value=${filter.env || ""} options=${[["", "any"], ...envs]} onChange=${(env) => change({ env })} />` : null}
      <${Choice} label="Success" value=${filter.success || ""} options=${[["", "any"], ["yes", "yes"], ["no", "no"]]} onChange=${(success) => change({ success })} />
      <${Late} label="Reward from" type="number" value=${filter.min_reward || ""} onChange=${(min_reward) => change({ min_reward })} />
      <${Late} label="to" type="number" value=${filter.max_reward || ""} onChange=${(max_reward) => change({ max_reward })} />
      <${Choice} label="Sort by" value=${filter.sort || "order"} options=${[["order", "order"], ["-reward", "best reward"], ["reward", "worst reward"], ["-tokens", "most tokens"], ["-turns", "most turns"]]} onChange=${(sort) => change({ sort: sort === "order" ? "" : sort })} />
      <//>`}
  </form>`;
}

/** Filters that a narrow window folds away. */
function MoreFilters({ children }) {
  const [narrow] = useState(() => matchMedia("(max-width: 620px)").matches);
  return narrow ? html`<details class="fold"><summary>More filters</summary><div class="inside filters-row">${children}</div></details>` : children;
}

/** An input whose change counts a moment after the last key. */
function Late({ label, type, value, placeholder, onChange, wide }) {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  useEffect(() => {
    if (!timer.current) setText(value);  // what is being typed is newer
  }, [value]);
  const latest = useRef(null);
  latest.current = onChange;
  const typed = useRef("");
  function count() {
    clearTimeout(timer.current);
    timer.current = 0;
    latest.current(typed.current);
  }
  // What was typed a moment before this went away counts too.
  useEffect(() => () => timer.current && count(), []);
  function type_(event) {
    typed.current = event.target.value;
    setText(typed.current);
    clearTimeout(timer.current);
    timer.current = setTimeout(count, 300);
  }
  return html`<${Field} label=${label} wide=${wide}><input type=${type} step="any" value=${text} placeholder=${placeholder} onInput=${type_} /><//>`;
}

function EpisodeTable({ run, filter, failed, answer, offset, change }) {
  const [at, setAt] = useState(0);
  const body = useRef(null);
  const rows = answer?.episodes || [];
  const focus = (index) => {
    const next = Math.max(0, Math.min(rows.length - 1, index));
    setAt(next);
    body.current?.querySelectorAll("a.open")[next]?.focus();
  };
  useKeys({ j: () => focus(document.activeElement?.closest("tbody") ? at + 1 : at), k: () => focus(at - 1) });
  if (!answer) return failed ? null : html`<p class="quiet" role="status">Loading episodes…</p>`;
  const most = Math.max(...rows.map((one) => Math.abs(one.reward ?? 0)), 1e-9);
  return html`
    <p class="count" role="status">${plural(answer.total, "episode")}${answer.total > PAGE ? `, ${offset + 1} to ${Math.min(offset + PAGE, answer.total)}` : ""}${indexing(answer)}</p>
    ${(answer.skipped || []).map((words, index) => html`<${Note} key=${index} kind="warn">${asText(words)}<//>`)}
    ${rows.length ? html`<div class="scroll"><table class="list episodes">
      <thead><tr><th>Episode</th>${filter.step === "all" ? html`<th>Step</th>` : null}<th class="number spare">Group</th><th class="spare">Status</th><th>Won</th><th class="number">Reward</th><th class="number">Turns</th><th class="number spare">Tokens</th><th>First reply</th></tr></thead>
      <tbody ref=${body}>
        ${rows.map((one, index) => html`<tr key=${`${one.step}/${one.row}`} onClick=${(event) => event.target.closest("a") || go(episodeLink(run, one, filter, offset + index))}>
          <td><a class="open" href=${episodeLink(run, one, filter, offset + index)} onFocus=${() => setAt(index)}>${asText(one.id)}</a></td>
          ${filter.step === "all" ? html`<td>${one.step}</td>` : null}
          <td class="number spare">${asText(one.group)}</td>
          <td class="spare"><${StatusPill} status=${one.status} error=${one.error} /></td>
          <td><${SuccessMark} success=${one.success} /></td>
          <td class="number"><${RewardBar} reward=${one.reward} most=${most} /></td>
          <td class="number">${one.turns}${one.contexts > 1 ? html` <span class="quiet" title="contexts">/ ${one.contexts}</span>` : null}</td>
          <td class="number spare">${one.tokens}</td>
          <td class="mono first">${asText(one.first)}</td>
        </tr>`)}
      </tbody></table></div>` : html`<p class="quiet">No episode passes these filters.</p>`}
    ${answer.total > PAGE ? html`<nav class="pages" aria-label="Pages">
      <button type="button" disabled=${offset === 0} onClick=${() => change({ offset: Math.max(0, offset - PAGE) || "" })}>‹ Earlier</button>
      <button type="button" disabled=${offset + PAGE >= answer.total} onClick=${() => change({ offset: offset + PAGE })}>Later ›</button>
    </nav>` : null}`;
}

const indexing = ({ indexed }) => (indexed && indexed.files < indexed.of ? ` in ${indexed.files} of ${indexed.of} files; the others are being read` : "");

export function RewardBar({ reward, most }) {
  const share = isNumber(reward) ? Math.min(1, Math.abs(reward) / most) : 0;
  return html`<span class="reward-bar"><span class="meter" aria-hidden="true"><i class=${reward < 0 ? "minus" : ""} style=${{ width: `${Math.round(share * 100)}%` }}></i></span><span class="number">${figure(reward)}</span></span>`;
}

function GroupList({ run, filter }) {
  const state = useGet(runUrl(run, "/groups", { split: filter.split, step: filter.step }));
  const list = useEpisodes(run, { split: filter.split, step: filter.step }, 0, JSON.stringify([filter.split, filter.step]), MOST_MEMBERS);
  const [sort, setSort] = useState("order");
  const [picked, setPicked] = useState([]); // {group, row}
  const waiting = waitingFor(state, "groups");
  if (waiting) return waiting;
  const groups = [...state.data.groups];
  if (sort === "spread") groups.sort((a, b) => (b.reward_std ?? 0) - (a.reward_std ?? 0));
  if (sort === "reward") groups.sort((a, b) => (b.reward_mean ?? 0) - (a.reward_mean ?? 0));
  const flat = state.data.groups.filter((one) => one.episodes.length > 1 && !(one.reward_std > 0)).length;
  function pick(group, row) {
    const same = picked.filter((one) => one.group === group);
    if (same.some((one) => one.row === row)) setPicked(same.filter((one) => one.row !== row));
    else setPicked([...same, { group, row }].slice(-2));
  }
  const member = new Map((list.data?.episodes || []).map((one) => [one.row, one]));
  const beside = (first, second) => linkTo(["run", run, filter.split, filter.step, String(first)], { with: second });
  return html`
    <div class="controls">
      <p class="count" role="status">${plural(groups.length, "group")}${flat ? `, ${flat} without variance (no signal for group-relative advantages)` : ""}. Pick two episodes of a group to see them side by side.</p>
      <${Choice} label="Sort by" value=${sort} options=${[["order", "order"], ["spread", "spread of rewards"], ["reward", "mean reward"]]} onChange=${setSort} />
    </div>
    ${(state.data.skipped || []).map((words, index) => html`<${Note} key=${index} kind="warn">${asText(words)}<//>`)}
    <ul class="groups">
      ${groups.map((one) => html`<li key=${one.group} class="card">
        <div class="row"><b class="name">Group ${asText(one.group)}</b> <span class="quiet mono clip" title=${asText(one.task)}>${asText(one.task)}</span></div>
        <div class="row quiet">reward ${figure(one.reward_mean)} ± ${figure(one.reward_std)}${isNumber(one.success) ? ` · success ${Math.round(100 * one.success)} %` : ""}</div>
        <div class="row picks">
          ${one.episodes.map((row) => html`<span key=${row} class="pick">
            <input type="checkbox" aria-label=${`Pick episode ${row}`} checked=${picked.some((other) => other.row === row)} onChange=${() => pick(one.group, row)} />
            <a class="chip" href=${linkTo(["run", run, filter.split, filter.step, String(row)])} title=${`Episode ${row}`}>${member.has(row)
              ? html`${member.get(row).success === null ? null : html`<${SuccessMark} success=${member.get(row).success} /> `}${figure(member.get(row).reward)}` : row}</a></span>`)}
          ${picked.length === 2 && picked[0].group === one.group ? html`<a class="button" href=${beside(picked[0].row, picked[1].row)}>Side by side</a>` : null}
        </div>
      </li>`)}
    </ul>`;
}
