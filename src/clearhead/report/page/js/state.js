// State: what is chosen, and who wants to hear of it.

/**
 * A view is a head (row and column of the grid), the mean of a layer (column null) or of all (both null).
 * `shown` is what the grid shows: a source number, "entropy", or how the heads moved: "before", "after".
 */
const state = {
  view: { row: null, column: null },
  query: look.queries.length ? look.queries[look.queries.length - 1] : null,
  shown: 0,
};

const listeners = { view: [], query: [], shown: [] };

function onChange(names, listener) {
  for (const name of names) listeners[name].push(listener);
}

function tell(names) {
  for (const listener of new Set(names.flatMap((name) => listeners[name]))) listener();
}

function chooseView(row, column) {
  state.view = { row, column: row === null ? null : column };
  tell(["view"]);
}

function chooseQuery(position) {
  if (!look.queries.includes(position)) return;
  state.query = position;
  tell(["query"]);
}

function chooseShown(shown) {
  state.shown = shown;
  tell(["shown"]);
}

/** The view in words. Layers by their own number, which need not start at 0. */
function viewName(view = state.view) {
  if (view.row === null) return "mean of all heads";
  if (view.column === null) return `mean of layer ${look.layers[view.row]}`;
  return `layer ${look.layers[view.row]}, head ${view.column}`;
}
