// Grid: one cell for each head, layers downwards, for one source at a time or for the entropy.
//
// Row 0 and column 0 of `cells` are headers: the corner stands for all heads, a layer number for the mean of
// its layer. The cell that is chosen is the one that the Tab key reaches; arrows move and choose.

const cells = []; // (layers + 1) × (heads + 1)

function drawGrid() {
  const grid = byId("grid");
  grid.style.setProperty("--heads", String(headCount));
  for (let r = 0; r <= layerCount; r++) {
    const row = make("div", "row");
    row.setAttribute("role", "row");
    cells.push([]);
    for (let c = 0; c <= headCount; c++) {
      const cell = make("span", r && c ? "cell" : "label", r ? (c ? "" : String(look.layers[r - 1])) : c ? headLabel(c - 1) : "all");
      cell.setAttribute("role", r && c ? "gridcell" : r ? "rowheader" : "columnheader");
      if (!r && c) cell.setAttribute("aria-label", `head ${c - 1}`);
      if (r && !c) cell.setAttribute("aria-label", `mean of layer ${look.layers[r - 1]}`);
      if (!r && !c) cell.setAttribute("aria-label", "mean of all heads");
      if (r || !c) cell.dataset.at = `${r},${c}`;
      cells[r].push(cell);
      row.append(cell);
    }
    grid.append(row);
  }
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-at]");
    if (cell) chooseCell(...cell.dataset.at.split(",").map(Number));
  });
  grid.addEventListener("keydown", moveInGrid);
  drawGridSources();
}

/** Head numbers, thinned out where they would touch. */
function headLabel(head) {
  const every = headCount <= 16 ? 1 : headCount <= 40 ? 4 : 8;
  return head % every ? "" : String(head);
}

function chooseCell(r, c) {
  chooseView(r ? r - 1 : null, c ? c - 1 : null);
  chosenCell().focus();
}

function chosenCell() {
  return cells[state.view.row === null ? 0 : state.view.row + 1][state.view.column === null ? 0 : state.view.column + 1];
}

function moveInGrid(event) {
  const at = event.target.closest("[data-at]");
  if (!at) return;
  let [r, c] = at.dataset.at.split(",").map(Number);
  if (event.key === "ArrowUp") r -= 1;
  else if (event.key === "ArrowDown") r += 1;
  else if (event.key === "ArrowLeft") c -= 1;
  else if (event.key === "ArrowRight") c += 1;
  else if (event.key === "Home") c = 0;
  else if (event.key === "End") c = headCount;
  else if (event.key === "PageUp") r -= 5;
  else if (event.key === "PageDown") r += 5;
  else return;
  event.preventDefault();
  c = Math.max(0, Math.min(headCount, c));
  r = Math.max(c ? 1 : 0, Math.min(layerCount, r));
  if (r === 0) c = 0;
  chooseCell(r, c);
}

function drawGridSources() {
  const group = byId("grid-source");
  const options = [...look.sources.keys(), "entropy"];
  for (const shown of options) {
    const chip = make("button", "chip", shown === "entropy" ? make("span", "", "entropy") : nameTag(look.sources[shown].name));
    chip.type = "button";
    chip.setAttribute("role", "radio");
    chip.dataset.shown = String(shown);
    chip.addEventListener("click", () => chooseShown(shown));
    group.append(chip);
  }
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    chooseShown(options[(options.indexOf(state.shown) + step + options.length) % options.length]);
    group.querySelector('[aria-checked="true"]').focus();
  });
}

function paintGrid() {
  const entropy = state.shown === "entropy";
  const valueAt = entropy ? entropyAt : (row, column) => massAt(state.shown, row, column);
  const say = (value) => (value === null ? "\u2013" : entropy ? `${value.toFixed(2)} nats` : percent(value));
  let low = Infinity, high = 0;
  for (let row = 0; row < layerCount; row++) {
    for (let column = 0; column < headCount; column++) {
      low = Math.min(low, valueAt(row, column) ?? Infinity);
      high = Math.max(high, valueAt(row, column) ?? 0);
    }
  }
  for (let row = 0; row < layerCount; row++) {
    for (let column = 0; column < headCount; column++) {
      const cell = cells[row + 1][column + 1], value = valueAt(row, column);
      cell.className = `cell s${shadeOf(value, low, high)}`;
      const label = `layer ${look.layers[row]}, head ${column}: ${say(value)}`;
      cell.title = label;
      cell.setAttribute("aria-label", label);
    }
  }
  const name = entropy ? "" : look.sources[state.shown].name;
  drawLegend(byId("grid-legend"), say(Number.isFinite(low) ? low : null), say(high), [
    entropy
      ? "Entropy of a head's weights, mean over the queries of the table: low looks at few tokens, high at many. Shade by the square root, from the least to the most."
      : `Share of each head\u2019s attention that goes to \u201c${name}\u201d, mean over the queries of the table. Shade by the square root, from the least to the most.`,
  ]);
  for (const chip of byId("grid-source").children) {
    const checked = chip.dataset.shown === String(state.shown);
    chip.setAttribute("aria-checked", String(checked));
    chip.tabIndex = checked ? 0 : -1;
  }
}

let markedCell = null;

function paintChosenCell() {
  if (markedCell) {
    markedCell.removeAttribute("aria-selected");
    markedCell.tabIndex = -1;
  }
  markedCell = chosenCell();
  markedCell.setAttribute("aria-selected", "true");
  markedCell.tabIndex = 0;
}
