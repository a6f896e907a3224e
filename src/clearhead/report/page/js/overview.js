// Overview: a long source on one strip, so that one sees where in it the attention lies.
//
// Each cell stands for an equal stretch of tokens and has the shade of the strongest of them; a click goes
// there. It adds nothing that the list of the strongest tokens does not offer, so it is left out for readers
// who hear the page.

const OVERVIEW_FROM = 200; // tokens; shorter texts are seen whole
const OVERVIEW_CELLS = 80;

const overviews = []; // {run, cells}

function drawOverview(head, run) {
  if (run.end - run.start < OVERVIEW_FROM) return;
  const strip = make("div", "overview");
  const cells = Array.from({ length: OVERVIEW_CELLS }, () => make("span", "s0"));
  strip.append(...cells);
  strip.title = "The whole text from start to end. Click to go there.";
  strip.setAttribute("aria-hidden", "true");
  strip.addEventListener("click", (event) => {
    const i = cells.indexOf(event.target);
    if (i >= 0) goToToken(strongestIn(run, i));
  });
  head.append(strip);
  overviews.push({ run, cells });
}

/** First and last + 1 token of a cell. */
function stretch(run, i) {
  const at = (k) => run.start + Math.round((k * (run.end - run.start)) / OVERVIEW_CELLS);
  return [at(i), at(i + 1)];
}

function strongestIn(run, i) {
  const [from, to] = stretch(run, i);
  let best = from;
  for (let k = from; weights && k < to; k++) if (weights[k] > weights[best]) best = k;
  return best;
}

function paintOverviews() {
  for (const { run, cells } of overviews) {
    cells.forEach((cell, i) => {
      cell.className = `s${shades[strongestIn(run, i)]}`;
    });
  }
}

/** Bring a token to the middle of its panel and point at it. */
function goToToken(position) {
  const span = spans[position];
  const body = span.closest(".panel-body");
  const middle = body.getBoundingClientRect().top + body.clientHeight / 2;
  body.scrollTop += span.getBoundingClientRect().top - middle;
  focusToken(position);
}
