// The drawn tree, in sizes of the usual letters. Depths are columns from left to right, so that a path
// reads as text does; every leaf has a line of its own. The strength of a node's colour and the width
// of the line to it are p(u); what a step is about stands in the node, behind its token.

const LABEL = 14; // the size of a node's token
const NOTE = 13; // and of all else
const LEAST = 11 / NOTE; // how far a large tree is made smaller: then it is panned
const PADDING = 6; // in a node, left and right of each part
const PILL = 20; // a node's height
const TOP = 28; // where the positions are written
const LEFT = 8;
const RIGHT = 14;
const LINE = { least: 23, most: 40 };
const GAP = { tight: 10, least: 22, most: 76 }; // between two columns
const GHOST = 0.74; // the line of a dropped candidate, beside a node's
const NEAR = 2.5; // lines: no node is further below its first child, however many there are
const LONGEST = { tight: 8, label: 14, note: 9 }; // characters of a token

const drawn = { zoom: 1, hasGhosts: null }; // as asked for; null: dropped candidates where they fit

function buildTree() {
  const place = byId("tree");
  byId("ghosts").addEventListener("click", () => {
    drawn.hasGhosts = byId("ghosts").getAttribute("aria-pressed") !== "true";
    redraw();
  });
  for (const [name, by] of [["smaller", 1 / 1.25], ["larger", 1.25]]) {
    byId(name).addEventListener("click", () => zoomTo(drawn.zoom * by));
  }
  byId("fit").addEventListener("click", () => zoomTo(1));
  return function drawTree(view, stage) {
    const focused = document.activeElement.closest("#tree .node")?.dataset.row;
    place.replaceChildren();
    if (view.tree) drawRows(view, stage, place);
    else place.append(promptOf(view, place));
    if (!focused) return;
    const same = place.querySelector(`.node[data-row="${focused}"]`);
    (same ?? place).focus({ preventScroll: true });
  };
}

function zoomTo(zoom) {
  drawn.zoom = clamp(zoom, 0.4, 4);
  redraw();
}

// The prompt's own pass has no tree: what it read, and what it gave.
function promptOf(view, place) {
  const { width, scale } = roomOf(place);
  const origin = `prompt, ${counted(data.prompt.tokens.length, "token")}`;
  const start = LEFT + widthOf(origin, NOTE) + PADDING;
  const bonus = { ...labelled(view.iteration.tokens[0]), kind: "bonus", x: start + 60, y: 40 };
  return drawing(Math.max(width, bonus.x + 160), 80, scale,
    { role: "img", "aria-label": "The prompt's own pass" },
    svg("text", { x: LEFT, y: 44 }, origin),
    svg("path", { class: "edge bonus", d: `M${start} 40h60`, "stroke-width": 2 }),
    bonusNode(bonus),
  );
}

function drawRows(view, stage, place) {
  const { plan, scale, hasGhosts } = planOf(view, stage, place);
  byId("ghosts").setAttribute("aria-pressed", hasGhosts);
  byId("ghosts").disabled = !view.tree.dropped.length;
  const shown = plan.items.filter((item) => isDrawn(view, stage, item));
  const deepest = Math.max(...shown.map((item) => (item.kind === "node" ? item.depth : 0)));
  const columns = plan.columns.slice(0, deepest + 1).map((x, depth) =>
    svg("text", { x, y: 15 }, depth ? `n+${depth}` : `n = ${view.n}`));
  const label = `Tree of ${counted(view.tree.tokens.length, "row")}`;
  place.append(drawing(plan.width, plan.height, scale, { role: "tree", "aria-label": label },
    svg("g", { class: "columns", "aria-hidden": "true" }, ...columns),
    svg("g", { "aria-hidden": "true" }, ...edgesOf(view, stage, shown)),
    ...shown.map((item) => itemOf(view, stage, item)),
  ));
  reveal(view, stage, place, shown, scale);
}

// The first layout that fits: with dropped candidates, where they are neither asked for nor hidden; with
// room for the notes of every step, so that no node moves; with room for this step's; with shorter
// tokens and notes. If none fits, the last, as small as can be read: it has to be panned.
function planOf(view, stage, place) {
  const { width, height, scale } = roomOf(place);
  const [wide, high] = [width - 16 / scale, height - 16 / scale]; // without scroll bars
  const asked = drawn.hasGhosts ?? false;
  const ways = [{ hasGhosts: asked, isSteady: true }, { hasGhosts: asked }, { hasGhosts: asked, isTight: true }];
  if (drawn.hasGhosts === null) ways.unshift({ hasGhosts: true, isSteady: true });
  let found = null;
  for (const way of ways) {
    const root = itemsOf(view, stage, way);
    const least = way.isTight ? GAP.tight : GAP.least;
    const needed = layOut(root, { width: 0, height: 0 }, least);
    const fitting = Math.min(wide / needed.width, high / needed.height);
    const zoom = clamp(fitting, LEAST, 1) * drawn.zoom;
    const plan = layOut(root, { width: wide / zoom, height: high / zoom }, least);
    found = { plan, scale: zoom * scale, hasGhosts: way.hasGhosts };
    if (fitting >= 1 || (!way.isSteady && wide / needed.width >= LEAST)) break;
  }
  return found;
}

// The tree of what is drawn: nodes, the bonus token, and dropped candidates, each with its parent's row.
// isSteady: with room for what other steps write, too. isTight: with as little as can be read.
function itemsOf(view, stage, { hasGhosts, isSteady, isTight }) {
  const { tree, iteration } = view;
  const items = tree.tokens.map((id, row) => {
    const shown = labelled(id, isTight ? LONGEST.tight : LONGEST.label);
    const item = { kind: "node", row, p: tree.p[row], depth: view.depths[row], ...shown };
    item.note = noteOf(view, stage.kind, row, isTight);
    item.pill = item.width + noteWidth(item.note);
    const kinds = isSteady ? ["whole", "verify", "accept", "commit"] : [stage.kind];
    item.width += Math.max(...kinds.map((kind) => noteWidth(noteOf(view, kind, row, isTight))));
    item.room = isSteady || isGrowing(stage) ? widthOf(tree.stopped[row] ?? "", NOTE) : 0;
    return item;
  });
  items.forEach((item, row) => (item.children = view.children[row].map((child) => items[child])));
  if (hasGhosts) {
    for (const [row, id, p, gate] of tree.dropped) {
      const note = `${probability(p)} ${gate}`;
      const item = { kind: "ghost", row, note, depth: view.depths[row] + 1, ...labelled(id) };
      items[row].children.push({ ...item, room: widthOf(note, NOTE) });
    }
  }
  const bonus = { kind: "bonus", depth: view.depths[view.leaf] + 1, ...labelled(iteration.bonus) };
  items[view.leaf].children.push({ ...bonus, room: widthOf("bonus", NOTE) });
  return items[0];
}

function labelled(id, most = LONGEST.label) {
  const text = visible(word(id));
  const label = shortened(text, most);
  const width = widthOf(label, LABEL) + 2 * PADDING;
  return { text, label, width, pill: width, room: 0, children: [] };
}

// What stands behind a node's token: p(u), or what the step is about; and of which kind that is.
function noteOf(view, kind, row, isTight) {
  if (kind === "verify") {
    const says = shortened(visible(word(view.tree.target[row])), LONGEST.note);
    return { text: `→${says}`, kind: "says" };
  }
  if (kind === "accept") return markOf(view, row, isTight);
  if (kind === "commit") {
    const slot = view.iteration.path.indexOf(row);
    if (slot < 0) return { text: "" };
    return { text: slot === row ? "stays" : `→${view.n + slot}`, kind: "kept" };
  }
  return { text: row ? probability(view.tree.p[row]) : "" };
}

// Of sampled text the coin that decided, too; its chance is listed beside the tree as well.
function markOf(view, row, isTight) {
  const { parents } = view.tree;
  const [mark, kind] = view.isAccepted.has(row) ? ["✓", "kept"] : ["✗", "lost"];
  const trial = view.trials.get(row);
  if (trial && isTight) return { text: `${trial.coin.toFixed(2)} ${mark}`, kind };
  if (trial) {
    const sign = trial.coin < trial.chance ? "<" : "≥";
    return { text: `${trial.coin.toFixed(2)} ${sign} ${trial.chance.toFixed(2)} ${mark}`, kind };
  }
  const isKept = view.isAccepted.has(row); // perhaps for what is below it, untried
  const isTried = row > 0 && (isSampled ? isKept : view.isAccepted.has(parents[row]));
  return isTried ? { text: mark, kind } : { text: "" };
}

function noteWidth({ text, kind }) {
  return text ? widthOf(text, NOTE) + PADDING * (kind === "says" ? 2 : 1) : 0;
}

// Give every item x and y; the room is what may be filled without panning.
function layOut(root, room, least) {
  const items = collect(root);
  const leaves = items.filter((item) => !item.children.length);
  const lines = sum(leaves.map((item) => (item.kind === "ghost" ? GHOST : 1)));
  const line = clamp((room.height - TOP - 6) / lines, LINE.least, LINE.most);
  const bottom = placeLines(root, TOP, line);
  const columns = placeColumns(items, room.width, least);
  for (const item of items) item.x = columns[item.depth];
  return { items, columns, width: Math.max(...items.map(endOf)) + RIGHT, height: bottom + 6 };
}

function collect(item, found = []) {
  found.push(item);
  for (const child of item.children) collect(child, found);
  return found;
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
  const nodes = item.children.filter((child) => child.kind === "node");
  const shown = nodes.length ? nodes : item.children;
  const first = shown[0].y;
  item.y = Math.min((first + shown[shown.length - 1].y) / 2, first + NEAR * line);
  return end;
}

// The x of every depth.
function placeColumns(items, width, least) {
  const widest = [];
  for (const item of items) widest[item.depth] = Math.max(widest[item.depth] ?? 0, item.width);
  const room = Math.max(...items.map((item) => item.room));
  const free = width - LEFT - RIGHT - room - sum(widest);
  const gap = clamp(free / Math.max(widest.length - 1, 1), least, GAP.most);
  return widest.map((_, depth) => LEFT + sum(widest.slice(0, depth)) + depth * gap);
}

function endOf(item) {
  return item.x + item.width + (item.room && PADDING + item.room);
}

function isDrawn(view, stage, item) {
  if (item.kind === "bonus") return isAt(stage, "accept");
  if (!isThere(view, stage, item.row)) return false;
  if (item.kind === "node") return true;
  return isGrowing(stage) && isRun(view, stage, item.row);
}

// Whether it is the rule that the stage is about: what it let grow, and what not.
function isGrowing(stage) {
  return ["whole", "draft", "adapt"].includes(stage.kind);
}

// Where the tree is larger than its place: what a pass of the draft has given; what is accepted, with
// its end; else the root with as much of that as there is room for.
function reveal(view, stage, place, shown, scale) {
  const nodes = shown.filter((item) => item.kind === "node");
  const fresh = nodes.filter((item) => item.depth === stage.pass + 1);
  const isOnPath = ({ kind, row }) => kind === "bonus" || (kind === "node" && view.isAccepted.has(row));
  const path = isAt(stage, "accept") ? shown.filter(isOnPath) : nodes.slice(0, 1);
  const wanted = fresh.length ? fresh : path;
  const isAtEnd = fresh.length > 0 || ["accept", "commit"].includes(stage.kind);
  const held = fresh.length ? wanted : [isAtEnd ? path.at(-1) : nodes[0]];
  const top = (items) => (Math.min(...items.map((item) => item.y)) - PILL) * scale;
  const bottom = (items) => (Math.max(...items.map((item) => item.y)) + PILL) * scale - place.clientHeight;
  const right = (Math.max(...wanted.map(endOf)) + RIGHT) * scale - place.clientWidth;
  place.scrollTop = clamp(Math.min(bottom(wanted), top(wanted)), bottom(held), top(held));
  place.scrollLeft = isAtEnd ? right : Math.min(right, nodes[0].x * scale - PADDING);
}

function edgesOf(view, stage, shown) {
  const edges = [];
  for (const parent of shown) {
    for (const child of parent.children) {
      if (!isDrawn(view, stage, child)) continue;
      const x0 = parent.x + parent.pill;
      const middle = (x0 + child.x) / 2;
      const d = `M${x0} ${parent.y}C${middle} ${parent.y} ${middle} ${child.y} ${child.x} ${child.y}`;
      const width = { node: 1 + 6 * child.p, bonus: 2, ghost: 1 }[child.kind];
      const kind = `edge ${kindOf(view, stage, child)}`;
      edges.push(svg("path", { d, class: kind, "stroke-width": width.toFixed(2) }));
    }
  }
  return edges;
}

function kindOf(view, stage, { kind, row }) {
  if (kind !== "node") return kind;
  const isDecided = isAt(stage, "accept");
  return classes({
    accepted: isDecided && view.isAccepted.has(row),
    lost: isDecided && !view.isAccepted.has(row),
    retrieved: view.isRetrieved.has(row),
  });
}

function itemOf(view, stage, item) {
  if (item.kind === "bonus") return bonusNode(item);
  if (item.kind === "ghost") return ghostNode(item);
  const { row } = item;
  const kind = kindOf(view, stage, item);
  const flags = {
    root: row === 0,
    running: stage.pass !== undefined && view.depths[row] === stage.pass && view.tree.slots[row] >= 0,
    fresh: isFresh(view, stage, row),
  };
  return svg("g", {
    class: `node ${kind} ${classes(flags)}`,
    "data-row": row,
    tabindex: 0,
    role: "treeitem",
    "aria-level": item.depth + 1,
    "aria-selected": String(state.pinned === row),
    "aria-label": readAloud(view, stage, row),
  }, ...partsOf(view, stage, item));
}

function isFresh(view, stage, row) {
  if (stage.isMemory) return view.isRetrieved.has(row);
  return stage.pass !== undefined && view.depths[row] === stage.pass + 1;
}

function partsOf(view, stage, item) {
  const { x, y, note } = item;
  const end = x + item.pill;
  const start = end - noteWidth(note);
  const parts = pill(x, y, item.pill, 0.05 + 0.4 * item.p, item.label);
  if (note.kind === "says") {
    const chip = { x: start, y: y - PILL / 2, width: end - start, height: PILL, rx: 5 };
    parts.push(svg("rect", { ...chip, class: "chip" }));
  }
  const left = note.kind === "says" ? start + PADDING : start;
  parts.push(svg("text", { x: left, y: y + 4.5, class: `note ${note.kind ?? ""}` }, note.text));
  const hasMore = item.children.some((child) => isDrawn(view, stage, child));
  if (!hasMore && isGrowing(stage)) {
    const gate = view.tree.stopped[item.row] ?? "";
    parts.push(svg("text", { x: end + PADDING, y: y + 4.5, class: "gate" }, gate));
  }
  return parts;
}

function pill(x, y, width, opacity, label) {
  return [
    svg("rect", { x, y: y - PILL / 2, width, height: PILL, rx: 5, "fill-opacity": opacity.toFixed(3) }),
    svg("text", { x: x + PADDING, y: y + 4.5, class: "label" }, label),
  ];
}

function bonusNode(item) {
  const title = `bonus, the target's own token: ${item.text}`;
  return svg("g", { class: "bonus-node", role: "img", "aria-label": title },
    ...pill(item.x, item.y, item.width, 0, item.label),
    svg("text", { x: item.x + item.width + PADDING, y: item.y + 4.5, class: "note" }, "bonus"));
}

function ghostNode(item) {
  const hit = { x: item.x, y: item.y - 8, width: item.width + item.room, height: 16, class: "hit" };
  return svg("g", { class: "ghost", "data-row": item.row, "aria-hidden": "true" }, svg("rect", hit),
    svg("text", { x: item.x + PADDING, y: item.y + 4, class: "label" }, item.label),
    svg("text", { x: item.x + item.width, y: item.y + 4, class: "note" }, item.note));
}
