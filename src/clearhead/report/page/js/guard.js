// Guard: its verdict, each untrusted source against benign texts as long, what pulled, the heads that moved.

const GUARD_COLUMNS = ["Untrusted source", "Verdict", "Score", "Read", "Attention", "Benign, as long"];

/** Heads from this many standard deviations of benign texts on are said to have moved. */
const MOVED = 2;

function drawGuard() {
  const guard = look.guard;
  byId("guard").hidden = !guard;
  if (!guard) return;
  const verdict = make("span", `verdict ${guard.verdict}`, guard.verdict);
  byId("guard-verdict").append(verdict, make("span", "", `score ${guard.score.toFixed(2)}`));
  if (guard.reason) byId("guard-verdict").append(make("span", "", guard.reason));
  const limits = guard.thresholds;
  byId("guard-limits").append(make("span", "",
    `Preset ${guard.preset}: flag from ${limits.flag.toFixed(2)} (${percent(limits.flagFpr)} false alarms), `
    + `block from ${limits.block.toFixed(2)} (${percent(limits.blockFpr)}), measured on `
    + `${count(limits.benign, "benign text")} (${limits.fixedOn}). Calibration ${guard.calibration}.`));
  for (const note of guard.notes) byId("guard-notes").append(make("li", "", note));
  byId("guard-notes").hidden = !guard.notes.length;
  drawGuardSources(guard);
  byId("guard-spans").append(...guard.spans.map(pullRow));
  for (const [layer, head, moved] of guard.heads) {
    const after = movedAfter(layer, head);
    const said = after === null ? signed(moved) : `${signed(moved)} \u2192 ${signed(after)}`;
    byId("guard-heads").append(headChip(layer, head, said, `moved by ${said} standard deviations`, "before"));
  }
  if (!guard.heads.length) byId("guard-heads").append(make("span", "dim", "None moved by as much as 2."));
  markPulled(guard);
}

function drawGuardSources(guard) {
  const body = make("tbody");
  body.setAttribute("role", "rowgroup");
  for (const source of guard.sources) {
    body.append(tableRow([
      make("span", "who", nameTag(source.name)),
      make("span", `verdict ${source.verdict}`, source.verdict),
      make("span", "number", source.score.toFixed(2)),
      make("span", "number", percent(source.read)),
      make("span", "measure", make("span", "number", percent(source.mass)), bar(source.mass)),
      make("span", "measure", make("span", "number", percent(source.baseline)), bar(source.baseline)),
    ], GUARD_COLUMNS));
  }
  byId("guard-sources").append(tableHead(GUARD_COLUMNS, {
    Attention: "Share of the attention of the token that the answer starts from, mean over all heads",
    "Benign, as long": "The same share for a benign text of as many tokens that stands alone, from the calibration",
  }), body);
}

/** A span in the list: its text, a button to its place if the prompt has it. */
function pullRow(span) {
  const quote = make("bdi", "quote", span.text);
  let where = quote;
  if (span.tokens.length) {
    where = make("button", "link", quote);
    where.type = "button";
    where.addEventListener("click", () => goToToken(span.tokens[0]));
  }
  const facts = `pull ${span.pull.toFixed(2)}, ${times(span.attention)} per token`;
  const name = make("span", "dim", nameTag(span.source, ""), `, line ${span.line}`);
  return make("li", span.marked ? "pulled" : "", where, name, make("span", "number", facts));
}

/** Mark in the text what there is an alarm for. */
function markPulled(guard) {
  for (const span of guard.spans) {
    if (!span.marked) continue;
    for (const position of span.tokens) {
      spans[position].dataset.pull = "";
      spans[position].title = `pulls the heads: pull ${span.pull.toFixed(2)}`;
    }
  }
}

function signed(value) {
  return value === null ? "\u2013" : `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(1)}`;
}

/** The move of a head of the grid, "before" or "after" hiding the strongest span. */
function moveAt(shown, row, column) {
  return look.guard[shown][row * headCount + column];
}

function movedAfter(layer, head) {
  const row = look.layers.indexOf(layer);
  return look.guard.after && row >= 0 ? moveAt("after", row, head) : null;
}

/** What the grid can show beside sources and entropy. */
function guardGrids() {
  return look.guard ? ["before", "after"].filter((shown) => look.guard[shown]) : [];
}

/** The most that a head moved, before or after: both grids have one scale. */
function mostMoved() {
  return Math.max(0, ...guardGrids().flatMap((shown) => look.guard[shown].filter((value) => value !== null)));
}

/** The legend of a grid of moves. */
function movesRemark(shown) {
  const hidden = shown === "after" ? ", with the strongest sentence hidden from every head" : "";
  return `How far each head moved from the instruction to the untrusted texts${hidden}, in standard deviations of `
    + `benign texts as long; from ${MOVED} on it counts as moved (outlined). Both grids have one scale. Shade by the square root, from 0.`;
}
