// What is shown: an iteration, one of its steps (0: the whole of it), and a row that is pointed at.
// The hash keeps the first two, as in #12 or #12.3, so that a report can point to them.

const state = { iteration: 0, step: 0, pinned: null, view: null };
const draws = []; // of each panel: view and stage in, a picture out
let hashing = null;

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
  const stage = state.view.stages[state.step];
  document.body.dataset.stage = stage.kind;
  for (const draw of draws) draw(state.view, stage);
  byId("caption").replaceChildren(html("b", {}, headingOf(stage)), ` ${captionOf(state.view, stage)}`);
  light(null);
}

function headingOf(stage) {
  const step = STEPS.indexOf(stage.kind);
  if (step < 0) return `Iteration ${state.iteration}.`;
  return `${step + 1} ${stage.kind[0].toUpperCase()}${stage.kind.slice(1)}.`;
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

function start() {
  buildAbout();
  draws.push(buildSteps(), buildText(), buildTree(), buildMask());
  draws.push(buildCaches(), buildThresholds(), buildTime());
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
  for (const panel of ["tree", "mask"]) resized.observe(byId(panel));
  window.dynatree = {
    data,
    go,
    get iteration() {
      return state.iteration;
    },
    get step() {
      return state.step;
    },
  };
  document.documentElement.dataset.ready = "1";
}

start();
