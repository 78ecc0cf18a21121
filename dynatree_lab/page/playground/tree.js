// The drawing of an iteration's tree (layout.js). A node shows p(u), and behind a leaf stands the
// gate that stopped it. Dropped candidates are shown with their gates while they fit, the likeliest
// first. Behind the bonus token stands the gate that kept it out of the tree.

const MIN_SCALE = 0.75; // a larger tree is not shrunk further, but scrolled
const SCALE_WITH_GHOSTS = 0.85; // down to which dropped candidates are drawn
const GHOSTS = [12, 6, 3, 0]; // numbers of dropped candidates to try

function itemsOf({ tree, path, missed }, nGhosts) {
  const leaf = path.at(-1);
  const shown = tree.dropped.filter(({ row, token }) => row !== leaf || token !== missed.token);
  const ghosts = shown.sort((a, b) => b.logprob - a.logprob).slice(0, nGhosts);
  const hasGhosts = new Set(ghosts.map(({ row }) => row));
  const accepted = new Set(path);
  const items = tree.tokens.map((token, row) => {
    const p = Math.exp(tree.logprobs[row]);
    const item = { kind: "node", row, p, depth: tree.depths[row], ...labelOf(token) };
    item.note = row ? formatProbability(p) : "";
    item.pill = item.width += row ? widthOf(item.note, NOTE_SIZE) + PADDING : 0;
    item.gate = row === leaf || hasGhosts.has(row) ? null : gateOf(tree, row);
    item.room = widthOf(item.gate ?? "", NOTE_SIZE);
    item.state = accepted.has(row) ? "accepted" : "faded";
    return item;
  });
  for (let row = 1; row < items.length; row++) items[tree.parents[row]].children.push(items[row]);
  for (const { row, token, logprob, gate } of ghosts) {
    const note = `${formatProbability(Math.exp(logprob))} ${gate}`;
    const item = { kind: "ghost", row, note, depth: tree.depths[row] + 1, ...labelOf(token) };
    items[row].children.push({ ...item, state: "ghost", room: widthOf(note, NOTE_SIZE) });
  }
  const note = ["bonus", missed.gate].filter((word) => word && word !== "limit").join(", ");
  const bonus = { kind: "bonus", state: "bonus", note, depth: tree.depths[leaf] + 1 };
  items[leaf].children.push({
    ...bonus, ...labelOf(missed.token), room: widthOf(note, NOTE_SIZE),
  });
  return items[0];
}

// What ended a branch: the gate of a row without candidates, or that of its likeliest candidate.
function gateOf(tree, row) {
  if (tree.parents.includes(row)) return null;
  return tree.stopped[row] ?? tree.dropped.find((each) => each.row === row)?.gate ?? null;
}

// Draw a tree with as many dropped candidates as fit.
function drawTree(place, iteration) {
  const { width, height, scale } = roomOf(place);
  const room = { width: width - 16 / scale, height: height - 16 / scale }; // without scroll bars
  let plan;
  let zoom;
  for (const nGhosts of GHOSTS) {
    const root = itemsOf(iteration, nGhosts);
    const needed = layOut(root, { width: 0, height: 0 }, GAP.compact);
    const fitting = Math.min(room.width / needed.width, room.height / needed.height);
    zoom = clamp(fitting, MIN_SCALE, 1);
    plan = layOut(root, { width: room.width / zoom, height: room.height / zoom }, GAP.compact);
    if (fitting >= SCALE_WITH_GHOSTS) break;
  }
  const heads = plan.columns.map((x, depth) =>
    svg("text", { x, y: 15 }, depth ? `depth ${depth}` : "root"));
  const edges = plan.items.flatMap((item) =>
    item.children.map((child) => edgeTo(item, child, child.state)));
  const label = `Tree of ${formatCount(iteration.tree.tokens.length, "row")}`;
  const attributes = { role: "tree", "aria-label": label };
  place.replaceChildren(drawing(plan.width, plan.height, zoom * scale, attributes,
    svg("g", { class: "columns", "aria-hidden": "true" }, ...heads),
    svg("g", { "aria-hidden": "true" }, ...edges),
    ...plan.items.map(drawItem)));
  scrollToBonus(place, plan.items, zoom * scale);
}

function drawItem(item) {
  const { kind, row, x, y, p, note, gate, state: name } = item;
  if (kind === "bonus") return bonusNode(item);
  if (kind === "ghost") return ghostNode(item);
  const right = x + item.pill;
  const noteX = right - PADDING - widthOf(note, NOTE_SIZE);
  const flags = { node: true, [name]: true, root: row === 0 };
  const role = { role: "treeitem", "aria-level": item.depth + 1, tabindex: 0 };
  const spoken = `${item.text} ${note}${gate ? `, ended by ${gate}` : ""}, ${name}`;
  return svg("g", { class: classes(flags), "data-row": row, ...role, "aria-label": spoken },
    ...pill(x, y, item.pill, 0.05 + 0.4 * p, item.label),
    svg("text", { x: noteX, y: y + 4.5, class: "note" }, note),
    svg("text", { x: right + PADDING, y: y + 4.5, class: "gate" }, gate ?? ""));
}

// Scroll a tree that is larger than its place to the end of the accepted path.
function scrollToBonus(place, items, scale) {
  const { x, y, width } = items.find(({ kind }) => kind === "bonus");
  place.scrollTop = y * scale - place.clientHeight / 2;
  place.scrollLeft = (x + width) * scale - 0.8 * place.clientWidth;
}
