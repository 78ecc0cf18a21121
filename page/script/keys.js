// The keyboard, and playing: on from iteration to iteration, or from step to step.

const EVERY_MS = { iteration: 800, step: 1600 }; // while it plays
let playing = null;

function play(isPlaying) {
  clearInterval(playing);
  const every = state.step ? EVERY_MS.step : EVERY_MS.iteration;
  playing = isPlaying ? setInterval(playOn, every) : null;
  byId("play").setAttribute("aria-pressed", String(isPlaying));
  byId("play").setAttribute("aria-label", isPlaying ? "Pause" : "Play");
}

function playOn() {
  const [iteration, step] = [state.iteration, state.step];
  if (step) goStep(1);
  else go(iteration + 1);
  if (iteration === state.iteration && step === state.step) play(false); // the end
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
  byId("settings").open = false;
  if (state.pinned !== null) pin(state.pinned);
  light(null);
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const control = event.target.closest?.("button, summary");
    if (control && event.key === " ") return; // it presses that
    const node = event.target.closest?.("#tree .node");
    if (node && event.key === "Enter") pin(Number(node.dataset.row));
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
