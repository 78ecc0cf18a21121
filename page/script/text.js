// The text, growing: one element for each iteration, one in it for each token. All of it is there
// from the start and never changes: what comes later lies under two covers, and what is new under
// frames, one for each line. So a step costs the same however long the text is.

const MARGIN = 3; // pixels around the text, for the frames
const TURNS = /[\u202a-\u202e\u2066-\u2069]/; // the direction of all that follows

function buildText() {
  const place = byId("text");
  const steps = iterations.map(stepOf);
  const layers = {
    frames: html("div", { class: "frames" }),
    line: html("div", { class: "cover" }), // over the rest of the line
    rest: html("div", { class: "cover" }), // over all lines below
  };
  const flow = html("div", { class: "flow" }, promptText(), ...steps, ...Object.values(layers));
  place.append(flow);
  place.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token && document.getSelection().isCollapsed) go(Number(token.dataset.iteration));
  });
  return function drawText(view) {
    const boxes = boxesOf(steps[view.index], flow);
    if (boxes.length) showUpTo(place, layers, boxes);
  };
}

function promptText() {
  return html("span", { class: "prompt" }, data.prompt.text.join(""));
}

function stepOf(iteration, index) {
  const origins = originsOf(iteration);
  const tokens = iteration.tokens.map((id, i) => {
    const text = iteration.text[i];
    const flags = { token: true, [origins[i]]: true, silent: text === "", turning: TURNS.test(text) };
    return html("span", { class: classes(flags), "data-iteration": index }, text);
  });
  return html("span", { class: "step" }, ...tokens);
}

// The lines of an element, as boxes within the text.
function boxesOf(element, flow) {
  const frame = flow.getBoundingClientRect();
  const boxes = [];
  for (const { left, right, top, height } of element.getClientRects()) {
    const before = boxes[boxes.length - 1];
    if (before && Math.abs(before.top + frame.top - top) < 2) before.width = right - frame.left - before.left;
    else boxes.push({ left: left - frame.left, top: top - frame.top, width: right - left, height });
  }
  return boxes;
}

// Frame these lines, cover what is after them, and scroll to them if they are out of sight.
function showUpTo(place, { frames, line, rest }, boxes) {
  frames.replaceChildren(...boxes.map((box) => put(html("div", { class: "frame" }), box)));
  const last = boxes[boxes.length - 1];
  const bottom = last.top + last.height + MARGIN;
  put(line, { left: last.left + last.width, top: last.top - 1, height: last.height + 2 });
  put(rest, { left: -MARGIN, top: bottom });
  const isInSight = boxes[0].top >= place.scrollTop && bottom <= place.scrollTop + place.clientHeight;
  if (!isInSight) place.scrollTop = bottom - 0.75 * place.clientHeight;
}

function put(element, box) {
  for (const [side, pixels] of Object.entries(box)) element.style[side] = `${pixels}px`;
  return element;
}
