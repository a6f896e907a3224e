// Data: what the page carries. Maps are unpacked when they are first asked for.

/**
 * @typedef {{name: string, role: string, trusted: boolean, tokens: number, mass: number|null,
 *   perToken: number|null, output: number|null, heads: [number, number, number|null][]}} Source
 */
const look = JSON.parse(byId("look-data").textContent);
const tokenCount = look.tokens.length;
const layerCount = look.layers.length;
const headCount = look.heads;

/** Tokens that the colours leave out of their scale: the first-token source, or else the first token. */
const isSink = (() => {
  const sinks = look.ids.map((id) => look.sources[id].role === "sink");
  if (!sinks.includes(true) && tokenCount > 1) sinks[0] = true;
  return sinks;
})();

/** Stretches of neighbouring tokens from one source, in the order of the prompt. */
const runs = (() => {
  const out = [];
  look.ids.forEach((source, i) => {
    const last = out[out.length - 1];
    if (last && last.source === source) last.end = i + 1;
    else out.push({ source, start: i, end: i + 1 });
  });
  return out;
})();

/** Mean share of a source for layer and head given as row and column of the grid. */
function massAt(source, row, column) {
  return look.mass[(source * layerCount + row) * headCount + column];
}

function entropyAt(row, column) {
  return look.entropy[row * headCount + column];
}

/** Mean of `valueAt(row, column)` over a view: one head, one layer, or all. */
function meanOver(view, valueAt) {
  let sum = 0, cells = 0;
  const [rowFrom, rowTo] = view.row === null ? [0, layerCount] : [view.row, view.row + 1];
  const [from, to] = view.column === null ? [0, headCount] : [view.column, view.column + 1];
  for (let row = rowFrom; row < rowTo; row++) {
    for (let column = from; column < to; column++) {
      const value = valueAt(row, column);
      if (value === null) continue;
      sum += value;
      cells += 1;
    }
  }
  return cells ? sum / cells : null;
}

const unpacked = new Map(); // query position -> promise of its codes

/** The codes (65535 √weight) of one query for all heads: Uint16Array of layers × heads × tokens. */
function codesOf(query) {
  if (!unpacked.has(query)) unpacked.set(query, unpack(byId(`map-${query}`).textContent));
  return unpacked.get(query);
}

async function unpack(base64) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot unpack the attention maps (it lacks DecompressionStream); any from 2023 on can.");
  }
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = planes.length / 2;
  const codes = new Uint16Array(size);
  for (let i = 0; i < size; i++) codes[i] = planes[i] | (planes[size + i] << 8);
  return codes;
}

/** The attention of one query to every token, for a view: one head, or the mean of a layer or of all heads. */
async function weightsOf(query, view) {
  const codes = await codesOf(query);
  const weights = new Float64Array(tokenCount);
  const first = view.row === null ? 0 : view.row * headCount + (view.column ?? 0);
  const heads = view.row === null ? layerCount * headCount : view.column === null ? headCount : 1;
  for (let head = first; head < first + heads; head++) {
    const offset = head * tokenCount;
    for (let i = 0; i < tokenCount; i++) {
      const code = codes[offset + i];
      weights[i] += code * code;
    }
  }
  const unit = 65535 * 65535 * heads;
  for (let i = 0; i < tokenCount; i++) weights[i] /= unit;
  return weights;
}
