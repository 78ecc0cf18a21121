// What is pointed at, by pointer, finger or focus, lights up in every panel; a click keeps it.

const lit = []; // elements that are lit now

// Light up what is pointed at in every panel; null: what a click keeps, or nothing.
function light(target) {
  const shown = target ?? (state.pinned === null ? null : { row: state.pinned });
  for (const element of lit.splice(0)) element.classList.remove("lit", "above");
  const row = shown?.row ?? null;
  if (row !== null && state.view.tree) {
    mark(row, "lit");
    const { parents } = state.view.tree;
    for (let above = parents[row]; above >= 0; above = parents[above]) mark(above, "above");
  }
  lightMask(row);
  drawDetails(state.view, shown);
}

function mark(row, kind) {
  for (const place of ["tree", "mask", "caches"]) {
    for (const element of byId(place).querySelectorAll(`[data-row="${row}"]`)) {
      element.classList.add(kind);
      lit.push(element);
    }
  }
}

function pin(row) {
  state.pinned = state.pinned === row ? null : row;
  for (const node of document.querySelectorAll("#tree .node")) {
    node.setAttribute("aria-selected", String(Number(node.dataset.row) === state.pinned));
  }
  light(state.pinned === null ? { row } : null);
}

// The mask finds its rows by place (mask.js).
function pointedAt(element) {
  const found = element.closest?.("#tree [data-row], #tree [data-dropped], #caches [data-row]");
  if (!found) return null;
  if (found.dataset.row !== undefined) return { row: Number(found.dataset.row) };
  return { dropped: Number(found.dataset.dropped) };
}

function listenToPointing() {
  const main = document.querySelector("main");
  main.addEventListener("pointerover", (event) => {
    const target = pointedAt(event.target);
    if (target) light(target);
  });
  main.addEventListener("pointerout", (event) => {
    if (pointedAt(event.target)) light(null);
  });
  main.addEventListener("focusin", (event) => {
    const target = pointedAt(event.target);
    if (target) light(target);
  });
  main.addEventListener("focusout", () => light(null));
  main.addEventListener("click", (event) => {
    const target = pointedAt(event.target);
    if (target?.row !== undefined) pin(target.row);
  });
}
