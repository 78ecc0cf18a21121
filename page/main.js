// What is shown: an iteration, one of its stages (0: the whole of it), and a row that is pointed at;
// and how one moves: buttons, keys, the pointer, and the hash, which keeps the first two, as in #12 or
// #12.3, so that a report can point to them.

const state = { iteration: 0, step: 0, pinned: null, view: null };
const draws = []; // of each panel: view and stage in, a picture out
const lit = []; // elements that are lit now
const EVERY_MS = { iteration: 800, step: 1600 }; // while it plays
let playing = null;
let hashing = null;

function stageNow() {
  return state.view.stages[state.step];
}

function go(iteration, step = 0) {
  const index = clamp(Math.round(Number(iteration)) || 0, 0, lastIteration);
  if (!state.view || index !== state.iteration) {
    state.view = viewOf(index);
    state.pinned = null;
  }
  state.iteration = index;
  state.step = clamp(Math.round(Number(step)) || 0, 0, state.view.stages.length - 1);
  redraw();
  clearTimeout(hashing); // browsers allow only so many changes in a while
  hashing = setTimeout(writeHash, 250);
}

function redraw() {
  const stage = stageNow();
  document.body.dataset.stage = stage.kind;
  for (const draw of draws) draw(state.view, stage);
  const step = STEPS.indexOf(stage.kind);
  const heading = step < 0 ? `Iteration ${state.iteration}.` : `${step + 1} ${titled(stage.kind)}.`;
  byId("caption").replaceChildren(html("b", {}, heading), ` ${captionOf(state.view, stage)}`);
  light(null);
}

function titled(kind) {
  return kind[0].toUpperCase() + kind.slice(1);
}

function writeHash() {
  const hash = state.step ? `#${state.iteration}.${state.step}` : `#${state.iteration}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function readHash() {
  const found = /^#(\d+)(?:\.(\d+))?$/.exec(location.hash);
  if (found) go(Number(found[1]), Number(found[2] ?? 0));
  return Boolean(found);
}

// The bar of the six steps; the draft's has as many stops as there are passes.
function buildSteps() {
  const buttons = ["whole", ...STEPS].map((kind, i) => {
    const stops = html("span", { class: "stops" });
    const number = html("span", { class: "number" }, i ? String(i) : "");
    const button = html("button", { type: "button" }, number, titled(kind), stops);
    button.addEventListener("click", () => goTo(kind));
    byId("steps").append(button);
    return { kind, button, stops };
  });
  return function drawSteps(view, stage) {
    for (const { kind, button, stops } of buttons) {
      const own = view.stages.filter((found) => found.kind === kind);
      const isHere = stage.kind === kind;
      button.disabled = !own.length;
      if (isHere) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
      const hasMore = own.length > 1 && isAt(stage, "mask"); // a pass does not tell of others
      stops.textContent = hasMore ? `×${own.length}` : "";
    }
  };
}

// The first stage of a step; if that is where we are, the next.
function goTo(kind) {
  const { stages } = state.view;
  const hasMore = stageNow().kind === kind && stages[state.step + 1]?.kind === kind;
  go(state.iteration, hasMore ? state.step + 1 : stages.findIndex((stage) => stage.kind === kind));
}

// To the stage before or after, over the ends of an iteration.
function goStep(by) {
  const step = state.step + by;
  if (step < 0) {
    if (state.iteration > 0) go(state.iteration - 1, Infinity);
  } else if (step < state.view.stages.length) {
    go(state.iteration, step);
  } else if (state.iteration < lastIteration) {
    go(state.iteration + 1, 1);
  }
}

// On from iteration to iteration, or from step to step, until the end.
function play(isPlaying) {
  clearInterval(playing);
  playing = isPlaying ? setInterval(playOn, state.step ? EVERY_MS.step : EVERY_MS.iteration) : null;
  byId("play").setAttribute("aria-pressed", String(isPlaying));
  byId("play").setAttribute("aria-label", isPlaying ? "Pause" : "Play");
}

function playOn() {
  const { iteration, step } = state;
  if (step) goStep(1);
  else go(iteration + 1);
  if (iteration === state.iteration && step === state.step) play(false);
}

const KEYS = {
  ArrowLeft: () => go(state.iteration - 1),
  ArrowRight: () => go(state.iteration + 1),
  ArrowUp: () => goStep(-1),
  ArrowDown: () => goStep(1),
  "[": () => goStep(-1),
  "]": () => goStep(1),
  Home: () => go(0),
  End: () => go(lastIteration),
  " ": () => play(playing === null),
  Escape: close,
};

function close() {
  for (const panel of document.querySelectorAll("header details")) panel.open = false;
  if (state.pinned !== null) pin(state.pinned);
  light(null);
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const control = event.target.closest?.("button, summary, a");
    if (control && event.key === " ") return; // it presses that
    const node = event.target.closest?.("#tree .node");
    if (node && event.key === "Enter") pin(Number(node.dataset.row));
    if (!KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

// Light up the row that is pointed at, by pointer, finger or focus, in every panel; null: the one that
// a click keeps, or none.
function light(target) {
  const shown = target ?? state.pinned;
  for (const element of lit.splice(0)) element.classList.remove("lit", "above");
  if (shown !== null) {
    const { parents } = state.view.tree;
    mark(shown, "lit");
    for (let row = parents[shown]; row >= 0; row = parents[row]) mark(row, "above");
  }
  drawDetails(state.view, stageNow(), shown);
}

function mark(row, kind) {
  for (const element of document.querySelectorAll(`main [data-row="${row}"]`)) {
    element.classList.add(kind);
    lit.push(element);
  }
}

function pin(row) {
  state.pinned = state.pinned === row ? null : row;
  for (const node of document.querySelectorAll("#tree .node")) {
    node.setAttribute("aria-selected", String(Number(node.dataset.row) === state.pinned));
  }
  light(row);
}

function pointedAt({ target }) {
  const found = target.closest?.("[data-row]");
  return found && Number(found.dataset.row);
}

function listenToPointing() {
  const main = document.querySelector("main");
  for (const kind of ["pointerover", "focusin"]) {
    main.addEventListener(kind, (event) => {
      if (pointedAt(event) !== null) light(pointedAt(event));
    });
  }
  for (const kind of ["pointerout", "focusout"]) {
    main.addEventListener(kind, (event) => {
      if (pointedAt(event) !== null) light(null);
    });
  }
  main.addEventListener("click", (event) => {
    const row = pointedAt(event);
    if (row !== null) pin(row);
  });
}

function start() {
  buildAbout();
  draws.push(buildSteps(), buildText(), buildTree(), buildMask(), buildCaches());
  draws.push(buildThresholds(), buildTime(), buildDepths());
  byId("previous").addEventListener("click", () => go(state.iteration - 1));
  byId("next").addEventListener("click", () => go(state.iteration + 1));
  byId("play").addEventListener("click", () => play(playing === null));
  listenToPointing();
  listenToKeys();
  addEventListener("hashchange", readHash);
  if (!readHash()) go(firstOfInterest());
  const resized = new ResizeObserver(() => {
    rooms.clear();
    redraw();
  });
  for (const panel of ["tree", "mask", "caches"]) resized.observe(byId(panel), { box: "border-box" });
  window.dynatree = { data, state, go };
  document.documentElement.dataset.ready = "1";
}

start();
