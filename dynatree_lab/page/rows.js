// The rows of a tree in the target model's pass and in both caches: the mask, which shows the rows that
// each row attends to, and the caches as strips of slots.

const STRIP = { height: 23, label: 50, committed: 132, top: 17, below: 30 };

function buildMask() {
  const place = byId("mask");
  return function drawMask(view, stage) {
    const n = view.tree?.tokens.length;
    const isMade = n && hasReached(stage, "mask");
    byId("mask-note").textContent = isMade ? `${n} × ${n}, with positions` : "";
    const why = n ? "The mask is made when the tree is complete." : "The prefill has no tree mask.";
    place.replaceChildren(isMade ? maskOf(view, stage, roomOf(place)) : emptyNote(why));
  };
}

// Row i has marks for its path from the root. A bracket joins the rows of one depth, which have the
// same position.
function maskOf(view, stage, room) {
  const { tokens, parents } = view.tree;
  const n = tokens.length;
  const [head, all, brackets] = [17, 38, 46]; // heading, column of cached tokens, column of positions
  const high = Math.min((room.height - head - 2) / n, 26);
  const labels = tokens.map((id) => shorten(visible(textOf(id)), 9));
  const cellBeside = (left) => Math.min(high, (room.width - left - all - brackets) / n);
  const labelRoom = Math.max(...labels.map((label) => widthOf(label, 12))) + 8;
  const isLabelled = cellBeside(labelRoom) >= 12;
  const left = isLabelled ? labelRoom : 4;
  const cell = cellBeside(left);
  const x = left + all;
  const parts = [
    svg("text", { x: left + all / 2 - 2, y: 12, class: "head" }, "cache"),
    svg("rect", { x: left, y: head, width: all - 4, height: n * cell, class: "all" }),
    svg("rect", { x, y: head, width: n * cell, height: n * cell, class: "field" }),
  ];
  const end = x + n * cell;
  const side = (cell - (cell > 6 ? 1 : 0.2 * cell)).toFixed(2);
  let marks = ""; // one path, because there may be thousands of marks
  tokens.forEach((id, row) => {
    const y = head + row * cell;
    const across = { x: left, y, width: end - left, height: cell, class: "band" };
    const down = { x: x + row * cell, y: head, width: cell, height: n * cell, class: "band down" };
    for (const band of [across, down]) parts.push(svg("rect", { ...band, "data-row": row }));
    if (isLabelled) {
      const accepted = view.isAccepted.has(row) && hasReached(stage, "accept");
      const name = { x: left - 5, y: y + cell / 2 + 4, class: classes({ row: true, accepted }) };
      parts.push(svg("text", { ...name, "data-row": row }, labels[row]));
    }
    for (let column = row; column >= 0; column = parents[column]) {
      marks += `M${(x + column * cell).toFixed(2)} ${y.toFixed(2)}h${side}v${side}h-${side}z`;
    }
  });
  parts.push(svg("path", { class: "attends", d: marks }), ...positions(view, cell, end + 4, head));
  const label = "each attends to the cached tokens, its ancestors and itself";
  const attributes = { role: "img", "aria-label": `Mask of ${formatCount(n, "row")}; ${label}` };
  return drawing(end + brackets, head + n * cell + 2, room.scale, attributes, ...parts);
}

// A bracket for the rows of each depth, with their position.
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
  const ofDraft = draft ? `, and the draft model’s has ${draft}` : "";
  const ofTarget = `the target model’s cache has ${formatCount(target, "token")}`;
  return emptyNote(`After the prefill, ${ofTarget}${ofDraft}.`);
}

// The two caches, aligned at slot n, which is the root's: the committed tokens, the root, the other rows
// of the tree, and the moves of the commit.
function cachesOf(view, stage, room) {
  const { iteration, tree } = view;
  const width = Math.max(room.width, 260);
  const start = STRIP.label + STRIP.committed;
  const nSlots = Math.max(tree.tokens.length, nDraftSlots(view, { kind: "whole" }));
  const plan = { view, stage, start, cell: Math.min((width - start - 4) / nSlots, 52) };
  const below = STRIP.top + STRIP.height + STRIP.below;
  const rows = hasReached(stage, "mask") ? tree.tokens.map((_, row) => row) : [];
  const slots = new Array(nDraftSlots(view, stage)).fill(null); // null: the row is not in the final tree
  tree.slots.forEach((slot, row) => {
    if (isRunByDraft(view, stage, row)) slots[slot] = row;
  });
  const every = Math.ceil((view.n + nSlots > 999 ? 38 : 30) / plan.cell); // room for the digits
  const numbers = [];
  for (let slot = 0; slot < Math.max(rows.length, slots.length); slot += every) {
    const number = String(view.n + slot);
    const x = Math.min(start + (slot + 0.5) * plan.cell, width - 4.5 * number.length);
    numbers.push(svg("text", { x, y: 12, class: "slot" }, number));
  }
  const ofTree = formatCount(rows.length, "row");
  const label = `Caches: ${view.n} committed tokens in the target model's, then ${ofTree} of the tree`;
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
  parts.push(...rows.map((row) => slotOf(plan, row, row, top, hasReached(stage, "verify"))));
  if (!hasReached(stage, "commit")) return parts;
  const drop = nDroppedByWindow(view);
  const note = drop > 0 ? `${cached[0]} after dropping ${drop}` : `${cached[0]} after commit`;
  parts.push(after(note, top), ...moves(plan, path, top));
  if (drop > 0) { // the oldest tokens that are not sinks
    const scale = (STRIP.committed - 3) / view.n;
    const x = STRIP.label + settings.window.sinks * scale;
    parts.push(svg("rect", { x, y: top, width: drop * scale, height: STRIP.height, class: "dropped" }));
  }
  return parts;
}

function draftStrip(plan, slots, top) {
  const { view, stage } = plan;
  const { draft_rows: rows, path, cached } = view.iteration;
  const note = rows[0] > 1 ? `${view.nDraft} + ${rows[0] - 1} prefilled` : `${view.nDraft} committed`;
  const parts = [...committed("draft", top, note)];
  parts.push(...slots.map((row, slot) => slotOf(plan, row, slot, top, true)));
  if (!hasReached(stage, "commit")) return parts;
  const accepted = path.map((row) => view.tree.slots[row]).filter((slot) => slot >= 0);
  return [...parts, after(`${cached[1]} after commit`, top), ...moves(plan, accepted, top)];
}

function idleDraft(view, top) {
  const label = (x, note) => svg("text", { x, y: top + 16, class: "name" }, note);
  if (!settings.draft) {
    return [label(0, "draft"), label(STRIP.label, "none: this method uses no draft model")];
  }
  const note = label(STRIP.label + STRIP.committed + 6, "not run in this iteration");
  return [...committed("draft", top, `${view.nDraft} committed`), note];
}

// The name of a strip, and the box of its committed tokens.
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

// One slot after the committed ones.
function slotOf({ view, cell, start }, row, slot, top, isWritten) {
  const x = start + slot * cell;
  const flags = { cell: true, written: isWritten, root: row === 0, gone: row === null };
  flags.retrieved = view.isRetrieved.has(row);
  const gap = cell > 5 ? 2 : cell / 5;
  const box = { x, y: top, width: cell - gap, height: STRIP.height, rx: cell > 12 ? 3 : 0 };
  const group = svg("g", { class: classes(flags), "data-row": row }, svg("rect", box));
  const maxLength = Math.floor((cell - 5) / widthOf("0", 12));
  const text = row === null ? "" : visible(textOf(view.tree.tokens[row]));
  if (isWritten && text && (maxLength >= 4 || text.length <= maxLength)) {
    group.append(svg("text", { x: x + (cell - gap) / 2, y: top + 16 }, shorten(text, maxLength)));
  }
  return group;
}

// An arrow from each slot that the commit moves to its new place, and a line below the committed slots.
// from: the slots of the accepted rows; entry i goes to slot n + i.
function moves({ start, cell }, from, top) {
  const y = top + STRIP.height + 2;
  const end = start + Math.max(from.length * cell - 2, 1);
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
