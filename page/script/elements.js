// Making elements, and showing tokens and numbers. Whatever a user or a model wrote becomes a text
// node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";
const BULLET = "·"; // a space, made visible

const byId = (id) => document.getElementById(id);

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

// A drawing of so many pixels.
function drawing(width, height, attributes, ...children) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  return svg("svg", { ...size, ...attributes }, ...children);
}

function classes(flags) {
  return Object.keys(flags).filter((name) => flags[name]).join(" ");
}

// A token with its white space, and what has no look of its own, made visible.
function visible(text) {
  const marked = text
    .replace(/ /g, BULLET)
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u00a0\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, codePoint);
  return marked || "∅";
}

function codePoint(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

function shortened(text, most) {
  const characters = Array.from(text);
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

const ruler = document.createElement("canvas").getContext("2d");
const rulerSize = 100;
ruler.font = `${rulerSize}px ${styled("--mono")}`;
const widths = new Map(); // of texts that were measured

// The width of a text in the fixed-width font, in pixels.
function widthOf(text, size) {
  if (!widths.has(text)) widths.set(text, ruler.measureText(text).width / rulerSize);
  return size * widths.get(text);
}

function probability(p) {
  if (p === null || p === undefined) return "–";
  if (p >= 0.01 || p === 0) return p.toFixed(2);
  return p >= 0.001 ? p.toFixed(3) : p.toExponential(0);
}

function milliseconds(ms) {
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

function plain(value) {
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

function counted(n, one, many = `${one}s`) {
  return `${n} ${n === 1 ? one : many}`;
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

const rooms = new Map(); // of panels, until the window is another

// The room of a panel whose size does not depend on what it shows. Asked anew after every drawing,
// it would have the browser lay out the whole page each time.
function roomOf(place) {
  if (!rooms.has(place)) rooms.set(place, { width: place.clientWidth, height: place.clientHeight });
  return rooms.get(place);
}

// A number of the style sheet, as it now is: a colour, in the dark or in the light.
function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
