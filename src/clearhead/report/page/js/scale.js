// Scale: from a number to one of seventeen shades, and the legend that says so.

const SHADES = 16; // shade 0 is the paper itself

/** The shade of a value between two ends, by the square root of its place, so that small values stay apart. */
function shadeOf(value, low, high) {
  if (!(value > low)) return high > 0 && value === high ? SHADES : 0; // all alike: all strongest, or all nothing
  return Math.min(SHADES, Math.round(SHADES * Math.sqrt((value - low) / (high - low))));
}

/** Fill a legend: the shades between two numbers, and remarks. */
function drawLegend(element, low, high, remarks) {
  const ramp = make("span", "ramp");
  ramp.setAttribute("aria-hidden", "true");
  for (let shade = 0; shade <= SHADES; shade++) ramp.append(make("span", `s${shade}`));
  const scale = make("span", "scale", make("span", "", low), ramp, make("span", "", high));
  element.replaceChildren(scale, ...remarks.map((remark) => make("span", "remark", remark)));
}
