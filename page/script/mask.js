// The mask: which rows each row of the tree may see. Row i marks its path from the root; rows of
// one depth stand at one position, shown by the bracket beside them.

const mask = { cell: 0, x: 0, y: 0, n: 0, ancestors: [] };

function buildMask() {
  const place = byId("mask");
  place.addEventListener("pointermove", (event) => {
    const row = rowAt(place, event);
    if (row !== null) light({ row });
  });
  place.addEventListener("pointerleave", () => light(null));
  place.addEventListener("click", (event) => {
    const row = rowAt(place, event);
    if (row !== null) pin(row);
  });
  return function drawMask(view) {
    const isEmpty = !view.tree;
    byId("mask-note").textContent = isEmpty ? "" : noteOfMask(view);
    if (isEmpty) mask.n = 0;
    const without = "The prompt’s pass has no tree, and no mask.";
    place.replaceChildren(isEmpty ? nothing(without) : maskOf(view, place));
  };
}

function nothing(text) {
  return html("p", { class: "nothing" }, text);
}

function noteOfMask(view) {
  const n = view.tree.tokens.length;
  return `${n} × ${n}, positions`;
}

function rowAt(place, event) {
  const drawn = place.querySelector("svg");
  if (!mask.n || !drawn) return null;
  const row = Math.floor((event.clientY - drawn.getBoundingClientRect().top - mask.y) / mask.cell);
  return row >= 0 && row < mask.n ? row : null;
}

function maskOf(view, place) {
  const n = view.tree.tokens.length;
  const room = { width: Math.max(roomOf(place).width, 200), height: Math.max(roomOf(place).height, 120) };
  const head = 14;
  const free = room.height - head - 2;
  let cell = Math.min(26, free / n);
  const isLabelled = cell >= 10.5;
  const labels = isLabelled ? labelRoom(view) : 4;
  const all = 30; // the column of the text
  const brackets = 44;
  cell = Math.min(cell, (room.width - labels - all - brackets) / n);
  Object.assign(mask, { cell, n, x: labels + all, y: head, ancestors: ancestorsOf(view) });
  const parts = [
    svg("text", { x: labels + all / 2 - 2, y: 10, class: "head" }, "text"),
    svg("rect", { x: labels, y: head, width: all - 4, height: n * cell, class: "all" }),
    svg("rect", { x: mask.x, y: head, width: n * cell, height: n * cell, class: "field" }),
    svg("rect", { class: "band across" }),
    svg("rect", { class: "band down" }),
    svg("path", { class: "sees", d: marks() }),
    ...positions(view),
  ];
  if (isLabelled) parts.push(...maskLabels(view, labels));
  const size = [mask.x + n * cell + brackets, head + n * cell + 2];
  const label = `Mask of ${counted(n, "row")}: each sees the text, and its own path from the root`;
  return drawing(...size, { role: "img", "aria-label": label }, ...parts);
}

function labelRoom(view) {
  return 8 + Math.max(...view.tree.tokens.map((id) => widthOf(maskLabel(id), NOTE)));
}

function maskLabel(id) {
  return shortened(visible(word(id)), 10);
}

function ancestorsOf(view) {
  const found = [];
  view.tree.parents.forEach((parent, row) => {
    found.push(parent < 0 ? [0] : [...found[parent], row]);
  });
  return found;
}

// All marks as one path, as there may be thousands.
function marks() {
  const { cell, x, y } = mask;
  const gap = cell > 6 ? 1 : cell > 3 ? 0.5 : 0;
  const side = (cell - gap).toFixed(2);
  let path = "";
  mask.ancestors.forEach((seen, row) => {
    for (const column of seen) {
      path += `M${(x + column * cell).toFixed(2)} ${(y + row * cell).toFixed(2)}h${side}v${side}h-${side}z`;
    }
  });
  return path;
}

// A bracket over the rows of each depth, with their position.
function positions(view) {
  const { cell, x, y, n } = mask;
  const parts = [];
  const right = x + n * cell + 4;
  for (let depth = 0; depth <= view.depth; depth++) {
    const first = view.depths.indexOf(depth);
    const count = view.depths.lastIndexOf(depth) - first + 1;
    const top = y + first * cell + 1;
    const bottom = y + (first + count) * cell - 1;
    if (bottom - top > 4) parts.push(svg("path", { class: "bracket", d: `M${right} ${top}h3V${bottom}h-3` }));
    if (count * cell >= 9) {
      const name = depth ? `n+${depth}` : "n";
      parts.push(svg("text", { x: right + 7, y: (top + bottom) / 2 + 3.5, class: "position" }, name));
    }
  }
  return parts;
}

function maskLabels(view, right) {
  return view.tree.tokens.map((id, row) => {
    const y = mask.y + (row + 0.5) * mask.cell + 3.5;
    const accepted = view.isAccepted.has(row);
    const attributes = { x: right - 5, y, class: classes({ row: true, accepted }), "data-row": row };
    return svg("text", attributes, maskLabel(id));
  });
}

// Light up a row and its column, or nothing.
function lightMask(row) {
  const across = document.querySelector("#mask .across");
  const down = document.querySelector("#mask .down");
  if (!across) return;
  const isShown = row !== null && row < mask.n;
  const { cell, x, y, n } = mask;
  const side = isShown ? cell : 0;
  fill(across, { x: x - 30, y: y + (row ?? 0) * cell, width: n * cell + 30, height: side }, []);
  fill(down, { x: x + (row ?? 0) * cell, y, width: side, height: n * cell }, []);
}
