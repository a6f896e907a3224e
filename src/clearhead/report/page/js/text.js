// Text: the prompt with its sources side by side, every token shaded by the attention of the chosen query.
//
// The spans are made once. A new choice only changes the class of those whose shade differs.

const STRONGEST = 8; // tokens in the list of the strongest

const spans = new Array(tokenCount);
const numberOf = new WeakMap(); // span -> position
const shades = new Uint8Array(tokenCount);
const panelShares = []; // {source, element}: the share in the head of each panel
let weights = null; // of the chosen query in the chosen view
let pointed = null; // position under the pointer, or focused
let painting = 0; // number of the newest paint: an older one that comes late is dropped

function drawText() {
  const panels = byId("panels");
  let strip = [];
  let body = null;
  for (const run of runs) {
    if (["template", "sink"].includes(look.sources[run.source].role)) {
      strip.push(run);
      continue;
    }
    body = drawPanel(panels, run, strip);
    strip = [];
  }
  if (strip.length) drawStrip(body ?? drawPanel(panels, null, []), strip);
  panels.addEventListener("click", (event) => touchToken(event.target, true));
  panels.addEventListener("pointerover", (event) => touchToken(event.target, false));
  panels.addEventListener("focusin", (event) => touchToken(event.target, false));
  panels.addEventListener("keydown", moveInText);
  for (const query of look.queries) {
    spans[query].dataset.query = "";
    spans[query].setAttribute("role", "button");
  }
  if (tokenCount) spans[state.query ?? 0].tabIndex = 0;
}

/** A panel for one stretch of a source, with the template text that leads to it. Returns its body. */
function drawPanel(panels, run, strip) {
  const source = run ? look.sources[run.source] : null;
  const length = run ? run.end - run.start : 0;
  const head = make("header", "panel-head");
  const body = make("div", "panel-body");
  const panel = make("article", source && !source.trusted ? "panel untrusted" : "panel", head, body);
  panel.style.setProperty("--grow", String(Math.max(1, Math.min(6, Math.sqrt(length) / 5))));
  if (strip.length) drawStrip(body, strip);
  if (source) {
    const share = make("span", "share");
    panelShares.push({ source: run.source, element: share });
    head.append(make("h3", "", nameTag(source.name)), share);
    const hidden = drawRun(body, run);
    const line = make("p", "facts-line", trustBadge(source));
    const role = roleName(source.role) === source.name ? "" : `${roleName(source.role)} \u00b7 `;
    line.append(make("span", "", role + count(length, "token")));
    if (hidden) line.append(make("span", "alert", count(hidden, "hidden character")));
    head.append(line);
    drawOverview(head, run);
    panel.setAttribute("aria-label", spelled(source.name));
  } else head.append(make("h3", "", "Template"));
  panels.append(panel);
  return body;
}

function drawStrip(body, strip) {
  const element = make("div", "strip");
  for (const run of strip) drawRun(element, run);
  body.append(element);
}

/** The tokens of one stretch, in paragraphs that end where the text itself breaks the line. */
function drawRun(parent, run) {
  let hidden = 0, from = run.start;
  for (let i = run.start; i < run.end; i++) {
    if (!look.tokens[i].endsWith("\n") && i + 1 < run.end) continue;
    const text = look.tokens.slice(from, i + 1);
    const paragraph = make("div", "run");
    if (readsRightToLeft(text.join(""))) paragraph.dir = "rtl";
    for (; from <= i; from++) {
      const span = document.createElement("span");
      span.className = "t s0";
      hidden += look.tokens[from] ? showText(span, look.tokens[from]) : showEmpty(span);
      if (isSink[from]) span.dataset.sink = "";
      spans[from] = span;
      numberOf.set(span, from);
      paragraph.append(span);
    }
    const end = paragraph.lastChild.lastChild; // the paragraph ends the line by itself
    if (end?.nodeType === Node.TEXT_NODE && end.data === "\n") end.remove();
    parent.append(paragraph);
  }
  return hidden;
}

/** A token without text of its own, such as the first bytes of a character, still needs a place to point at. */
function showEmpty(span) {
  const mark = make("span", "mark faint", "\u2205");
  mark.title = "no text of its own";
  span.append(mark);
  return 0;
}

/** The token that an element belongs to, or null. */
function tokenAt(element) {
  const span = element.closest(".t");
  return span && numberOf.has(span) ? numberOf.get(span) : null;
}

function touchToken(element, choose) {
  const position = tokenAt(element);
  if (position === null) return;
  pointed = position;
  if (choose) focusToken(position);
  if (choose && look.queries.includes(position)) chooseQuery(position);
  else paintReadout();
}

/** Make a token the one that the Tab key reaches, and go there. */
function focusToken(position) {
  byId("panels").querySelector('.t[tabindex="0"]')?.removeAttribute("tabindex");
  spans[position].tabIndex = 0;
  spans[position].focus();
}

function moveInText(event) {
  const position = tokenAt(event.target);
  if (position === null) return;
  const run = runs.find((r) => r.start <= position && position < r.end);
  let next = null;
  if (event.key === "ArrowRight") next = position + 1;
  else if (event.key === "ArrowLeft") next = position - 1;
  else if (event.key === "ArrowDown") next = look.queries.find((q) => q > position);
  else if (event.key === "ArrowUp") next = look.queries.filter((q) => q < position).pop();
  else if (event.key === "Home") next = event.ctrlKey ? 0 : run.start;
  else if (event.key === "End") next = event.ctrlKey ? tokenCount - 1 : run.end - 1;
  else if (event.key === "Enter" || event.key === " ") next = position;
  else return;
  event.preventDefault();
  if (next === undefined || next === null || next < 0 || next >= tokenCount) return;
  if (next === position) chooseQuery(position);
  else focusToken(next);
}

/** Fetch the weights of the choice and shade every token with them. */
async function paintText() {
  const ticket = ++painting;
  for (const query of look.queries) spans[query].setAttribute("aria-pressed", String(query === state.query));
  if (state.query === null) return paintReadout();
  document.documentElement.setAttribute("aria-busy", "true");
  const fresh = await weightsOf(state.query, state.view);
  if (ticket !== painting) return undefined;
  weights = fresh;
  let top = 0, sink = 0;
  const shares = new Float64Array(look.sources.length);
  for (let i = 0; i < tokenCount; i++) {
    shares[look.ids[i]] += weights[i];
    if (isSink[i]) sink += weights[i];
    else if (weights[i] > top) top = weights[i];
  }
  for (let i = 0; i < tokenCount; i++) {
    const shade = shadeOf(weights[i], 0, top);
    if (shade === shades[i]) continue;
    shades[i] = shade;
    spans[i].className = `t s${shade}`;
  }
  for (const { source, element } of panelShares) element.textContent = percent(shares[source]);
  drawLegend(byId("text-legend"), "0%", percent(top), [
    "Shade by \u221aattention. The strongest shade is the strongest token other than the first.",
    `First token, outlined: ${percent(sink)}, left out of the scale.`,
  ]);
  paintOverviews();
  drawStrongest();
  paintReadout();
  document.documentElement.removeAttribute("aria-busy");
  return undefined;
}

/** One line that says in numbers what the shades say, for the token under pointer or focus. */
function paintReadout() {
  const line = byId("readout");
  const parts = [make("span", "dim", viewName())];
  if (state.query !== null) parts.push(make("span", "dim", "from"), tokenTag(state.query));
  if (pointed !== null && state.query !== null && weights) {
    parts.push(make("span", "dim", "to"), tokenTag(pointed), make("strong", "", percent(weights[pointed])));
  }
  line.replaceChildren(...parts);
}

/** A token in a sentence: its text, source and position. */
function tokenTag(position) {
  const text = look.tokens[position];
  const tag = make("span", "token-tag", make("bdi", "quote", text === "" ? "\u2205" : text.replace(/\n/g, "\u21b5")));
  tag.append(make("span", "dim", `#${position}`));
  return tag;
}

function drawStrongest() {
  const best = []; // positions, strongest first; kept short, because sorting all tokens costs time at 8K
  for (let i = 0; i < tokenCount; i++) {
    if (!(weights[i] > (best.length < STRONGEST ? 0 : weights[best[STRONGEST - 1]]))) continue;
    let at = best.length;
    while (at > 0 && weights[best[at - 1]] < weights[i]) at -= 1;
    best.splice(at, 0, i);
    best.length = Math.min(best.length, STRONGEST);
  }
  byId("strongest").replaceChildren(...best.map((i) => rank(i, weights[i])));
}

function drawOverall() {
  byId("overall").replaceChildren(...look.topTokens.map((t) => rank(t.position, t.weight)));
  if (!look.topTokens.length) byId("overall").append(make("li", "dim", "None were kept."));
}

/** A row of a ranking; the token is a button that leads to its place in the text. */
function rank(position, weight) {
  const button = make("button", "link", tokenTag(position));
  button.type = "button";
  button.addEventListener("click", () => goToToken(position));
  const source = nameTag(look.sources[look.ids[position]].name, "dim");
  return make("li", "", button, source, make("span", "number", percent(weight)));
}
