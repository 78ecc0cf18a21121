// What the rows of a tree are to the target's pass and to both caches: the mask, which says what each
// row may see, and the caches, as strips of slots.

const STRIP = { height: 23, label: 50, committed: 132, top: 17, below: 30 };

function buildMask() {
  const place = byId("mask");
  return function drawMask(view, stage) {
    const n = view.tree?.tokens.length;
    const isMade = n && isAt(stage, "mask");
    byId("mask-note").textContent = isMade ? `${n} × ${n}, positions` : "";
    const why = n ? "Made when the tree has grown." : "The prompt’s pass has no tree, and no mask.";
    place.replaceChildren(isMade ? maskOf(view, stage, roomOf(place)) : nothing(why));
  };
}

// Row i marks its path from the root; rows of one depth stand at one position, shown by the bracket
// beside them.
function maskOf(view, stage, room) {
  const { tokens, parents } = view.tree;
  const n = tokens.length;
  const [head, all, brackets] = [17, 32, 46]; // the heading, the columns of the text and of positions
  const high = clamp((room.height - head - 2) / n, 1, 26);
  const labels = tokens.map((id) => shortened(visible(word(id)), 9));
  const cellBeside = (left) => Math.min(high, (room.width - left - all - brackets) / n);
  const labelRoom = Math.max(...labels.map((label) => widthOf(label, 12))) + 8;
  const isLabelled = cellBeside(labelRoom) >= 12;
  const left = isLabelled ? labelRoom : 4;
  const cell = cellBeside(left);
  const x = left + all;
  const parts = [
    svg("text", { x: left + all / 2 - 2, y: 12, class: "head" }, "text"),
    svg("rect", { x: left, y: head, width: all - 4, height: n * cell, class: "all" }),
    svg("rect", { x, y: head, width: n * cell, height: n * cell, class: "field" }),
  ];
  const end = x + n * cell;
  const side = (cell - (cell > 6 ? 1 : 0.2 * cell)).toFixed(2);
  let marks = ""; // all as one path, as there may be thousands
  tokens.forEach((id, row) => {
    const y = head + row * cell;
    const across = { x: left, y, width: end - left, height: cell, class: "band" };
    const down = { x: x + row * cell, y: head, width: cell, height: n * cell, class: "band down" };
    for (const band of [across, down]) parts.push(svg("rect", { ...band, "data-row": row }));
    if (isLabelled) {
      const accepted = view.isAccepted.has(row) && isAt(stage, "accept");
      const name = { x: left - 5, y: y + cell / 2 + 4, class: classes({ row: true, accepted }) };
      parts.push(svg("text", { ...name, "data-row": row }, labels[row]));
    }
    for (let seen = row; seen >= 0; seen = parents[seen]) {
      marks += `M${(x + seen * cell).toFixed(2)} ${y.toFixed(2)}h${side}v${side}h-${side}z`;
    }
  });
  parts.push(svg("path", { class: "sees", d: marks }), ...positions(view, cell, end + 4, head));
  const label = `Mask: ${counted(n, "row")} of the tree, each sees the text and its ancestors`;
  const attributes = { role: "img", "aria-label": label };
  return drawing(end + brackets, head + n * cell + 2, room.scale, attributes, ...parts);
}

// A bracket over the rows of each depth, with their position.
function positions(view, cell, x, y) {
  const parts = [];
  for (let depth = 0; depth <= view.depth; depth++) {
    const top = y + view.depths.indexOf(depth) * cell + 1;
    const bottom = y + (view.depths.lastIndexOf(depth) + 1) * cell - 1;
    const d = `M${x} ${top}h3V${bottom}h-3`;
    if (bottom - top > 4) parts.push(svg("path", { class: "bracket", d }));
    if (bottom - top >= 9) {
      const middle = { x: x + 7, y: (top + bottom) / 2 + 4, class: "position" };
      parts.push(svg("text", middle, depth ? `n+${depth}` : "n"));
    }
  }
  return parts;
}

function buildCaches() {
  const place = byId("caches");
  return function drawCaches(view, stage) {
    byId("caches-note").textContent = view.tree ? `n = ${view.n}` : "";
    place.replaceChildren(view.tree ? cachesOf(view, stage, roomOf(place)) : promptCaches(view));
  };
}

function promptCaches({ iteration }) {
  const [target, draft] = iteration.cached;
  const drafts = draft ? `, ${draft} in the draft’s` : "";
  return nothing(`After the prompt: ${counted(target, "token")} in the target’s cache${drafts}.`);
}

// One above the other, so that slot n, the root's, is at the same place: what is committed, the root,
// then the scratch rows; and what the commit moves.
function cachesOf(view, stage, room) {
  const { iteration, tree } = view;
  const width = Math.max(room.width, 260);
  const start = STRIP.label + STRIP.committed;
  const most = Math.max(tree.tokens.length, nRun(view, { kind: "whole" }));
  const plan = { view, stage, start, cell: clamp((width - start - 4) / most, 2, 52) };
  const below = STRIP.top + STRIP.height + STRIP.below;
  const rows = isAt(stage, "mask") ? tree.tokens.map((_, row) => row) : [];
  const slots = new Array(nRun(view, stage)).fill(null); // null: better nodes took its place
  tree.slots.forEach((slot, row) => {
    if (isRun(view, stage, row)) slots[slot] = row;
  });
  const every = Math.ceil(30 / plan.cell);
  const numbers = [];
  for (let slot = 0; slot < Math.max(rows.length, slots.length); slot += every) {
    const x = start + (slot + 0.5) * plan.cell;
    numbers.push(svg("text", { x, y: 12, class: "slot" }, String(view.n + slot)));
  }
  const ofTree = counted(rows.length, "row");
  const label = `Caches: ${view.n} committed in the target's, then ${ofTree} of the tree`;
  const attributes = { role: "img", "aria-label": label };
  return drawing(width, below + STRIP.height + STRIP.below, room.scale, attributes,
    arrowhead(), ...numbers,
    ...targetStrip(plan, rows, STRIP.top),
    ...(iteration.draft_rows.length ? draftStrip(plan, slots, below) : idleDraft(view, below)),
  );
}

function arrowhead() {
  const shape = svg("path", { d: "M0 0 6 3 0 6z" });
  const size = { markerWidth: 6, markerHeight: 6, markerUnits: "userSpaceOnUse" };
  const marker = { id: "arrowhead", ...size, refX: 5, refY: 3, orient: "auto" };
  return svg("defs", {}, svg("marker", marker, shape));
}

function targetStrip(plan, rows, top) {
  const { view, stage } = plan;
  const { path, cached } = view.iteration;
  const parts = [...committed("target", top, `${view.n} committed`)];
  parts.push(...rows.map((row) => slotOf(plan, row, row, top, isAt(stage, "verify"))));
  if (!isAt(stage, "commit")) return parts;
  const drop = droppedBy(view);
  const note = drop > 0 ? `window drops ${drop}, then ${cached[0]}` : `then ${cached[0]}`;
  parts.push(after(note, top), ...moves(plan, path, top));
  if (drop > 0) { // the oldest tokens after the sinks
    const scale = (STRIP.committed - 3) / view.n;
    const x = STRIP.label + settings.window.sinks * scale;
    parts.push(svg("rect", { x, y: top, width: drop * scale, height: STRIP.height, class: "dropped" }));
  }
  return parts;
}

function draftStrip(plan, slots, top) {
  const { view, stage } = plan;
  const { draft_rows: read, path, cached } = view.iteration;
  const note = read[0] > 1 ? `${view.nDraft} + ${read[0] - 1} read now` : `${view.nDraft} committed`;
  const parts = [...committed("draft", top, note)];
  parts.push(...slots.map((row, slot) => slotOf(plan, row, slot, top, true)));
  if (!isAt(stage, "commit")) return parts;
  const kept = path.map((row) => view.tree.slots[row]).filter((slot) => slot >= 0);
  return [...parts, after(`then ${cached[1]}`, top), ...moves(plan, kept, top)];
}

function idleDraft(view, top) {
  const write = (x, note) => svg("text", { x, y: top + 16, class: "name" }, note);
  if (!settings.draft) {
    return [write(0, "draft"), write(STRIP.label, "none: this method needs no draft")];
  }
  const note = write(STRIP.label + STRIP.committed + 6, "not asked in this iteration");
  return [...committed("draft", top, `${view.nDraft} committed`), note];
}

// A strip's name, and the committed tokens.
function committed(name, top, note) {
  const x = STRIP.label;
  const width = STRIP.committed - 3;
  return [
    svg("text", { x: 0, y: top + 16, class: "name" }, name),
    svg("rect", { x, y: top, width, height: STRIP.height, rx: 3, class: "committed" }),
    svg("text", { x: x + width / 2, y: top + 16, class: "count" }, note),
  ];
}

function after(note, top) {
  const middle = { x: STRIP.label + STRIP.committed / 2, y: top + STRIP.height + 15 };
  return svg("text", { ...middle, class: "after" }, note);
}

// One slot above the committed.
function slotOf({ view, cell, start }, row, slot, top, isWritten) {
  const x = start + slot * cell;
  const flags = { cell: true, written: isWritten, root: row === 0, gone: row === null };
  flags.retrieved = view.isRetrieved.has(row);
  const gap = cell > 5 ? 2 : 0.4;
  const box = { x, y: top, width: cell - gap, height: STRIP.height, rx: cell > 12 ? 3 : 0 };
  const group = svg("g", { class: classes(flags), "data-row": row }, svg("rect", box));
  const most = Math.floor((cell - 5) / widthOf("0", 12));
  const text = row === null ? "" : visible(word(view.tree.tokens[row]));
  if (isWritten && text && (most >= 4 || text.length <= most)) {
    group.append(svg("text", { x: x + (cell - gap) / 2, y: top + 16 }, shortened(text, most)));
  }
  return group;
}

// Arrows from slots to where the commit moves them, one after another; what stays has a line below.
function moves({ start, cell }, from, top) {
  const y = top + STRIP.height + 2;
  const end = start + from.length * cell - 2;
  const parts = [svg("path", { class: "stays", d: `M${start} ${y + 1}H${end}` })];
  from.forEach((slot, to) => {
    if (slot === to) return;
    const x0 = start + (slot + 0.5) * cell;
    const x1 = start + (to + 0.5) * cell;
    const dip = y + 10 + Math.min(16, (x0 - x1) / 6);
    const d = `M${x0} ${y}C${x0} ${dip} ${x1} ${dip} ${x1} ${y + 3}`;
    parts.push(svg("path", { class: "move", d }));
  });
  return parts;
}
