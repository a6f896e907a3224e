// Grid: one cell for each head, layers downwards, for one source at a time, the entropy, or
// how far the head moved (guard).
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
  const options = [...look.sources.keys(), "entropy", ...guardGrids()];
  for (const shown of options) {
    const words = GRID_NAMES[shown];
    const chip = make("button", "chip", words ? make("span", "", words) : nameTag(look.sources[shown].name));
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

const GRID_NAMES = { entropy: "entropy", before: "moved", after: "moved, sentence hidden" };

/** What the grid shows: the value of each head, how it is said, ends of the scale if they are fixed, remark. */
function gridOf(shown) {
  if (shown === "entropy") {
    return {
      valueAt: entropyAt,
      say: (value) => `${value.toFixed(2)} nats`,
      remark: "Entropy of a head\u2019s weights, mean over the queries of the table: low looks at few tokens, high at many. Shade by the square root, from the least to the most.",
    };
  }
  if (GRID_NAMES[shown]) {
    return {
      valueAt: (row, column) => moveAt(shown, row, column),
      say: signed,
      ends: [0, mostMoved()],
      outlined: (value) => value >= MOVED,
      remark: movesRemark(shown),
    };
  }
  return {
    valueAt: (row, column) => massAt(shown, row, column),
    say: percent,
    remark: `Share of each head\u2019s attention that goes to \u201c${look.sources[shown].name}\u201d, mean over the queries of the table. Shade by the square root, from the least to the most.`,
  };
}

function paintGrid() {
  const { valueAt, say, ends, outlined, remark } = gridOf(state.shown);
  const said = (value) => (value === null ? "\u2013" : say(value));
  let [low, high] = ends ?? [Infinity, 0];
  for (let row = 0; row < layerCount && !ends; row++) {
    for (let column = 0; column < headCount; column++) {
      low = Math.min(low, valueAt(row, column) ?? Infinity);
      high = Math.max(high, valueAt(row, column) ?? 0);
    }
  }
  for (let row = 0; row < layerCount; row++) {
    for (let column = 0; column < headCount; column++) {
      const cell = cells[row + 1][column + 1], value = valueAt(row, column);
      cell.className = `cell s${shadeOf(value, low, high)}`;
      cell.toggleAttribute("data-moved", Boolean(outlined?.(value)));
      const label = `layer ${look.layers[row]}, head ${column}: ${said(value)}`;
      cell.title = label;
      cell.setAttribute("aria-label", label);
    }
  }
  drawLegend(byId("grid-legend"), said(Number.isFinite(low) ? low : null), said(high), [remark]);
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
