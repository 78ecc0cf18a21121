// The data of the page, and functions that make elements and format tokens and numbers. Text from a
// user or a model becomes a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";
const UNIT = 13; // default font size in pixels; drawings are made for it and then scaled

const DIRECTION_MARKS = /[\u202a-\u202e\u2066-\u2069]/; // they set the direction of what follows

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

function textOf(id) {
  return data.vocabulary[id];
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children); // a string becomes a text node
  return element;
}

function html(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function drawing(width, height, scale, attributes, ...children) {
  const size = { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}` };
  return svg("svg", { ...size, ...attributes }, ...children);
}

function emptyNote(text) {
  return html("p", { class: "empty" }, text);
}

function classes(flags) {
  return Object.keys(flags).filter((name) => flags[name]).join(" ");
}

// A token in the text. A direction mark affects only its own token.
function tokenSpan(text, flags, attributes) {
  const isDirectional = DIRECTION_MARKS.test(text);
  const name = classes({ ...flags, textless: !text, directional: isDirectional });
  return html("span", { class: name, ...attributes }, text);
}

function shellWord(text) {
  const isPlain = /^[\w@%+=:,./-]+$/.test(text);
  return isPlain ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

function table(rows) {
  return html("table", {}, html("tbody", {}, ...rows.map(([key, value, meaning]) => {
    const cells = [html("th", { scope: "row" }, key), html("td", {}, formatCell(value))];
    if (meaning) cells.push(html("td", { class: "meaning" }, meaning));
    return html("tr", {}, ...cells);
  })));
}

function formatCell(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : formatValue(value);
}

// A token with visible symbols for white space and for characters that have no glyph.
function visible(text) {
  const marked = text
    .replace(/ /g, "·")
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u00a0\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, codePoint);
  return marked || "∅";
}

function codePoint(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

function shorten(text, max) {
  const characters = Array.from(text);
  return characters.length > max ? `${characters.slice(0, max - 1).join("")}…` : text;
}

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = `100px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
const widths = new Map(); // text -> its width at 1 px

// The width of a text in the monospace font of this size.
function widthOf(text, size) {
  if (!widths.has(text)) widths.set(text, ruler.measureText(text).width / 100);
  return size * widths.get(text);
}

function formatProbability(p) {
  if (p === null || p === undefined) return "–";
  if (p >= 0.01 || p === 0) return p.toFixed(2);
  return p >= 0.001 ? p.toFixed(3) : p.toExponential(0);
}

function formatMs(ms) {
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

function formatValue(value) {
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

function formatCount(n, one, many = `${one}s`) {
  return `${n} ${n === 1 ? one : many}`;
}

function clamp(value, min, max) {
  return Math.max(min, Math.min(max, value));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

const rooms = new Map(); // panel -> its size; cleared when the window is resized

// The space that a drawing has, and its scale. Cached, because each measurement after a drawing makes
// the browser lay out the whole page again.
function roomOf(place) {
  if (!rooms.has(place)) {
    const scale = parseFloat(getComputedStyle(place).fontSize) / UNIT;
    const width = Math.max(place.offsetWidth / scale, 200); // also while the window has no size
    const height = Math.max(place.offsetHeight / scale, 60);
    rooms.set(place, { width, height, scale });
  }
  return rooms.get(place);
}
