// Scale: from a number to one of seventeen shades, and the legend that says so.

const SHADES = 16; // shade 0 is the paper itself

/** The shade of a value, by the square root of its share of `top`, so that small values stay apart. */
function shadeOf(value, top) {
  if (!(value > 0) || !(top > 0)) return 0;
  return Math.min(SHADES, Math.round(SHADES * Math.sqrt(value / top)));
}

/** Fill a legend: the shades between two numbers, and remarks. */
function drawLegend(element, low, high, remarks) {
  const ramp = make("span", "ramp");
  ramp.setAttribute("aria-hidden", "true");
  for (let shade = 0; shade <= SHADES; shade++) ramp.append(make("span", `s${shade}`));
  const scale = make("span", "scale", make("span", "", low), ramp, make("span", "", high));
  element.replaceChildren(scale, ...remarks.map((remark) => make("span", "remark", remark)));
}
