// The layout of a tree and the parts of its drawing, for the default font size. Each depth is a
// column, from left to right, so a path reads like text. Each leaf has a line of its own. p(u) sets
// the strength of a node's colour and the width of the line to it.
//
// An item is a node, the bonus token or a dropped candidate ("ghost"). It has a kind, depth, label,
// children, the width of its box (pill), its own width, and room for what stands behind it.

const LABEL_SIZE = 14; // font size of a node's token
const NOTE_SIZE = 13; // font size of all other text
const PADDING = 6; // left and right of each part of a node
const NODE_HEIGHT = 20;
const TOP = 28; // height of the line with the positions
const LEFT = 8;
const RIGHT = 14;
const LINE = { min: 23, max: 40 }; // height of a leaf's line
const GAP = { compact: 10, min: 22, max: 76 }; // between two columns
const GHOST_LINE = 0.74; // height of a dropped candidate's line, as a share of a node's line
const MAX_LINES_BELOW = 2.5; // the maximum distance of a node from its first child, in lines
const MAX_LABEL = 14; // characters of a token

function labelOf(id, max = MAX_LABEL) {
  const text = visible(textOf(id));
  const label = shorten(text, max);
  const width = widthOf(label, LABEL_SIZE) + 2 * PADDING;
  return { text, label, width, pill: width, room: 0, children: [] };
}

// Set x and y of every item. room: the space that needs no panning.
function layOut(root, room, minGap) {
  const items = collect(root);
  const leaves = items.filter((item) => !item.children.length);
  const lines = sum(leaves.map((item) => (item.kind === "ghost" ? GHOST_LINE : 1)));
  const line = clamp((room.height - TOP - 6) / lines, LINE.min, LINE.max);
  const bottom = placeLines(root, TOP, line);
  const columns = placeColumns(items, room.width, minGap);
  for (const item of items) item.x = columns[item.depth];
  return { items, columns, width: Math.max(...items.map(endOf)) + RIGHT, height: bottom + 6 };
}

function collect(item, found = []) {
  found.push(item);
  for (const child of item.children) collect(child, found);
  return found;
}

// Set the y of an item and of all items below it; return the bottom of the last line.
function placeLines(item, top, line) {
  if (!item.children.length) {
    const height = item.kind === "ghost" ? GHOST_LINE * line : line;
    item.y = top + height / 2;
    return top + height;
  }
  let end = top;
  for (const child of item.children) end = placeLines(child, end, line);
  const nodes = item.children.filter((child) => child.kind === "node");
  const shown = nodes.length ? nodes : item.children;
  const first = shown[0].y;
  item.y = Math.min((first + shown[shown.length - 1].y) / 2, first + MAX_LINES_BELOW * line);
  return end;
}

// The x of each depth's column.
function placeColumns(items, width, minGap) {
  const widest = [];
  for (const item of items) widest[item.depth] = Math.max(widest[item.depth] ?? 0, item.width);
  const room = Math.max(...items.map((item) => item.room));
  const free = width - LEFT - RIGHT - room - sum(widest);
  const gap = clamp(free / Math.max(widest.length - 1, 1), minGap, GAP.max);
  return widest.map((_, depth) => LEFT + sum(widest.slice(0, depth)) + depth * gap);
}

function endOf(item) {
  return item.x + item.width + (item.room && PADDING + item.room);
}

function edgeTo(parent, child, kind) {
  const x0 = parent.x + parent.pill;
  const middle = (x0 + child.x) / 2;
  const d = `M${x0} ${parent.y}C${middle} ${parent.y} ${middle} ${child.y} ${child.x} ${child.y}`;
  const width = { node: 1 + 6 * child.p, bonus: 2, ghost: 1 }[child.kind];
  return svg("path", { d, class: `edge ${kind}`, "stroke-width": width.toFixed(2) });
}

function pill(x, y, width, opacity, label) {
  const box = { x, y: y - NODE_HEIGHT / 2 };
  return [
    svg("rect", { ...box, width, height: NODE_HEIGHT, rx: 5, "fill-opacity": opacity.toFixed(3) }),
    svg("text", { x: x + PADDING, y: y + 4.5, class: "label" }, label),
  ];
}

function bonusNode({ x, y, width, label, text, note = "bonus" }) {
  const title = `Bonus token of the target model: ${text}`;
  return svg("g", { class: "bonus-node", role: "img", "aria-label": title },
    ...pill(x, y, width, 0, label),
    svg("text", { x: x + width + PADDING, y: y + 4.5, class: "note" }, note));
}

function ghostNode(item) {
  const hit = { x: item.x, y: item.y - 8, width: item.width + item.room, height: 16, class: "hit" };
  return svg("g", { class: "ghost", "data-row": item.row, "aria-hidden": "true" }, svg("rect", hit),
    svg("text", { x: item.x + PADDING, y: item.y + 4, class: "label" }, item.label),
    svg("text", { x: item.x + item.width, y: item.y + 4, class: "note" }, item.note));
}
