// The drawn tree. Widths of lines and strength of colour are p(u); what is on the accepted path,
// retrieved or run is a class of the node, and the style sheet says how that looks.

const tree = { ghosts: null, zoom: 1, draw: null };
const ROOMY = 23; // a line with room for a note above the middle
const FEW = 40; // nodes and dropped candidates that are drawn unasked

function buildTree() {
  const place = byId("tree");
  byId("ghosts").addEventListener("click", () => {
    tree.ghosts = byId("ghosts").getAttribute("aria-pressed") !== "true";
    redraw();
  });
  byId("smaller").addEventListener("click", () => zoomTo(tree.zoom / 1.25));
  byId("larger").addEventListener("click", () => zoomTo(tree.zoom * 1.25));
  byId("fit").addEventListener("click", () => zoomTo(fitting()));
  return function drawTree(view, stage) {
    const focused = document.activeElement.closest("#tree .node");
    place.replaceChildren(view.tree ? treeOf(view, stage, place) : promptOf(view, place));
    if (focused) refocus(place, focused.dataset.row);
  };
}

// The zoom at which the whole tree is in sight, if that is still legible.
function fitting() {
  const place = byId("tree");
  const drawn = place.querySelector("svg").viewBox.baseVal;
  const least = Math.min(place.clientWidth / drawn.width, place.clientHeight / drawn.height);
  return Math.min(1, least / scaleOf(place));
}

function zoomTo(zoom) {
  tree.zoom = clamp(zoom, 0.4, 3);
  redraw();
}

function refocus(place, row) {
  const node = place.querySelector(`.node[data-row="${row}"]`);
  (node ?? place).focus({ preventScroll: true });
}

// The prompt's own pass has no tree: what it read, and what it gave.
function promptOf(view, place) {
  const width = Math.max(place.clientWidth - 4, 200);
  const middle = 40;
  const origin = `prompt, ${counted(data.prompt.tokens.length, "token")}`;
  const start = LEFT + widthOf(origin, NOTE) + 8;
  const bonus = { ...labelled(view.iteration.tokens[0]), kind: "bonus", x: start + 60, y: middle };
  return drawing(width, middle + 60, { role: "img", "aria-label": "The prompt's own pass" },
    svg("text", { x: LEFT, y: middle + 4, class: "origin" }, origin),
    svg("path", { class: "edge bonus", d: `M${start} ${middle}h56`, "stroke-width": 2 }),
    bonusNode(bonus),
  );
}

function treeOf(view, stage, place) {
  const nDrawn = view.tree.tokens.length + view.tree.dropped.length;
  const hasGhosts = tree.ghosts ?? nDrawn <= FEW;
  byId("ghosts").setAttribute("aria-pressed", hasGhosts);
  byId("ghosts").disabled = !view.tree.dropped.length;
  const { plan, scale } = planOf(place, itemsOf(view, hasGhosts));
  const drawn = drawing(plan.width, plan.height, {
    role: "tree",
    "aria-label": `Tree of ${counted(view.tree.tokens.length, "row")}`,
    class: classes({ decided: isAt(stage, "accept") }),
  });
  drawn.setAttribute("width", plan.width * scale);
  drawn.setAttribute("height", plan.height * scale);
  const shown = plan.items.filter((item) => isDrawn(view, stage, item));
  drawn.append(svg("g", { class: "columns", "aria-hidden": "true" }, ...columnsOf(view, plan)));
  drawn.append(svg("g", { "aria-hidden": "true" }, ...edgesOf(view, shown)));
  drawn.append(...shown.map((item) => itemOf(view, stage, item)));
  const ends = endsOf(view, stage, plan, shown);
  requestAnimationFrame(() => showEnds(place, ends, scale));
  return drawn;
}

// The layout at the usual scale, or at a smaller one that saves scrolling.
function planOf(place, root) {
  const { clientWidth: width, clientHeight: height } = place;
  const usual = tree.zoom * scaleOf(place);
  const plan = layOut(root, { width: width / usual - 4, height: height / usual - 4 });
  const scale = Math.max(Math.min(1, usual), Math.min(usual, width / plan.width, height / plan.height));
  if (scale === usual) return { plan, scale };
  return { plan: layOut(root, { width: width / scale - 4, height: height / scale - 4 }), scale };
}

// Larger in a larger place, the same for every iteration.
function scaleOf(place) {
  return clamp(Math.min(place.clientWidth / 640, place.clientHeight / 320), 1, 1.5);
}

function isDrawn(view, stage, item) {
  if (item.kind === "bonus") return isAt(stage, "accept");
  if (!isThere(view, stage, item.row)) return false;
  if (item.kind === "node") return true;
  return ["whole", "draft", "adapt"].includes(stage.kind) && isRun(view, stage, item.row);
}

// What is to be seen where the tree is larger than its place: what a pass of the draft or memory has
// given, else the end of the accepted path.
function endsOf(view, stage, plan, shown) {
  if (stage.isMemory) return shown.filter((item) => view.isRetrieved.has(item.row));
  if (stage.pass === undefined) return plan.items.filter((item) => item.kind === "bonus");
  const nodes = shown.filter((item) => item.kind === "node");
  const deepest = Math.max(...nodes.map((item) => item.depth));
  return nodes.filter((item) => item.depth === deepest);
}

function showEnds(place, ends, scale) {
  const middle = (ends[0].y + ends[ends.length - 1].y) / 2;
  const right = Math.max(...ends.map((item) => item.x + item.width));
  place.scrollTop = Math.max(0, middle * scale - place.clientHeight / 2);
  place.scrollLeft = Math.max(0, (right + 40) * scale - place.clientWidth);
}

function columnsOf(view, plan) {
  const found = [];
  for (let depth = 0; depth <= view.depth; depth++) {
    const x = plan.columns[depth];
    const name = depth ? `n+${depth}` : `n = ${view.n}`;
    found.push(svg("text", { x, y: 14 }, name));
  }
  return found;
}

function edgesOf(view, shown) {
  const edges = [];
  for (const parent of shown) {
    for (const child of parent.children) {
      if (shown.includes(child)) edges.push(edge(view, parent, child));
    }
  }
  return edges;
}

function edge(view, parent, child) {
  const x0 = parent.x + parent.width;
  const middle = (x0 + child.x) / 2;
  const path = `M${x0} ${parent.y}C${middle} ${parent.y} ${middle} ${child.y} ${child.x} ${child.y}`;
  const width = child.kind === "node" ? 1 + 6 * child.p : child.kind === "bonus" ? 2 : 1;
  return svg("path", { d: path, class: `edge ${kindOf(view, child)}`, "stroke-width": width.toFixed(2) });
}

function kindOf(view, item) {
  if (item.kind !== "node") return item.kind;
  const isRetrieved = view.isRetrieved.has(item.row);
  return classes({ accepted: view.isAccepted.has(item.row), retrieved: isRetrieved });
}

function itemOf(view, stage, item) {
  if (item.kind === "bonus") return bonusNode(item);
  if (item.kind === "ghost") return ghostNode(item);
  const { row } = item;
  const attributes = {
    class: classes({
      node: true,
      accepted: view.isAccepted.has(row),
      retrieved: view.isRetrieved.has(row),
      run: view.tree.slots[row] >= 0,
      root: row === 0,
      running: stage.kind === "draft" && view.depths[row] === stage.pass && view.tree.slots[row] >= 0,
      fresh: stage.kind === "draft" && view.depths[row] === stage.pass + 1,
    }),
    "data-row": row,
    tabindex: 0,
    role: "treeitem",
    "aria-level": item.depth + 1,
    "aria-selected": String(state.pinned === row),
    "aria-label": readAloud(view, row),
  };
  const notes = notesOf(view, stage, item);
  const reach = Math.max(...notes.map((note) => widthOf(note.textContent, NOTE)));
  const width = item.width + 5 + reach; // all of it can be pointed at
  const hit = svg("rect", { x: item.x, y: item.y - 9, width, height: 18, class: "hit" });
  return svg("g", attributes, hit, ...box(item, 1), ...notes);
}

// Where there is room, what stands after a node with children is above and below the lines to them.
function notesOf(view, stage, item) {
  const isLifted = item.children.length && item.line >= ROOMY;
  const write = (text, kind, y) => {
    return svg("text", { x: item.x + item.width + 5, y: item.y + y, class: `note ${kind}` }, text);
  };
  const [note, kind] = noteOf(view, stage, item);
  if (kind !== "number") return [write(note, kind, isLifted && kind === "target" ? -5 : 3.5)];
  const gate = view.tree.stopped[item.row] ?? "";
  if (isLifted) return [write(note, kind, -5), write(gate, kind, 12)];
  return [write(item.children.length ? note : `${note} ${gate}`, kind, 3.5)];
}

function box(item, lift) {
  const height = Math.min(19, (item.line ?? 19) - 1);
  return [
    svg("rect", {
      x: item.x, y: item.y - height / 2, width: item.width, height, rx: 5,
      "fill-opacity": (0.05 + 0.4 * (item.p ?? 0) * lift).toFixed(3),
    }),
    svg("text", { x: item.x + PADDING, y: item.y + 4, class: "label" }, item.label),
  ];
}

function bonusNode(item) {
  const title = `bonus, the target's own token: ${item.text}`;
  return svg("g", { class: "bonus-node", role: "img", "aria-label": title }, ...box(item, 0),
    svg("text", { x: item.x + item.width + 5, y: item.y + 3.5, class: "note" }, "bonus"));
}

function ghostNode(item) {
  return svg("g", { class: "ghost", "data-dropped": item.index, "aria-hidden": "true" },
    svg("rect", { x: item.x, y: item.y - 7, width: item.width + item.room, height: 14, class: "hit" }),
    svg("text", { x: item.x + PADDING, y: item.y + 3.5, class: "label" }, item.label),
    svg("text", { x: item.x + item.width - 2, y: item.y + 3.5, class: "note" },
      `${probability(item.p)} ${item.gate}`));
}

// What stands after a node: p(u), or what the step is about; and of which kind that is.
function noteOf(view, stage, { row, p }) {
  const { tree: found, iteration } = view;
  if (stage.kind === "verify") {
    const most = view.children[row].length ? 7 : LONGEST;
    return [`→${shortened(visible(word(found.target[row])), most)}`, "target"];
  }
  if (stage.kind === "accept") return markOf(view, row);
  if (stage.kind === "commit") {
    const place = iteration.path.indexOf(row);
    if (place < 0) return ["", ""];
    return [row === place ? "stays" : `→${view.n + place}`, "moved"];
  }
  if (row === 0) return ["", ""];
  return [probability(p), "number"];
}

function markOf(view, row) {
  if (row === 0) return ["", ""];
  if (view.isAccepted.has(row)) return ["✓", "yes"];
  const isTried = view.isAccepted.has(view.tree.parents[row]);
  return isTried ? ["✗", "no"] : ["", ""];
}
