// Table: what each source got. The first token stands apart, below the others.

const COLUMNS = ["Source", "Tokens", "Attention", "Per token", "Head output", "Looks most at it"];

function drawTable() {
  const table = byId("sources");
  const head = make("tr");
  head.setAttribute("role", "row");
  for (const name of COLUMNS) {
    const cell = make("th", "", name);
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    if (name === "Per token") cell.title = "Attention per token against the average over all tokens: 1 is average";
    if (name === "Head output") cell.title = "Share of the length of the heads' output vectors that comes from this source";
    head.append(cell);
  }
  const groups = [make("thead"), make("tbody"), make("tbody", "apart")];
  groups.forEach((group) => group.setAttribute("role", "rowgroup"));
  groups[0].append(head);
  look.sources.forEach((source, i) => groups[source.role === "sink" ? 2 : 1].append(sourceRow(source, i)));
  if (groups[2].childElementCount) {
    const why = make("td", "", "Apart: the first token draws strong attention in most models, whatever it says.");
    why.colSpan = COLUMNS.length;
    why.setAttribute("role", "cell");
    const row = make("tr", "why", why);
    row.setAttribute("role", "row");
    groups[2].prepend(row);
  } else groups.pop();
  table.append(...groups);
}

function sourceRow(source, index) {
  const heads = make("span", "chips");
  for (const [layer, head, mass] of source.heads) heads.append(headChip(layer, head, mass, index));
  const name = make("span", "who", nameTag(source.name));
  if (roleName(source.role) !== source.name && !["sink", "template"].includes(source.role)) {
    name.append(make("span", "role", source.role));
  }
  name.append(trustBadge(source));
  const cells = [
    name,
    make("span", "number", source.tokens.toLocaleString("en")),
    make("span", "measure", make("span", "number", percent(source.mass)), bar(source.mass)),
    make("span", "number", times(source.perToken)),
    make("span", "measure", make("span", "number", percent(source.output)), bar(source.output)),
    heads,
  ];
  const row = make("tr");
  row.setAttribute("role", "row");
  cells.forEach((content, i) => {
    const cell = make(i ? "td" : "th", "", content);
    cell.setAttribute("role", i ? "cell" : "rowheader");
    if (i) cell.dataset.label = COLUMNS[i];
    else cell.scope = "row";
    row.append(cell);
  });
  return row;
}

/** A button that chooses a head, if the head is among the layers looked at. */
function headChip(layer, head, mass, source) {
  const row = look.layers.indexOf(layer);
  const label = `L${layer} H${head}`;
  if (row < 0 || head < 0 || head >= headCount) return make("span", "chip idle", label);
  const chip = make("button", "chip", make("span", "", label), make("span", "dim", percent(mass)));
  chip.type = "button";
  chip.dataset.head = `${row}:${head}`;
  chip.setAttribute("aria-label", `Layer ${layer}, head ${head}: ${percent(mass)} of its attention`);
  chip.addEventListener("click", () => {
    chooseShown(source);
    chooseView(row, head);
  });
  return chip;
}

function paintTable() {
  const chosen = `${state.view.row}:${state.view.column}`;
  for (const chip of document.querySelectorAll("#sources [data-head]")) {
    chip.setAttribute("aria-pressed", String(chip.dataset.head === chosen));
  }
}
