// The steps of an iteration: the bar that names them, and the way from one to the next.

// The bar of the six steps; the draft's has as many stops as there are passes.
function buildSteps() {
  const buttons = ["whole", ...STEPS].map((kind, i) => {
    const number = i ? html("span", { class: "number" }, String(i)) : "";
    const title = kind[0].toUpperCase() + kind.slice(1);
    const stops = html("span", { class: "stops" });
    const button = html("button", { type: "button" }, number, title, stops);
    button.addEventListener("click", () => goTo(kind));
    byId("steps").append(button);
    return { kind, button, stops };
  });
  return function drawSteps(view, stage) {
    for (const { kind, button, stops } of buttons) {
      const own = view.stages.filter((found) => found.kind === kind);
      button.disabled = !own.length;
      if (stage.kind === kind) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
      const isCounted = own.length > 1;
      const place = stage.kind === kind ? `${own.indexOf(stage) + 1}/` : "";
      stops.textContent = isCounted ? `${place}${own.length}` : "";
    }
  };
}

// The first stop of a step; if that is where we are, the next.
function goTo(kind) {
  const { stages } = state.view;
  const first = stages.findIndex((stage) => stage.kind === kind);
  const isThere = stages[state.step].kind === kind;
  const hasMore = stages[state.step + 1]?.kind === kind;
  go(state.iteration, isThere && hasMore ? state.step + 1 : first);
}

// To the step before or after, over the ends of an iteration.
function goStep(by) {
  const step = state.step + by;
  if (step >= state.view.stages.length) {
    if (state.iteration < lastIteration) go(state.iteration + 1, 1);
  } else if (step < 0) {
    if (state.iteration > 0) go(state.iteration - 1, Infinity);
  } else {
    go(state.iteration, step);
  }
}
