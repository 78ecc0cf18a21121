// The drawing of the tree (layout.js). A node's note, behind its token, depends on the step.

const MIN_SCALE = 11 / NOTE_SIZE; // a larger tree is not shrunk further, but panned
const MAX_LENGTH = { compact: 8, note: 9 }; // of a token, in characters
const treeOptions = { zoom: 1, hasGhosts: null }; // hasGhosts null: show dropped candidates if they fit

function buildTree() {
  const place = byId("tree");
  byId("ghosts").addEventListener("click", () => {
    treeOptions.hasGhosts = byId("ghosts").getAttribute("aria-pressed") !== "true";
    redraw();
  });
  for (const [name, by] of [["smaller", 1 / 1.25], ["larger", 1.25]]) {
    byId(name).addEventListener("click", () => zoomTo(treeOptions.zoom * by));
  }
  byId("fit").addEventListener("click", () => zoomTo(1));
  return function drawTree(view, stage) {
    const focused = document.activeElement.closest("#tree .node")?.dataset.row;
    place.replaceChildren();
    if (view.tree) drawRows(view, stage, place);
    else place.append(prefillDrawing(view, place));
    if (!focused) return;
    const same = place.querySelector(`.node[data-row="${focused}"]`);
    (same ?? place).focus({ preventScroll: true });
  };
}

function zoomTo(zoom) {
  treeOptions.zoom = clamp(zoom, 0.4, 4);
  redraw();
}

// The prefill has no tree: draw the prompt and the first token.
function prefillDrawing(view, place) {
  const { width, scale } = roomOf(place);
  const origin = `prompt, ${formatCount(data.prompt.tokens.length, "token")}`;
  const start = LEFT + widthOf(origin, NOTE_SIZE) + PADDING;
  const bonus = { ...labelOf(view.iteration.tokens[0]), kind: "bonus", x: start + 60, y: 40 };
  return drawing(Math.max(width, bonus.x + 160), 80, scale,
    { role: "img", "aria-label": "The prefill of the prompt" },
    svg("text", { x: LEFT, y: 44 }, origin),
    svg("path", { class: "edge bonus", d: `M${start} 40h60`, "stroke-width": 2 }),
    bonusNode(bonus),
  );
}

function drawRows(view, stage, place) {
  const { plan, scale, hasGhosts } = chooseLayout(view, stage, place);
  byId("ghosts").setAttribute("aria-pressed", hasGhosts);
  byId("ghosts").disabled = !view.tree.dropped.length;
  const shown = plan.items.filter((item) => isDrawn(view, stage, item));
  const deepest = Math.max(...shown.map((item) => (item.kind === "node" ? item.depth : 0)));
  const root = `n = ${view.n}`;
  const hasRoom = !(plan.columns[1] - plan.columns[0] < widthOf(root, NOTE_SIZE) + PADDING);
  const columns = plan.columns.slice(0, deepest + 1).map((x, depth) =>
    svg("text", { x, y: 15 }, depth ? `n+${depth}` : hasRoom ? root : "n"));
  const label = `Tree of ${formatCount(view.tree.tokens.length, "row")}`;
  place.append(drawing(plan.width, plan.height, scale, { role: "tree", "aria-label": label },
    svg("g", { class: "columns", "aria-hidden": "true" }, ...columns),
    svg("g", { "aria-hidden": "true" }, ...edgesOf(view, stage, shown)),
    ...shown.map((item) => itemOf(view, stage, item)),
  ));
  scrollTree(view, stage, place, shown, scale);
}

// The first of these layouts that fits: with dropped candidates, unless the button decides; with room
// for the notes of every step, so that no node moves; with room for this step's notes; with shorter
// tokens and notes. If none fits, the last one at the smallest scale, which has to be panned.
function chooseLayout(view, stage, place) {
  const { width, height, scale } = roomOf(place);
  const [wide, high] = [width - 16 / scale, height - 16 / scale]; // without scroll bars
  const hasGhosts = treeOptions.hasGhosts ?? false;
  const layouts = [{ hasGhosts, fitsAllSteps: true }, { hasGhosts }, { hasGhosts, isCompact: true }];
  if (treeOptions.hasGhosts === null) layouts.unshift({ hasGhosts: true, fitsAllSteps: true });
  let found = null;
  for (const layout of layouts) {
    const root = makeItems(view, stage, layout);
    const minGap = layout.isCompact ? GAP.compact : GAP.min;
    const needed = layOut(root, { width: 0, height: 0 }, minGap);
    const fitting = Math.min(wide / needed.width, high / needed.height);
    const zoom = clamp(fitting, MIN_SCALE, 1) * treeOptions.zoom;
    const plan = layOut(root, { width: wide / zoom, height: high / zoom }, minGap);
    found = { plan, scale: zoom * scale, hasGhosts: layout.hasGhosts };
    if (fitting >= 1 || (!layout.fitsAllSteps && wide / needed.width >= MIN_SCALE)) break;
  }
  return found;
}

// The tree of drawn items: nodes, the bonus token and dropped candidates, each with its parent's row.
// fitsAllSteps: with room for the notes of other steps. isCompact: with shortened tokens and notes.
function makeItems(view, stage, { hasGhosts, fitsAllSteps, isCompact }) {
  const { tree, iteration } = view;
  const items = tree.tokens.map((id, row) => {
    const shown = labelOf(id, isCompact ? MAX_LENGTH.compact : MAX_LABEL);
    const item = { kind: "node", row, p: tree.p[row], depth: view.depths[row], ...shown };
    item.note = noteOf(view, stage.kind, row, isCompact);
    item.pill = item.width + noteWidth(item.note);
    const kinds = fitsAllSteps ? ["whole", "verify", "accept", "commit"] : [stage.kind];
    item.width += Math.max(...kinds.map((kind) => noteWidth(noteOf(view, kind, row, isCompact))));
    item.room = fitsAllSteps || showsGates(stage) ? widthOf(tree.stopped[row] ?? "", NOTE_SIZE) : 0;
    return item;
  });
  items.forEach((item, row) => (item.children = view.children[row].map((child) => items[child])));
  if (hasGhosts) {
    for (const [row, id, p, gate] of tree.dropped) {
      const note = `${formatProbability(p)} ${gate}`;
      const item = { kind: "ghost", row, note, depth: view.depths[row] + 1, ...labelOf(id) };
      items[row].children.push({ ...item, room: widthOf(note, NOTE_SIZE) });
    }
  }
  const bonus = { kind: "bonus", depth: view.depths[view.leaf] + 1, ...labelOf(iteration.bonus) };
  items[view.leaf].children.push({ ...bonus, room: widthOf("bonus", NOTE_SIZE) });
  return items[0];
}

// The text of a node's note, which is p(u) or what the step shows, and its CSS class.
function noteOf(view, kind, row, isCompact) {
  if (kind === "verify") {
    const prediction = shorten(visible(textOf(view.tree.target[row])), MAX_LENGTH.note);
    return { text: `→${prediction}`, kind: "predicted" };
  }
  if (kind === "accept") return trialMark(view, row, isCompact);
  if (kind === "commit") {
    const slot = view.iteration.path.indexOf(row);
    if (slot < 0) return { text: "" };
    return { text: slot === row ? "stays" : `→${view.n + slot}`, kind: "accepted" };
  }
  return { text: row ? formatProbability(view.tree.p[row]) : "" };
}

// Whether a node was accepted; for drawn candidates also its uniform number and acceptance
// probability.
function trialMark(view, row, isCompact) {
  const { parents } = view.tree;
  const [mark, kind] = view.isAccepted.has(row) ? ["✓", "accepted"] : ["✗", "rejected"];
  const trial = view.trials.get(row);
  if (trial && isCompact) return { text: `${trial.uniform.toFixed(2)} ${mark}`, kind };
  if (trial) {
    const sign = trial.uniform < trial.p ? "<" : "≥";
    return { text: `${trial.uniform.toFixed(2)} ${sign} ${trial.p.toFixed(2)} ${mark}`, kind };
  }
  const isAccepted = view.isAccepted.has(row); // also without a trial, by a node below it
  const isTried = row > 0 && (hasTrials ? isAccepted : view.isAccepted.has(parents[row]));
  return isTried ? { text: mark, kind } : { text: "" };
}

function noteWidth({ text, kind }) {
  return text ? widthOf(text, NOTE_SIZE) + PADDING * (kind === "predicted" ? 2 : 1) : 0;
}

function isDrawn(view, stage, item) {
  if (item.kind === "bonus") return hasReached(stage, "accept");
  if (!isRowShown(view, stage, item.row)) return false;
  if (item.kind === "node") return true;
  return showsGates(stage) && isRunByDraft(view, stage, item.row);
}

// Whether the stage shows gates and dropped candidates.
function showsGates(stage) {
  return ["whole", "draft", "adapt"].includes(stage.kind);
}

// Scroll a tree that is larger than its panel: to the new nodes of a draft pass; to the end of the
// accepted path; in other stages to the root, with as much of the path as fits.
function scrollTree(view, stage, place, shown, scale) {
  const nodes = shown.filter((item) => item.kind === "node");
  const fresh = nodes.filter((item) => item.depth === stage.pass + 1);
  const isOnPath = ({ kind, row }) => kind === "bonus" || (kind === "node" && view.isAccepted.has(row));
  const path = hasReached(stage, "accept") ? shown.filter(isOnPath) : nodes.slice(0, 1);
  const preferred = fresh.length ? fresh : path;
  const showsEnd = fresh.length > 0 || ["accept", "commit"].includes(stage.kind);
  const required = fresh.length ? preferred : [showsEnd ? path.at(-1) : nodes[0]];
  const top = (items) => (Math.min(...items.map((item) => item.y)) - NODE_HEIGHT) * scale;
  const end = (items) => (Math.max(...items.map((item) => item.y)) + NODE_HEIGHT) * scale;
  const bottom = (items) => end(items) - place.clientHeight;
  const right = (Math.max(...preferred.map(endOf)) + RIGHT) * scale - place.clientWidth;
  place.scrollTop = clamp(Math.min(bottom(preferred), top(preferred)), bottom(required), top(required));
  place.scrollLeft = showsEnd ? right : Math.min(right, nodes[0].x * scale - PADDING);
}

function edgesOf(view, stage, shown) {
  return shown.flatMap((parent) => parent.children
    .filter((child) => isDrawn(view, stage, child))
    .map((child) => edgeTo(parent, child, classOf(view, stage, child))));
}

function classOf(view, stage, { kind, row }) {
  if (kind !== "node") return kind;
  const isDecided = hasReached(stage, "accept");
  return classes({
    accepted: isDecided && view.isAccepted.has(row),
    faded: isDecided && !view.isAccepted.has(row),
    retrieved: view.isRetrieved.has(row),
  });
}

function itemOf(view, stage, item) {
  if (item.kind === "bonus") return bonusNode(item);
  if (item.kind === "ghost") return ghostNode(item);
  const { row } = item;
  const kind = classOf(view, stage, item);
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
    "aria-label": accessibleName(view, stage, row),
  }, ...partsOf(view, stage, item));
}

function isFresh(view, stage, row) {
  if (stage.isRetrieval) return view.isRetrieved.has(row);
  return stage.pass !== undefined && view.depths[row] === stage.pass + 1;
}

function partsOf(view, stage, item) {
  const { x, y, note } = item;
  const end = x + item.pill;
  const start = end - noteWidth(note);
  const parts = pill(x, y, item.pill, 0.05 + 0.4 * item.p, item.label);
  if (note.kind === "predicted") {
    const chip = { x: start, y: y - NODE_HEIGHT / 2, width: end - start, height: NODE_HEIGHT, rx: 5 };
    parts.push(svg("rect", { ...chip, class: "chip" }));
  }
  const left = note.kind === "predicted" ? start + PADDING : start;
  parts.push(svg("text", { x: left, y: y + 4.5, class: `note ${note.kind ?? ""}` }, note.text));
  const hasMore = item.children.some((child) => isDrawn(view, stage, child));
  if (!hasMore && showsGates(stage)) {
    const gate = view.tree.stopped[item.row] ?? "";
    parts.push(svg("text", { x: end + PADDING, y: y + 4.5, class: "gate" }, gate));
  }
  return parts;
}
