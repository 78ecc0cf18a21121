// The picture of all settings that the reader has visited: tokens per iteration over the cost of
// an iteration. A ray from the origin has one speed. The line joins the settings that no other one
// beats at their cost.

const FRAME = { left: 26, right: 12, top: 20, bottom: 32 };
const MAX_VISITED = 400;
const visited = new Map(); // words -> a setting and its totals
const chains = slidersOf("linear").K.values.map((K) =>
  replay(recording, { method: "linear", settings: { K }, temperature: 1 }).totals);
const RAYS = [1, 1.5, 2, 3, 4, 6]; // x ar

function visit({ setting, replay: { totals } }) {
  const words = wordsOf(setting);
  visited.delete(words);
  visited.set(words, { setting, totals });
  if (visited.size > MAX_VISITED) visited.delete(visited.keys().next().value);
}

// The visited settings with their costs at the current prices.
function pointsOf() {
  return [...visited].map(([words, { setting, totals }]) => {
    return { words, setting, ...pointOf(totals) };
  });
}

function pointOf(totals) {
  const { cost, speedup } = costOf(totals, state.prices);
  return { cost, speedup, tokens: totals.nTokens / totals.iterations };
}

// The points with more tokens than any other point of no higher cost, by cost.
function frontOf(points) {
  const sorted = [...points].sort((a, b) => a.cost - b.cost || b.tokens - a.tokens);
  let most = 0;
  return sorted.filter(({ tokens }) => tokens > most && (most = tokens));
}

function fastest() {
  return pointsOf().reduce((a, b) => (b.speedup > a.speedup ? b : a));
}

function drawEnvelope(place, sides) {
  const { width, height, scale } = roomOf(place);
  const points = pointsOf();
  const line = frontOf(chains.map(pointOf));
  const shown = sides.map(({ replay: { totals } }) => pointOf(totals));
  const max = (name, low) => 1.08 * Math.max(low, ...[...points, ...line].map((p) => p[name]));
  const [maxCost, maxTokens] = [max("cost", 2), max("tokens", 4)];
  const bottom = height - FRAME.bottom;
  const x = (cost) => FRAME.left + (cost / maxCost) * (width - FRAME.left - FRAME.right);
  const y = (tokens) => bottom - (tokens / maxTokens) * (bottom - FRAME.top);
  const at = ({ cost, tokens }) => [x(cost).toFixed(1), y(tokens).toFixed(1)];
  const path = (name, all) => svg("path", { class: name, d: `M${all.map(at).join("L")}` });
  const circle = (point, r, name, attributes, ...children) => {
    const [cx, cy] = at(point);
    return svg("circle", { cx, cy, r, class: name, ...attributes }, ...children);
  };
  const dots = points.map((point) => {
    const { words, setting: { method }, speedup } = point;
    const title = svg("title", {}, `${words}: ${speedup.toFixed(2)} × ar`);
    return circle(point, 3, `visited ${method}`, { "data-words": words }, title);
  });
  const label = `Tokens per iteration over cost, of ${formatCount(points.length, "setting")}; ` +
    `now ${shown[0].tokens.toFixed(2)} over ${shown[0].cost.toFixed(2)}`;
  place.replaceChildren(drawing(width, height, scale, { role: "img", "aria-label": label },
    ...axesOf(x, y, maxCost, maxTokens), ...raysOf(x, y, maxCost, maxTokens),
    path("chains", line), chainLabel(line.at(-1), x, y), path("front", frontOf(points)),
    ...dots, ...shown.map((point, i) => circle(point, 6, SIDES[i])).reverse()));
}

function chainLabel({ cost, tokens }, x, y) {
  return svg("text", { x: x(cost), y: y(tokens) + 16, class: "end" }, "chains");
}

function axesOf(x, y, maxCost, maxTokens) {
  const step = maxCost > 12 ? 4 : maxCost > 5 ? 2 : 1;
  const parts = [
    svg("path", { class: "axis", d: `M${x(0)} ${y(maxTokens)}V${y(0)}H${x(maxCost)}` }),
    svg("text", { x: 2, y: 12 }, "tokens / iteration"),
    svg("text", { x: x(maxCost), y: y(0) + 28, class: "end" }, "cost / iteration"),
  ];
  for (let cost = 0; cost <= maxCost; cost += step) {
    parts.push(svg("text", { x: x(cost), y: y(0) + 14, class: "middle" }, String(cost)));
  }
  for (let tokens = 1; tokens <= maxTokens; tokens++) {
    parts.push(svg("text", { x: x(0) - 6, y: y(tokens) + 4, class: "end" }, String(tokens)));
  }
  return parts;
}

// Lines of equal speed. A label needs room beside the last one.
function raysOf(x, y, maxCost, maxTokens) {
  const parts = [];
  let last = Infinity;
  for (const speed of RAYS) {
    const cost = Math.min(maxCost, maxTokens / speed);
    const end = { x: x(cost) - 4, y: y(cost * speed) + 12 };
    parts.push(svg("path", { class: "ray", d: `M${x(0)} ${y(0)}L${x(cost)} ${y(cost * speed)}` }));
    if (cost < maxCost && last - end.x < 52) continue;
    parts.push(svg("text", { ...end, class: "end ray-label" }, `${speed} × ar`));
    last = end.x;
  }
  return parts;
}

function buildEnvelope(place) {
  place.addEventListener("click", ({ clientX, clientY }) => {
    const dots = [...place.querySelectorAll(".visited")].map((dot) => {
      const { x, y, width, height } = dot.getBoundingClientRect();
      const distance = Math.hypot(x + width / 2 - clientX, y + height / 2 - clientY);
      return { distance, words: dot.dataset.words };
    });
    const nearest = dots.reduce((a, b) => (b.distance < a.distance ? b : a));
    if (nearest.distance < 14) choose(visited.get(nearest.words).setting);
  });
  byId("fastest").addEventListener("click", () => choose(fastest().setting));
}
