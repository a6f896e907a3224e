// Words: numbers and names as a reader wants them, and small pieces of page.

/** A share as per cent with the digits that matter; "–" where there is no number. */
function percent(share) {
  if (share === null || !Number.isFinite(share)) return "\u2013";
  const value = share * 100;
  if (value === 0) return "0%";
  if (value < 0.0001) return "<0.0001%";
  if (value < 0.1) return `${Number(value.toPrecision(2))}%`;
  return value < 10 ? `${value.toFixed(2)}%` : `${value.toFixed(1)}%`;
}

/** A factor against the average: "0.42×". */
function times(factor) {
  if (factor === null) return "\u2013";
  return `${factor < 10 ? factor.toFixed(2) : factor.toFixed(factor < 100 ? 1 : 0)}\u00d7`;
}

/** "1 token", "8,192 tokens". */
function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

/** What a role is called on the page. */
function roleName(role) {
  return role === "sink" ? "first token" : role;
}

/** A new element: class and children. Strings among the children are shown through showText. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const child of children) {
    if (typeof child !== "string") element.append(child);
    else if (children.length === 1) showText(element, child);
    else {
      const span = document.createElement("span");
      showText(span, child);
      element.append(span);
    }
  }
  return element;
}

/** A name from outside, kept from changing the direction of what stands beside it. */
function nameTag(text, className = "name") {
  const tag = make("bdi", className, text || "(no name)");
  return tag;
}

/** The badge that says whether a source is trusted. Template and first token are neither. */
function trustBadge(source) {
  if (source.role === "sink" || source.role === "template") return make("span", "badge", roleName(source.role));
  return source.trusted ? make("span", "badge", "trusted") : make("span", "badge warn", "untrusted");
}

/** A bar of the given share; the number stands beside it, so the bar itself is silent. */
function bar(share) {
  const track = make("span", "bar");
  const fill = make("span", "fill");
  fill.style.setProperty("--share", String(Math.max(0, Math.min(1, share ?? 0))));
  track.append(fill);
  track.setAttribute("aria-hidden", "true");
  return track;
}

function byId(id) {
  return document.getElementById(id);
}
