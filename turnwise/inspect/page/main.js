// The page: a bar, and the view that the address names.
import { html, render, useEffect, useErrorBoundary, exported, go, linkTo, useRoute, Note } from "./base.js";
import { EpisodeView } from "./episode.js";
import { PlayView } from "./play.js";
import { CompareView, RunView, RunsView } from "./runs.js";

function routed({ parts, query }) {
  const [room, name, third, fourth, fifth] = parts;
  if (room === "run" && name && fifth !== undefined) return html`<${EpisodeView} run=${name} split=${third} step=${fourth} row=${fifth} query=${query} />`;
  if (room === "run" && name) return html`<${RunView} key=${name} run=${name} tab=${third || ""} query=${query} />`;
  if (room === "compare" && name) return html`<${CompareView} key=${location.hash} runs=${comparedRuns()} />`;
  if (room === "play" && !exported) return html`<${PlayView} query=${query} />`;
  if (room === undefined) return html`<${RunsView} />`;
  return html`<${Note} kind="error">There is no such page. <a href="#/">All runs</a><//>`;
}

// A name may contain a comma: the address is split before it is decoded.
const comparedRuns = () => location.hash.replace(/^#\/compare\//, "").split("?")[0].split(",").filter(Boolean).map(decodeURIComponent);

/** [[label, address]] from the runs to here. */
function crumbs({ parts }) {
  const [room, name, third, fourth, fifth] = parts;
  if (room === "compare") return [["compare"]];
  if (room !== "run" || !name) return [];
  const made = [[name, linkTo(["run", name])]];
  if (fifth === undefined) return third ? [...made, [third]] : made;
  made.push([`${third === "eval" ? "evaluation" : "step"} ${fourth}`, linkTo(["run", name, "episodes"], { split: third, step: fourth })]);
  return [...made, [`episode ${fifth}`]];
}

function App() {
  const route = useRoute();
  const [problem, forget] = useErrorBoundary((error) => console.error(error));
  const trail = crumbs(route);
  useEffect(() => {
    document.title = ["turnwise", ...trail.map(([label]) => label)].reverse().join(" · ");
  });
  useEffect(() => {
    if (problem) addEventListener("hashchange", forget, { once: true });
  }, [problem]);
  const note = exported?.export?.note;
  return html`
    <a class="skip" href="#content" onClick=${(event) => (event.preventDefault(), document.getElementById("content").focus())}>To the content</a>
    <header class="top">
      <nav aria-label="Main">
        <a class="brand" href="#/">turnwise</a>
        <ol class="crumbs">${trail.map(([label, address], index) => html`<li key=${index}>${address && index < trail.length - 1 ? html`<a href=${address}>${label}</a>` : html`<span aria-current="page">${label}</span>`}</li>`)}</ol>
        <span class="grow"></span>
        ${exported ? html`<span class="quiet small">${exported.export?.running ? "written while the run went on" : "exported"}</span>`
          : html`<a href="#/" aria-current=${route.parts.length ? undefined : "page"}>Runs</a><a href="#/play" aria-current=${route.parts[0] === "play" ? "page" : undefined}>Play</a>`}
      </nav>
    </header>
    <main id="content" tabindex="-1">
      ${note ? html`<p class="quiet small">${note}</p>` : null}
      ${problem ? html`<${Note} kind="error">This view failed: ${problem.message}<//>` : routed(route)}
    </main>`;
}

if (exported?.export?.start && !location.hash) go(exported.export.start, { replace: true });
render(html`<${App} />`, document.getElementById("app"));
