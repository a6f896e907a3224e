// Table: what each source got. The first token stands apart, below the others.

const COLUMNS = ["Source", "Tokens", "Attention", "Per token", "Head output", "Looks most at it"];

function drawTable() {
  const table = byId("sources");
  const groups = [make("tbody"), make("tbody", "apart")];
  groups.forEach((group) => group.setAttribute("role", "rowgroup"));
  look.sources.forEach((source, i) => groups[source.role === "sink" ? 1 : 0].append(sourceRow(source, i)));
  if (groups[1].childElementCount) {
    const why = make("td", "", "Apart: the first token draws strong attention in most models, whatever it says.");
    why.colSpan = COLUMNS.length;
    why.setAttribute("role", "cell");
    const row = make("tr", "why", why);
    row.setAttribute("role", "row");
    groups[1].prepend(row);
  } else groups.pop();
  table.append(tableHead(COLUMNS, {
    "Per token": "Attention per token against the average over all tokens: 1 is average",
    "Head output": "Share of the length of the heads' output vectors that comes from this source",
  }), ...groups);
}

/** The head of a table; titles explain columns by name. */
function tableHead(columns, titles) {
  const row = make("tr");
  row.setAttribute("role", "row");
  for (const name of columns) {
    const cell = make("th", "", name);
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    if (titles[name]) cell.title = titles[name];
    row.append(cell);
  }
  const head = make("thead", "", row);
  head.setAttribute("role", "rowgroup");
  return head;
}

/** A row of cells; the first one names it. */
function tableRow(contents, columns) {
  const row = make("tr");
  row.setAttribute("role", "row");
  contents.forEach((content, i) => {
    const cell = make(i ? "td" : "th", "", content);
    cell.setAttribute("role", i ? "cell" : "rowheader");
    if (i) cell.dataset.label = columns[i];
    else cell.scope = "row";
    row.append(cell);
  });
  return row;
}

function sourceRow(source, index) {
  const heads = make("span", "chips");
  for (const [layer, head, mass] of source.heads) {
    heads.append(headChip(layer, head, percent(mass), `${percent(mass)} of its attention`, index));
  }
  const name = make("span", "who", nameTag(source.name));
  if (roleName(source.role) !== source.name && !["sink", "template"].includes(source.role)) {
    name.append(make("span", "role", source.role));
  }
  name.append(trustBadge(source));
  return tableRow([
    name,
    make("span", "number", source.tokens.toLocaleString("en")),
    make("span", "measure", make("span", "number", percent(source.mass)), bar(source.mass)),
    make("span", "number", times(source.perToken)),
    make("span", "measure", make("span", "number", percent(source.output)), bar(source.output)),
    heads,
  ], COLUMNS);
}

/** A button that chooses a head, if the head is among the layers looked at. */
function headChip(layer, head, said, label, shown) {
  const row = look.layers.indexOf(layer);
  const name = `L${layer} H${head}`;
  if (row < 0 || head < 0 || head >= headCount) return make("span", "chip idle", name);
  const chip = make("button", "chip", make("span", "", name), make("span", "dim", said));
  chip.type = "button";
  chip.dataset.head = `${row}:${head}`;
  chip.setAttribute("aria-label", `Layer ${layer}, head ${head}: ${label}`);
  chip.addEventListener("click", () => {
    chooseShown(shown);
    chooseView(row, head);
  });
  return chip;
}

function paintTable() {
  const chosen = `${state.view.row}:${state.view.column}`;
  for (const chip of document.querySelectorAll(".chip[data-head]")) {
    chip.setAttribute("aria-pressed", String(chip.dataset.head === chosen));
  }
}
