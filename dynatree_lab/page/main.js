// The state of the page: an iteration, one of its stages (0 is the whole iteration) and a pinned row. It
// changes by buttons, keys, pointer and hash. The hash has the iteration and the stage, as in #12 or
// #12.3, so that a link can point to them.

const state = { iteration: 0, step: 0, pinned: null, view: null };
const drawPanels = []; // one function per panel, which draws a view and a stage
const highlighted = []; // the elements with a highlight
const PLAY_MS = { iteration: 800, step: 1600 }; // how long the player shows each
let playTimer = null;
let hashTimer = null;

function currentStage() {
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
  clearTimeout(hashTimer); // browsers limit how often it may change
  hashTimer = setTimeout(writeHash, 250);
}

function redraw() {
  const stage = currentStage();
  document.body.dataset.stage = stage.kind;
  for (const draw of drawPanels) draw(state.view, stage);
  const step = STEPS.indexOf(stage.kind);
  const heading = step < 0 ? `Iteration ${state.iteration}.` : `${step + 1} ${capitalise(stage.kind)}.`;
  byId("caption").replaceChildren(html("b", {}, heading), ` ${captionOf(state.view, stage)}`);
  highlight(null);
}

function capitalise(kind) {
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

// The bar of the six steps. Draft has one stop per pass.
function buildSteps() {
  const buttons = ["whole", ...STEPS].map((kind, i) => {
    const stops = html("span", { class: "stops" });
    const number = html("span", { class: "number" }, i ? String(i) : "");
    const button = html("button", { type: "button" }, number, capitalise(kind), stops);
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
      const hasMore = own.length > 1 && hasReached(stage, "mask"); // a pass does not show the later ones
      stops.textContent = hasMore ? `×${own.length}` : "";
    }
  };
}

// Go to the first stage of a step, or to its next stage if the step is shown already.
function goTo(kind) {
  const { stages } = state.view;
  const hasMore = currentStage().kind === kind && stages[state.step + 1]?.kind === kind;
  go(state.iteration, hasMore ? state.step + 1 : stages.findIndex((stage) => stage.kind === kind));
}

// Go to the previous or next stage, also across iterations.
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

// Start or stop playing: by iteration if a whole iteration is shown, otherwise by step.
function play(isPlaying) {
  clearInterval(playTimer);
  playTimer = isPlaying ? setInterval(playOn, state.step ? PLAY_MS.step : PLAY_MS.iteration) : null;
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
  " ": () => play(playTimer === null),
  Escape: close,
};

function close() {
  for (const panel of document.querySelectorAll("header details")) panel.open = false;
  if (state.pinned !== null) pin(state.pinned);
  highlight(null);
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const control = event.target.closest?.("button, summary, a");
    if (control && event.key === " ") return; // the key presses the control
    const node = event.target.closest?.("#tree .node");
    if (node && event.key === "Enter") pin(Number(node.dataset.row));
    if (!KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

// Highlight a row and its ancestors in every panel, and show its details. null: the pinned row, if any.
function highlight(target) {
  const shown = target ?? state.pinned;
  for (const element of highlighted.splice(0)) element.classList.remove("lit", "above");
  if (shown !== null) {
    const { parents } = state.view.tree;
    mark(shown, "lit");
    for (let row = parents[shown]; row >= 0; row = parents[row]) mark(row, "above");
  }
  drawDetails(state.view, currentStage(), shown);
}

function mark(row, kind) {
  for (const element of document.querySelectorAll(`main [data-row="${row}"]`)) {
    element.classList.add(kind);
    highlighted.push(element);
  }
}

function pin(row) {
  state.pinned = state.pinned === row ? null : row;
  for (const node of document.querySelectorAll("#tree .node")) {
    node.setAttribute("aria-selected", String(Number(node.dataset.row) === state.pinned));
  }
  highlight(row);
}

function pointedAt({ target }) {
  const found = target.closest?.("[data-row]");
  return found && Number(found.dataset.row);
}

function listenToPointing() {
  const main = document.querySelector("main");
  for (const kind of ["pointerover", "focusin"]) {
    main.addEventListener(kind, (event) => {
      if (pointedAt(event) !== null) highlight(pointedAt(event));
    });
  }
  for (const kind of ["pointerout", "focusout"]) {
    main.addEventListener(kind, (event) => {
      if (pointedAt(event) !== null) highlight(null);
    });
  }
  main.addEventListener("click", (event) => {
    const row = pointedAt(event);
    if (row !== null) pin(row);
  });
}

function start() {
  buildAbout();
  drawPanels.push(buildSteps(), buildText(), buildTree(), buildMask(), buildCaches());
  drawPanels.push(buildThresholds(), buildTime(), buildDepths());
  byId("previous").addEventListener("click", () => go(state.iteration - 1));
  byId("next").addEventListener("click", () => go(state.iteration + 1));
  byId("play").addEventListener("click", () => play(playTimer === null));
  listenToPointing();
  listenToKeys();
  addEventListener("hashchange", readHash);
  if (!readHash()) go(firstWithAccepted());
  const resized = new ResizeObserver(() => {
    rooms.clear();
    redraw();
  });
  for (const panel of ["tree", "mask", "caches"]) resized.observe(byId(panel), { box: "border-box" });
  window.dynatree = { data, state, go };
  document.documentElement.dataset.ready = "1";
}

start();
