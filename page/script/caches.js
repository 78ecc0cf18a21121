// The caches as two strips of slots, one above the other so that slot n, the root's, is at the same
// place: what is committed, the root, the scratch rows; and what the commit moves.

const STRIP = { height: 22, label: 50, committed: 132, arcs: 24, top: 16 };

function buildCaches() {
  const place = byId("caches");
  return function drawCaches(view, stage) {
    byId("caches-note").textContent = view.tree ? `n = ${view.n}` : "";
    place.replaceChildren(view.tree ? cachesOf(view, stage, place) : promptCaches(view));
  };
}

function promptCaches({ iteration }) {
  const [target, draft] = iteration.cached;
  const drafts = draft ? `, ${draft} in the draft’s` : "";
  return nothing(`After the prompt: ${counted(target, "token")} in the target’s cache${drafts}.`);
}

function cachesOf(view, stage, place) {
  const { iteration } = view;
  const drafted = sum(iteration.draft_rows.slice(1)) + 1; // slots from the root on
  const isDrafting = iteration.draft_rows.length > 0;
  const n = Math.max(view.tree.tokens.length, isDrafting ? drafted : 1);
  const width = Math.max(roomOf(place).width, 260);
  const start = STRIP.label + STRIP.committed;
  const cell = clamp((width - start - 4) / n, 2, 52);
  const plan = { view, stage, cell, start, width };
  const below = STRIP.top + STRIP.height + STRIP.arcs + 4;
  const rows = counted(view.tree.tokens.length, "row");
  const label = `Caches: ${view.n} committed in the target's, then ${rows} of the tree`;
  return drawing(width, below + STRIP.height + STRIP.arcs, { role: "img", "aria-label": label },
    arrowhead(),
    ...slotNumbers(plan, n),
    ...targetStrip(plan, STRIP.top),
    ...(isDrafting ? draftStrip(plan, below, drafted) : idleDraft(plan, below)),
  );
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function arrowhead() {
  const shape = svg("path", { d: "M0 0 6 3 0 6z" });
  const size = { markerWidth: 6, markerHeight: 6, refX: 5, refY: 3, orient: "auto" };
  return svg("defs", {}, svg("marker", { id: "arrowhead", ...size, markerUnits: "userSpaceOnUse" }, shape));
}

function slotNumbers({ cell, start, view }, n) {
  const every = Math.ceil(30 / cell);
  const found = [];
  for (let slot = 0; slot < n; slot += every) {
    found.push(svg("text", { x: start + (slot + 0.5) * cell, y: 11, class: "slot" }, String(view.n + slot)));
  }
  return found;
}

function stripName(text, top) {
  return svg("text", { x: 0, y: top + STRIP.height / 2 + 4, class: "name" }, text);
}

// The committed tokens.
function committed(top, n, after, note) {
  const x = STRIP.label;
  const width = STRIP.committed - 3;
  const parts = [
    svg("rect", { x, y: top, width, height: STRIP.height, rx: 3, class: "committed" }),
    svg("text", { x: x + width / 2, y: top + 15, class: "count" }, note ?? `${n} committed`),
  ];
  const below = { x: x + width / 2, y: top + STRIP.height + 14, class: "after" };
  if (after) parts.push(svg("text", below, after));
  return parts;
}

// What a window drops: the oldest tokens after the sinks.
function droppedPart(n, drop, top) {
  const scale = (STRIP.committed - 3) / n;
  const x = STRIP.label + data.settings.window.sinks * scale;
  return svg("rect", { x, y: top, width: drop * scale, height: STRIP.height, class: "dropped" });
}

function targetStrip(plan, top) {
  const { view, stage, cell, start } = plan;
  const { iteration } = view;
  const { path } = iteration;
  const isCommitted = isAt(stage, "commit");
  const drop = droppedBy(view);
  const kept = drop > 0 ? `window drops ${drop}, then ${iteration.cached[0]}` : `then ${iteration.cached[0]}`;
  const parts = [stripName("target", top), ...committed(top, view.n, isCommitted ? kept : "")];
  view.tree.tokens.forEach((id, row) => {
    const isWritten = isAt(stage, "verify");
    parts.push(slotOf(plan, row, row, top, isWritten));
  });
  if (isCommitted && drop > 0) parts.push(droppedPart(view.n, drop, top));
  if (isCommitted) parts.push(...moves(path, path.map((_, i) => i), start, cell, top));
  return parts;
}

function draftStrip(plan, top, nSlots) {
  const { view, stage, cell, start } = plan;
  const { iteration, tree: found } = view;
  const lacking = iteration.draft_rows[0] - 1;
  const isCommitted = isAt(stage, "commit");
  const note = lacking ? `${view.nDraft} + ${lacking} read now` : `${view.nDraft} committed`;
  const after = isCommitted ? `then ${iteration.cached[1]}` : "";
  const parts = [stripName("draft", top), ...committed(top, view.nDraft, after, note)];
  const rows = new Array(nSlots).fill(null);
  found.slots.forEach((slot, row) => {
    if (slot >= 0) rows[slot] = row;
  });
  rows.forEach((row, slot) => {
    const isWritten = row === null ? isAt(stage, "mask") : isRun(view, stage, row);
    parts.push(slotOf(plan, row, slot, top, isWritten));
  });
  if (isCommitted) {
    const slots = iteration.path.map((row) => found.slots[row]).filter((slot) => slot >= 0);
    parts.push(...moves(slots, slots.map((_, i) => i), start, cell, top));
  }
  return parts;
}

function idleDraft({ view }, top) {
  const isUsed = data.settings.draft !== null && data.settings.draft !== undefined;
  const write = (x, note) => svg("text", { x, y: top + 15, class: "idle" }, note);
  const title = stripName("draft", top);
  if (!isUsed) return [title, write(STRIP.label, "none: this method needs no draft")];
  const note = write(STRIP.label + STRIP.committed + 6, "not asked in this iteration");
  return [title, ...committed(top, view.nDraft, "", `${view.nDraft} committed`), note];
}

// One slot above the committed; row null: it was run, and better nodes took its place in the tree.
function slotOf({ view, cell, start }, row, slot, top, isWritten) {
  const x = start + slot * cell;
  const flags = { cell: true, written: isWritten, root: row === 0, gone: row === null };
  if (row !== null) {
    flags.accepted = view.isAccepted.has(row);
    flags.retrieved = view.isRetrieved.has(row);
  }
  const gap = cell > 5 ? 2 : 0.4;
  const group = svg("g", { class: classes(flags), "data-row": row },
    svg("rect", { x, y: top, width: cell - gap, height: STRIP.height, rx: cell > 12 ? 3 : 0 }));
  const most = Math.floor((cell - 6) / 6.1);
  const text = row === null ? "" : visible(word(view.tree.tokens[row]));
  if (isWritten && text && (most >= 4 || text.length <= most)) {
    const label = shortened(text, most);
    group.append(svg("text", { x: x + (cell - gap) / 2, y: top + 15 }, label));
  }
  return group;
}

// Arrows from slots to where the commit moves them; those that stay get a line below.
function moves(from, to, start, cell, top) {
  const y = top + STRIP.height + 2;
  const parts = [];
  const end = start + from.length * cell - 2;
  if (from.length) parts.push(svg("path", { class: "stays", d: `M${start} ${y + 1}H${end}` }));
  from.forEach((slot, i) => {
    if (slot === to[i]) return;
    const x0 = start + (slot + 0.5) * cell;
    const x1 = start + (to[i] + 0.5) * cell;
    const dip = y + 10 + Math.min(16, (x0 - x1) / 6);
    parts.push(svg("path", { class: "move", d: `M${x0} ${y}C${x0} ${dip} ${x1} ${dip} ${x1} ${y + 3}` }));
  });
  return parts;
}
