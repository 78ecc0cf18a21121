// The panels of the whole run: its text, the values that decide each tree, the time and tokens of each
// iteration, and the acceptance by depth. Each is drawn once; a step only moves marks.

// One element per iteration, with one element per token. Later iterations are hidden.
function buildText() {
  const place = byId("text");
  const prompt = html("span", { class: "prompt" }, data.prompt.text.join(""));
  const written = iterations.map(elementOf);
  place.append(prompt, ...written);
  place.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token && document.getSelection().isCollapsed) go(Number(token.dataset.iteration));
  });
  let last = -1;
  let fresh = prompt;
  return function drawText(view, stage) {
    const isWritten = !view.tree || hasReached(stage, "commit");
    const now = isWritten ? view.index : view.index - 1;
    for (let i = Math.min(last, now) + 1; i <= Math.max(last, now); i++) {
      written[i].classList.toggle("later", i > now);
    }
    last = now;
    fresh.classList.remove("new");
    fresh = isWritten ? written[now] : written[now].lastChild; // the root
    fresh.classList.add("new");
    const box = fresh.getBoundingClientRect();
    const { top, bottom, height } = place.getBoundingClientRect();
    const isVisible = box.top >= top && box.bottom <= bottom;
    if (!isVisible) place.scrollTop += box.bottom - top - 0.75 * height;
  };
}

function elementOf(iteration, index) {
  const origins = originsOf(iteration);
  const tokens = iteration.tokens.map((id, i) => {
    const flags = { token: true, [origins[i]]: true };
    return tokenSpan(iteration.text[i], flags, { "data-iteration": index });
  });
  return html("span", { class: "later" }, ...tokens);
}

const DEPTH_RATIO_BAND = [DEPTH_RATIO_BOUNDS.low, DEPTH_RATIO_BOUNDS.high];

// Values with a known range. band: a range to mark.
const CHARTS = [
  { names: ["D0"], low: 0, high: settings.D_max },
  { names: ["tau_h"], low: 0.4, high: 1 },
  { names: ["rho_deep"], low: 0.2, high: 0.9 },
  { names: ["depth_ratio"], title: "depth ratio", low: 0, high: 1, band: DEPTH_RATIO_BAND },
  { names: ["ngrams", "draft"], title: "net gain", low: 0, high: 0, band: [0, 0] },
];

function buildThresholds() {
  const names = new Set(iterations.flatMap((iteration) => Object.keys(iteration.state ?? {})));
  document.body.classList.toggle("constant", !names.size); // the mask gets the space
  const known = CHARTS.filter((chart) => names.has(chart.names[0]));
  for (const name of known.flatMap((chart) => chart.names)) names.delete(name);
  const charts = [...known, ...[...names].map((name) => ({ names: [name] }))].map(chartOf);
  byId("thresholds").append(...charts.map((chart) => chart.element));
  return function drawThresholds(view, stage) {
    for (const chart of charts) chart.show(view, stage);
  };
}

// The chart of one or more state values over the run. Values that are words have a level per word.
function chartOf({ names, title = names[0], low, high, band }) {
  const columns = names.map((name) => iterations.map((iteration) => iteration.state?.[name]));
  const present = columns.flat().filter((value) => value !== undefined);
  const choices = [...new Set(present.filter((value) => typeof value === "string"))].sort();
  const heightOf = (value) => (choices.length ? -choices.indexOf(value) : value);
  const heights = present.map(heightOf);
  const min = heights.reduce((a, b) => Math.min(a, b), low ?? Infinity);
  const max = heights.reduce((a, b) => Math.max(a, b), high ?? -Infinity);
  const y = (height) => 3 + (34 * (max - height)) / (max - min || 1);
  const parts = columns.map((values, i) => {
    const d = stepPath(values.map((value) => value === undefined ? null : y(heightOf(value))));
    return svg("path", { class: `line ${names[i]}`, d });
  });
  if (band) {
    const [from, to] = band.map(y);
    parts.unshift(svg("path", { class: "band", d: `M0 ${from}H100V${to}H0z` }));
  }
  const now = html("div", { class: "now" });
  const value = html("span", {});
  const ticks = choices.length ? choices : [rounded(max), rounded(min)];
  const field = { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img" };
  const isWide = names.length > 1 || choices.length;
  const element = html("figure", { class: classes({ wide: isWide }) },
    html("figcaption", { title: names.map(meaningOf).join("; ") }, html("b", {}, title), value),
    html("div", { class: "plot" },
      html("div", { class: "ticks" }, ...ticks.map((tick) => html("span", {}, tick))),
      html("div", { class: "field" },
        svg("svg", { ...field, "aria-label": `${title} over the run` }, ...parts), now)));
  const show = (view, stage) => {
    now.style.left = `${(100 * (view.index + 0.5)) / iterations.length}%`;
    value.replaceChildren(...names.map((name) => valueNow(view, stage, name, names.length > 1)));
  };
  return { element, show };
}

function rounded(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(2))) : value;
}

// The value that decided this tree; in the step adapt also the value for the next tree.
function valueNow(view, stage, name, isNamed) {
  const now = rounded(view.iteration.state?.[name] ?? "–");
  const next = rounded(iterations[view.index + 1]?.state?.[name] ?? now);
  const text = stage.kind === "adapt" && next !== now ? `${now} → ${next}` : now;
  return html("span", { class: `value ${name}` }, isNamed ? `${name} ${text}` : text);
}

// A path of steps: each height lasts for one iteration.
function stepPath(heights) {
  const width = 100 / heights.length;
  let path = "";
  heights.forEach((y, i) => {
    if (y === null) return;
    const isFirst = i === 0 || heights[i - 1] === null;
    path += isFirst ? `M${(i * width).toFixed(2)} ` : "V";
    path += `${y.toFixed(2)}H${((i + 1) * width).toFixed(2)}`;
  });
  return path;
}

const MAX_BAR_WIDTH = 32; // pixels per iteration, for runs with few iterations
const TIME = { kinds: ["draft", "verify", "other"], top: 0, height: 60 }; // in percent of the strip
const TOKENS = { kinds: ["drafted", "retrieved", "bonus"], top: 66, height: 34 };

// The strip with the time and tokens of every iteration, which is also the slider.
function buildTime() {
  const scrub = byId("scrub");
  scrub.setAttribute("aria-valuemax", lastIteration);
  scrub.style.maxWidth = `${MAX_BAR_WIDTH * iterations.length}px`;
  const times = iterations.map((iteration) => iteration.ms);
  const tokens = iterations.map((iteration) => {
    const origins = originsOf(iteration);
    return TOKENS.kinds.map((kind) => origins.filter((origin) => origin === kind).length);
  });
  const maxTime = typicalMaximum(times.map(sum));
  const maxTokens = tokens.map(sum).reduce((a, b) => Math.max(a, b), 1);
  byId("scale").textContent = `0–${formatMs(maxTime)}`;
  byId("most").textContent = `0–${maxTokens}`;
  const field = { viewBox: `0 0 ${iterations.length} 100`, preserveAspectRatio: "none" };
  const bars = [...stack(times, maxTime, TIME), ...stack(tokens, maxTokens, TOKENS)];
  scrub.prepend(svg("svg", { ...field, "aria-hidden": "true" }, ...bars));
  scrub.addEventListener("pointerdown", (event) => {
    scrub.setPointerCapture(event.pointerId);
    goAt(scrub, event);
  });
  scrub.addEventListener("pointermove", (event) => {
    if (scrub.hasPointerCapture(event.pointerId)) goAt(scrub, event);
  });
  return function drawTime(view) {
    byId("cursor").style.left = `${(100 * view.index) / iterations.length}%`;
    byId("cursor").style.width = `${100 / iterations.length}%`;
    scrub.setAttribute("aria-valuenow", view.index);
    scrub.setAttribute("aria-valuetext", `Iteration ${view.index} of ${lastIteration}`);
    byId("place").replaceChildren(html("b", {}, String(view.index)), ` of ${lastIteration}`);
  };
}

// A time that most iterations stay under, so that a slow first one does not make all others flat.
function typicalMaximum(totals) {
  const sorted = totals.slice().sort((a, b) => a - b);
  return 1.2 * sorted[Math.floor(0.95 * (sorted.length - 1))] || 1;
}

// Stacked bars, one per iteration: one path per part, and one with a cap for each bar that is cut off.
function stack(rows, max, { kinds, top, height }) {
  const width = rows.length > 200 ? 1 : 0.94;
  const paths = kinds.map(() => "");
  let caps = "";
  rows.forEach((values, i) => {
    let y = top + height;
    values.forEach((value, part) => {
      const up = clamp((height * value) / max, 0, y - top).toFixed(2);
      paths[part] += `M${i} ${y.toFixed(2)}v-${up}h${width}v${up}z`;
      y -= up;
    });
    if (sum(values) > max) caps += `M${i} ${top}h${width}v3h-${width}z`;
  });
  const parts = kinds.map((kind, part) => svg("path", { class: `bar-${kind}`, d: paths[part] }));
  return [...parts, svg("path", { class: "bar-cap", d: caps })];
}

let draggedTo = null; // the iteration to show with the next frame; a fast drag skips iterations

function goAt(scrub, event) {
  const { left, width } = scrub.getBoundingClientRect();
  if (draggedTo === null) {
    requestAnimationFrame(() => {
      if (draggedTo !== state.iteration || state.step) go(draggedTo);
      draggedTo = null;
    });
  }
  draggedTo = clamp(Math.floor((iterations.length * (event.clientX - left)) / width), 0, lastIteration);
}

// By depth: of the trees so far with this depth, the share whose accepted path reaches it.
function buildDepths() {
  const counts = [{ reached: [], accepted: [] }]; // before each iteration, and after the last one
  for (const { tree, path } of iterations) {
    const { reached, accepted } = counts[counts.length - 1];
    const next = { reached: reached.slice(), accepted: accepted.slice() };
    for (let depth = 1; depth <= (tree ? Math.max(...depthsOf(tree.parents)) : 0); depth++) {
      next.reached[depth] = (reached[depth] ?? 0) + 1;
      next.accepted[depth] = (accepted[depth] ?? 0) + (depth < path.length ? 1 : 0);
    }
    counts.push(next);
  }
  const maxDepth = counts[counts.length - 1].reached.length - 1;
  const bars = [];
  for (let depth = 1; depth <= maxDepth; depth++) {
    const bar = html("i", {});
    const share = html("span", { class: "share" });
    const well = html("div", { class: "well" }, bar);
    const column = html("div", { class: "depth" }, share, well, html("span", {}, String(depth)));
    byId("depths").append(column);
    bars.push({ bar, share, well });
  }
  if (!bars.length) byId("depths").append(emptyNote("No tree has a candidate."));
  byId("depths").classList.toggle("many", maxDepth > 9);
  return function drawDepths(view, stage) {
    const { reached, accepted } = counts[view.index + (hasReached(stage, "accept") ? 1 : 0)];
    bars.forEach(({ bar, share, well }, i) => {
      const [nTrees, nAccepted] = [reached[i + 1] ?? 0, accepted[i + 1] ?? 0];
      bar.style.height = nTrees ? `${(100 * nAccepted) / nTrees}%` : "0";
      share.textContent = nTrees ? String(Math.round((100 * nAccepted) / nTrees)) : "–";
      well.title = `Depth ${i + 1}: accepted in ${nAccepted} of ${nTrees} trees at least this deep`;
    });
  };
}
