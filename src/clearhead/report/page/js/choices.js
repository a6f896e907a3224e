// Choices: the three lists above the text that choose layer, head and query, and what can be chosen.

function drawChoices() {
  fill(byId("layer"), [["", "all"], ...look.layers.map((layer, row) => [String(row), String(layer)])]);
  fill(byId("head"), [["", "mean"], ...Array.from({ length: headCount }, (_, head) => [String(head), String(head)])]);
  fill(byId("query"), look.queries.map((q) => [String(q), `#${q} ${spelled(look.tokens[q])}`]));
  const chosen = () => [byId("layer"), byId("head")].map((list) => (list.value === "" ? null : Number(list.value)));
  byId("layer").addEventListener("change", () => chooseView(...chosen()));
  byId("head").addEventListener("change", () => {
    const [row, column] = chosen();
    chooseView(row ?? (column === null ? null : 0), column);
  });
  byId("query").addEventListener("change", (event) => chooseQuery(Number(event.target.value)));
  byId("tools").addEventListener("submit", (event) => event.preventDefault());
  byId("query").disabled = !look.queries.length;
  byId("query-hint").textContent = queryHint();
}

function fill(list, options) {
  for (const [value, label] of options) list.append(new Option(label, value));
}

/** Which tokens can be chosen as the query, and why the others cannot. */
function queryHint() {
  const parts = [];
  if (!look.queries.length) {
    parts.push("No token can be chosen as the query, and the text has no shades: this file holds no full weights.");
  } else if (look.queries.length === tokenCount) parts.push("Every token can be chosen as the query.");
  else {
    const those = count(look.queries.length, "query", "queries");
    parts.push(`Underlined tokens can be chosen as the query: ${those}, of which the full weights are in this file.`);
    parts.push("The other tokens cannot, because their weights were not kept.");
  }
  if (look.dropped) {
    const some = look.droppedFirst.map((q) => `#${q}`).join(", ") + (look.dropped > look.droppedFirst.length ? " \u2026" : "");
    parts.push(`Left out because the file would have grown beyond 15 MB: ${count(look.dropped, "earlier query", "earlier queries")} (${some}).`);
  }
  if (look.queries.length) parts.push("Numbers are exact to 0.002 percentage points.");
  parts.push("Keys in the text: \u2190 \u2192 token, \u2191 \u2193 query, Enter choose.");
  return parts.join(" ");
}

function paintChoices() {
  byId("layer").value = state.view.row === null ? "" : String(state.view.row);
  byId("head").value = state.view.column === null ? "" : String(state.view.column);
  if (state.query !== null) byId("query").value = String(state.query);
}
