// Header: what was looked at, with which command, and what a map of it is worth.

function drawHeader() {
  document.title = `${spelled(look.model)} \u2013 clearhead look`;
  const size = `${count(tokenCount, "token")}, ${count(look.sources.length, "source")}`;
  const facts = [["Model", look.model], ["Queries", look.query], ["Prompt", size]];
  if (look.hash) facts.push(["Model hash", look.hash]);
  if (look.command) facts.push(["Command", look.command]);
  for (const [term, value] of facts) {
    const cell = make("dd", ["Command", "Model hash"].includes(term) ? "code" : "", value);
    byId("facts").append(make("div", term === "Command" ? "fact long" : "fact", make("dt", "", term), cell));
  }
  for (const element of document.querySelectorAll("[data-evidence]")) drawEvidence(element);
  byId("notes").hidden = !look.notes.length;
  for (const note of look.notes) byId("notes").append(make("li", "", note));
}

/** The evidence line. Only a web address becomes a link of its own; else the page's last section explains. */
function drawEvidence(element) {
  element.append(make("strong", "", "Evidence: "), make("span", "", look.evidence), " ");
  const link = make("a", "", "What this means");
  const outside = /^https?:\/\//i.test(look.evidenceUrl);
  link.href = outside ? look.evidenceUrl : "#worth";
  if (outside) link.rel = "noopener noreferrer";
  element.append(link);
  if (!outside && look.evidenceUrl) element.append(" ", make("span", "code", look.evidenceUrl));
}
