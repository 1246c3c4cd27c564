// Messages, and boards as an environment draws them: a grid of signs or numbers, one cell each.
import { html, asText, LongText } from "./base.js";

const SIGNS = {
  P: ["player", "player"], Q: ["player", "player with the key"], "@": ["player", "player"],
  G: ["goal", "goal"], V: ["won", "player at the goal"],
  K: ["key", "key"], D: ["door", "door"], "#": ["wall", "wall"],
  _: ["floor", "floor"], ".": ["floor", "floor"], " ": ["floor", "floor"], "-": ["floor", "floor"],
};
// The same signs mean other things where there are walls (Sokoban) and where there are none (a lake).
const WITH_WALLS = { O: ["target", "target"], X: ["box", "box"], "√": ["done", "box on a target"], S: ["player", "player on a target"] };
const WITHOUT_WALLS = { O: ["hole", "hole"], X: ["lost", "player in a hole"] };

// A cell is one sign, or a number (2048).
const isCell = (cell) => [...cell].length === 1 || /^\d{1,6}$/.test(cell);

/** Rows of cells, or null if the text is no grid. */
export function parseBoard(text) {
  const lines = asText(text).replace(/\n+$/, "").split("\n");
  if (lines.length < 2 || lines.length > 40) return null;
  const spaced = lines.map((line) => line.trim().split(/\s+/));
  if (spaced[0].length >= 2 && spaced.every((row) => row.length === spaced[0].length && row.every(isCell))) return spaced;
  const packed = lines.map((line) => [...line]);
  const known = (cell) => Object.hasOwn(SIGNS, cell) || Object.hasOwn(WITH_WALLS, cell);
  if (packed[0].length >= 3 && packed.every((row) => row.length === packed[0].length && row.every(known))) return packed;
  return null;
}

export function Board({ text, label = "board", small = false }) {
  const rows = parseBoard(text);
  if (!rows) return text ? html`<pre class="drawing">${asText(text)}</pre>` : null;
  const walls = rows.some((row) => row.includes("#"));
  const meaning = { ...SIGNS, ...(walls ? WITH_WALLS : WITHOUT_WALLS) };
  const of = (sign) => (Object.hasOwn(meaning, sign) ? meaning[sign] : ["other", sign]);
  const wide = rows.some((row) => row.some((sign) => sign.length > 2));
  // To a screen reader the board is its text.
  return html`<div class=${`board${small ? " small" : ""}${wide ? " wide" : ""}`} role="img" aria-label=${`${label}: ${rows.map((row) => row.join(" ")).join(", ")}`}>
    ${rows.map((row, y) => html`<div class="board-row" key=${y}>
      ${row.map((sign, x) => html`<span key=${x} class=${`cell ${of(sign)[0]}`} title=${of(sign)[1]}>${of(sign)[0] === "floor" ? "" : sign}</span>`)}
    </div>`)}
  </div>`;
}

/** A text, in which blocks that are boards are drawn, and columns and frames keep their widths. */
export function RichText({ text }) {
  const whole = asText(text);
  return html`<${LongText} text=${whole}>${(shown) => splitBoards(shown).map((part, index) =>
    part.board ? html`<${Board} key=${index} text=${part.text} small />` : splitDrawings(part.text).map((piece, place) =>
      piece.drawing ? html`<pre key=${`${index}-${place}`} class="drawing">${piece.text}</pre>` : html`<div key=${`${index}-${place}`} class="prose">${piece.text}</div>`))}<//>`;
}

/** [{board, text}]: runs of lines that form a board, and what is between them. */
export function splitBoards(text) {
  const parts = [];
  for (const block of text.split(/\n{2,}/)) {
    const lines = block.split("\n");
    let begin = 0;
    while (begin < lines.length) {
      let end = Math.min(lines.length, begin + 40);
      // The longest board that begins here; most texts fail at their first line.
      while (end > begin + 1 && !(looksLikeRow(lines[begin]) && parseBoard(lines.slice(begin, end).join("\n")))) {
        if (!looksLikeRow(lines[begin])) {
          end = begin + 1;
          break;
        }
        end -= 1;
      }
      const board = end > begin + 1;
      const piece = lines.slice(begin, end).join("\n");
      const last = parts[parts.length - 1];
      if (!board && last && !last.board) last.text += (begin === 0 ? "\n\n" : "\n") + piece;
      else parts.push({ board, text: piece });
      begin = end;
    }
  }
  return parts;
}

const isDrawn = (line) => line.length <= 120 && /\S {2,}\S|(^|[^|])\|([^|]|$)/.test(line);

/** [{drawing, text}]: blocks from a line with columns or frames to the last such line, and what is between them. */
export function splitDrawings(text) {
  const lines = text.split("\n");
  const parts = [];
  let done = 0;
  for (let begin = 0; begin < lines.length; begin += 1) {
    if (!isDrawn(lines[begin])) continue;
    let end = begin;
    for (let next = begin + 1; next < lines.length && lines[next].trim() && lines[next].length <= 120; next += 1) if (isDrawn(lines[next])) end = next;
    if (end === begin) continue;
    if (begin > done) parts.push({ drawing: false, text: lines.slice(done, begin).join("\n") });
    parts.push({ drawing: true, text: lines.slice(begin, end + 1).join("\n") });
    done = end + 1;
    begin = end;
  }
  if (done < lines.length) parts.push({ drawing: false, text: lines.slice(done).join("\n") });
  return parts;
}

const looksLikeRow = (line) => line.length <= 120 && (/^\s*(\S|\d{1,6})(\s+(\S|\d{1,6}))+\s*$/.test(line) || /^[#_.OXPS√@ -]{3,}$/.test(line));

export function MessageView({ message }) {
  const role = asText(message.role) || "message";
  return html`<div class=${`message from-${/^[a-z]+$/.test(role) ? role : "other"}`}>
    <div class="who">${role}${message.name ? html` <span class="quiet">${asText(message.name)}</span>` : null}</div>
    ${message.content ? html`<${RichText} text=${message.content} />` : null}
    ${(message.tool_calls || []).map((call, index) => html`<div key=${index} class="call"><b>${asText(call.name)}</b>(${asText(call.arguments)})</div>`)}
  </div>`;
}
