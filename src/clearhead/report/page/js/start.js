// Start: draw everything once, then repaint what a choice changes.

function fail(error) {
  document.documentElement.removeAttribute("aria-busy");
  byId("failure").hidden = false;
  byId("failure").textContent = `This page could not be drawn completely. ${error?.message ?? error}`;
}

function start() {
  startTheme();
  drawHeader();
  drawTable();
  drawGrid();
  drawChoices();
  drawText();
  drawGuard();
  drawOverall();
  const repaint = () => paintText().catch(fail);
  onChange(["view"], paintTable);
  onChange(["view"], paintChosenCell);
  onChange(["view", "query"], paintChoices);
  onChange(["view", "query"], repaint);
  onChange(["shown"], paintGrid);
  const first = look.sources.findIndex((source) => source.role !== "sink" && source.role !== "template");
  state.shown = first < 0 ? (look.sources.length ? 0 : "entropy") : first;
  tell(["view", "query", "shown"]);
}

try {
  start();
} catch (error) {
  fail(error);
}
