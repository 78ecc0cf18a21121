// Where the nodes of a tree are drawn: depths are columns from left to right, so that a path reads
// as text does; every leaf has a line of its own, and a node stands in the middle of its children.

const LABEL = 12; // the size of a node's text, in pixels
const NOTE = 10;
const PADDING = 6; // of a node, left and right
const TOP = 26; // where the positions are written
const LEFT = 8;
const RIGHT = 12;
const LINE = { least: 17, most: 34 }; // the height of a node's line
const GAP = { least: 52, most: 72 }; // between two columns
const GHOST = 0.72; // the line of a dropped candidate, beside a node's
const ROOT_WIDTH = 30; // at least, as its position is written above it
const LONGEST = 14; // characters of a token that are shown

// The tree of what is drawn: nodes, the bonus token, and dropped candidates.
function itemsOf(view, hasGhosts) {
  const { tree, iteration } = view;
  const items = tree.tokens.map((id, row) => {
    return { kind: "node", row, p: tree.p[row], depth: view.depths[row], ...labelled(id) };
  });
  const below = items.map(() => []);
  below[view.leaf].push({ kind: "bonus", depth: view.depths[view.leaf] + 1, ...labelled(iteration.bonus) });
  view.children.forEach((rows, row) => below[row].push(...rows.map((child) => items[child])));
  if (hasGhosts) {
    tree.dropped.forEach(([row, id, p, gate], index) => {
      const depth = view.depths[row] + 1;
      below[row].push({ kind: "ghost", index, row, p, gate, depth, ...labelled(id) });
    });
  }
  items.forEach((item, row) => (item.children = below[row]));
  return items[0];
}

function labelled(id) {
  const text = visible(word(id));
  const label = shortened(text, LONGEST);
  return { text, label, width: widthOf(label, LABEL) + 2 * PADDING, children: [] };
}

function collect(item, found = []) {
  found.push(item);
  for (const child of item.children) collect(child, found);
  return found;
}

// Give every item x and y; the room is what may be filled without scrolling.
function layOut(root, room) {
  const items = collect(root);
  const line = lineHeight(items, room.height);
  const bottom = placeLines(root, TOP, line);
  const columns = placeColumns(items, room.width);
  for (const item of items) Object.assign(item, { x: columns[item.depth], line });
  const ends = items.map((item) => item.x + item.width + item.room);
  return { items, line, columns, width: Math.max(...ends) + RIGHT, height: bottom + 6 };
}

function lineHeight(items, height) {
  let lines = 0;
  for (const item of items) {
    if (!item.children.length) lines += item.kind === "ghost" ? GHOST : 1;
  }
  return clamp((height - TOP - 6) / lines, LINE.least, LINE.most);
}

// The y of an item and all below it, from the top on; the end of the last line.
function placeLines(item, top, line) {
  if (!item.children.length) {
    const height = item.kind === "ghost" ? GHOST * line : line;
    item.y = top + height / 2;
    return top + height;
  }
  let end = top;
  for (const child of item.children) end = placeLines(child, end, line);
  const kept = item.children.filter((child) => child.kind !== "ghost");
  const shown = kept.length ? kept : item.children;
  item.y = (shown[0].y + shown[shown.length - 1].y) / 2;
  return end;
}

// The x of every depth, and what a note after each item takes.
function placeColumns(items, width) {
  const widths = [ROOT_WIDTH];
  let room = 0;
  for (const item of items) {
    widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
    item.room = item.kind === "ghost" ? 96 : item.children.length ? 0 : 92;
    room = Math.max(room, item.room);
  }
  const taken = widths.reduce((sum, w) => sum + w, LEFT + RIGHT + room);
  const gap = clamp((width - taken) / Math.max(widths.length - 1, 1), GAP.least, GAP.most);
  const columns = [];
  let x = LEFT;
  for (const w of widths) {
    columns.push(x);
    x += w + gap;
  }
  return columns;
}
