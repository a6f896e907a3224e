// Marks: text that cannot disguise itself.
//
// Characters without a shape of their own (control, zero-width, direction overrides, tags, lone surrogates,
// unusual spaces) appear as a label such as "U+202E right-to-left override". Text only ever enters the page
// through showText or textContent.

const HIDDEN = /[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]/u;
const PLAIN = /^[\x20-\x7e\xa1-\xac\xae-\u02ff]*$/;
const COMBINING = /\p{M}/u;
const MOST_COMBINING = 3; // on one letter; real writing systems stay within this, towers of accents do not

const CHARACTER_NAMES = {
  0x00: "null", 0x07: "bell", 0x08: "backspace", 0x0b: "vertical tab", 0x0c: "form feed", 0x0d: "carriage return",
  0x1b: "escape", 0x7f: "delete", 0x85: "next line", 0xa0: "no-break space", 0xad: "soft hyphen",
  0x34f: "grapheme joiner", 0x61c: "Arabic letter mark", 0x180e: "Mongolian vowel separator",
  0x200b: "zero-width space", 0x200c: "zero-width non-joiner", 0x200d: "zero-width joiner",
  0x200e: "left-to-right mark", 0x200f: "right-to-left mark", 0x2028: "line separator",
  0x2029: "paragraph separator", 0x202a: "left-to-right embedding", 0x202b: "right-to-left embedding",
  0x202c: "end of direction", 0x202d: "left-to-right override", 0x202e: "right-to-left override",
  0x202f: "narrow no-break space", 0x2060: "word joiner", 0x2066: "left-to-right isolate",
  0x2067: "right-to-left isolate", 0x2068: "first-strong isolate", 0x2069: "end of isolate",
  0x3000: "wide space", 0x3164: "Hangul filler", 0xfeff: "byte-order mark",
};

/** The name of a hidden character, or of its kind. */
function characterName(code) {
  if (CHARACTER_NAMES[code]) return CHARACTER_NAMES[code];
  if (code < 0x20 || (code >= 0x80 && code < 0xa0)) return "control character";
  if (code >= 0xd800 && code <= 0xdfff) return "half of a surrogate pair";
  if (code >= 0xe0000 && code <= 0xe007f) {
    return code > 0xe0020 && code < 0xe007f ? `tag "${String.fromCharCode(code - 0xe0000)}"` : "tag character";
  }
  if ((code >= 0xfe00 && code <= 0xfe0f) || (code >= 0xe0100 && code <= 0xe01ef)) return "variation selector";
  if ((code >= 0xe000 && code <= 0xf8ff) || code >= 0xf0000) return "private use";
  return "invisible character";
}

/** "U+202E". */
function codeLabel(code) {
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

/**
 * Cut text into what is shown as it is and what is shown as a mark.
 * @returns {{text: string, name?: string, follows?: string}[]} `name`: this piece is a mark, `text` its label.
 */
function pieces(text) {
  const out = [];
  let plain = "", accents = 0;
  const flush = () => { if (plain) out.push({ text: plain }); plain = ""; };
  const mark = (label, name, follows) => { flush(); out.push({ text: label, name, follows }); };
  for (const char of text) {
    const code = char.codePointAt(0);
    const selector = code === 0xfe0e || code === 0xfe0f; // asks for text or emoji style after a visible character
    accents = COMBINING.test(char) && !selector ? accents + 1 : 0;
    if (char === "\n") mark("\u21b5", "line break", "\n");
    else if (char === "\t") mark("\u21e5", "tab", "\t");
    else if (char === " " || (selector && plain)) plain += char;
    else if (HIDDEN.test(char) || accents > MOST_COMBINING) {
      mark(codeLabel(code), HIDDEN.test(char) ? characterName(code) : "combining mark");
    } else plain += char;
    if (selector) flush(); // a second selector in a row says nothing about style
  }
  flush();
  return out;
}

/** Put text into an element, hidden characters as marks. Returns how many of them there were. */
function showText(element, text) {
  if (PLAIN.test(text)) {
    element.textContent = text;
    return 0;
  }
  element.replaceChildren();
  let hidden = 0;
  for (const piece of pieces(text)) {
    if (!piece.name) {
      element.append(piece.text);
      continue;
    }
    const span = document.createElement("span");
    span.className = piece.follows ? "mark faint" : "mark";
    span.title = piece.name;
    span.textContent = piece.text;
    element.append(span);
    if (piece.follows) element.append(piece.follows);
    else hidden += 1;
  }
  return hidden;
}

/** The same as a plain string, for titles and labels. */
function spelled(text) {
  return pieces(text).map((piece) => (piece.name ? `[${piece.text}]` : piece.text)).join("");
}

const LETTER = /\p{L}/u;
const RIGHT_TO_LEFT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

/** Whether most letters of a text are written from right to left. One such letter does not turn a line round. */
function readsRightToLeft(text) {
  if (PLAIN.test(text)) return false;
  let letters = 0, turned = 0;
  for (const char of text) {
    if (!LETTER.test(char)) continue;
    letters += 1;
    if (RIGHT_TO_LEFT.test(char)) turned += 1;
  }
  return turned * 2 > letters;
}
