// What there is of the whole run: its text, the numbers that the rule went by, each iteration's time
// and tokens, and how deep trees were accepted. All is drawn once; a step only moves the marks.

const TURNS = /[\u202a-\u202e\u2066-\u2069]/; // the direction of all that follows

// One element for each iteration, one in it for each token; what comes later is hidden.
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
    const isWritten = !view.tree || isAt(stage, "commit");
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
    const isInSight = box.top >= top && box.bottom <= bottom;
    if (!isInSight) place.scrollTop += box.bottom - top - 0.75 * height;
  };
}

function elementOf(iteration, index) {
  const origins = originsOf(iteration);
  const tokens = iteration.tokens.map((id, i) => {
    const text = iteration.text[i];
    const flags = { token: true, [origins[i]]: true, silent: text === "", turning: TURNS.test(text) };
    return html("span", { class: classes(flags), "data-iteration": index }, text);
  });
  return html("span", { class: "later" }, ...tokens);
}

// Numbers that are known by name: how far they go, and where nothing is moved.
const CHARTS = [
  { names: ["D0"], low: 0, high: settings.D_max },
  { names: ["tau_h"], low: 0.4, high: 1 },
  { names: ["rho_deep"], low: 0.2, high: 0.9 },
  { names: ["reach"], low: 0, high: 1, band: [REACH.careful, REACH.bolder] },
  { names: ["memory", "draft"], title: "worth in tokens", low: 0, high: 0, band: [0, 0] },
];

function buildThresholds() {
  const names = new Set(iterations.flatMap((iteration) => Object.keys(iteration.state ?? {})));
  document.body.classList.toggle("settled", !names.size); // the mask has the room
  const known = CHARTS.filter((chart) => names.has(chart.names[0]));
  for (const name of known.flatMap((chart) => chart.names)) names.delete(name);
  const charts = [...known, ...[...names].map((name) => ({ names: [name] }))].map(chartOf);
  byId("thresholds").append(...charts.map((chart) => chart.element));
  return function drawThresholds(view, stage) {
    for (const chart of charts) chart.show(view, stage);
  };
}

// Values that are words have a line for each word.
function chartOf({ names, title = names[0], low, high, band }) {
  const columns = names.map((name) => iterations.map((iteration) => iteration.state?.[name]));
  const there = columns.flat().filter((value) => value !== undefined);
  const choices = [...new Set(there.filter((value) => typeof value === "string"))].sort();
  const heightOf = (value) => (choices.length ? -choices.indexOf(value) : value);
  const heights = there.map(heightOf);
  const least = heights.reduce((a, b) => Math.min(a, b), low ?? Infinity);
  const most = heights.reduce((a, b) => Math.max(a, b), high ?? -Infinity);
  const y = (height) => 3 + (34 * (most - height)) / (most - least || 1);
  const parts = columns.map((values, i) => {
    const d = stairs(values.map((value) => value === undefined ? null : y(heightOf(value))));
    return svg("path", { class: `line ${names[i]}`, d });
  });
  if (band) {
    const [from, to] = band.map(y);
    parts.unshift(svg("path", { class: "band", d: `M0 ${from}H100V${to}H0z` }));
  }
  const now = html("div", { class: "now" });
  const value = html("span", {});
  const ticks = choices.length ? choices : [rounded(most), rounded(least)];
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

// What decided this tree; once it is adapted, what will decide the next one.
function valueNow(view, stage, name, isNamed) {
  const now = rounded(view.iteration.state?.[name] ?? "–");
  const next = rounded(iterations[view.index + 1]?.state?.[name] ?? now);
  const text = stage.kind === "adapt" && next !== now ? `${now} → ${next}` : now;
  return html("span", { class: `value ${name}` }, isNamed ? `${name} ${text}` : text);
}

// A height holds until the next one.
function stairs(heights) {
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

const WIDEST = 32; // pixels of an iteration, where there are few
const TIME = { kinds: ["draft", "verify", "other"], top: 0, height: 60 }; // in percent of the strip
const TOKENS = { kinds: ["drafted", "retrieved", "bonus"], top: 66, height: 34 };

// Time and tokens of every iteration as a strip, which is also the scrubber.
function buildTime() {
  const scrub = byId("scrub");
  scrub.setAttribute("aria-valuemax", lastIteration);
  scrub.style.maxWidth = `${WIDEST * iterations.length}px`;
  const times = iterations.map((iteration) => iteration.ms);
  const tokens = iterations.map((iteration) => {
    const origins = originsOf(iteration);
    return TOKENS.kinds.map((kind) => origins.filter((origin) => origin === kind).length);
  });
  const usual = usualOf(times.map(sum));
  const most = tokens.map(sum).reduce((a, b) => Math.max(a, b), 1);
  byId("scale").textContent = `0–${milliseconds(usual)}`;
  byId("most").textContent = `0–${most}`;
  const field = { viewBox: `0 0 ${iterations.length} 100`, preserveAspectRatio: "none" };
  const bars = [...stack(times, usual, TIME), ...stack(tokens, most, TOKENS)];
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

// The time that most iterations stay under: a first slow one does not flatten all others.
function usualOf(totals) {
  const sorted = totals.slice().sort((a, b) => a - b);
  return 1.2 * sorted[Math.floor(0.95 * (sorted.length - 1))] || 1;
}

// A bar for each iteration, its parts one above the other: a path for each part, and one for a cap
// over what is higher than is shown.
function stack(rows, most, { kinds, top, height }) {
  const width = rows.length > 200 ? 1 : 0.94;
  const paths = kinds.map(() => "");
  let caps = "";
  rows.forEach((values, i) => {
    let y = top + height;
    values.forEach((value, part) => {
      const up = clamp((height * value) / most, 0, y - top).toFixed(2);
      paths[part] += `M${i} ${y.toFixed(2)}v-${up}h${width}v${up}z`;
      y -= up;
    });
    if (sum(values) > most) caps += `M${i} ${top}h${width}v3h-${width}z`;
  });
  const parts = kinds.map((kind, part) => svg("path", { class: `bar-${kind}`, d: paths[part] }));
  return [...parts, svg("path", { class: "bar-cap", d: caps })];
}

let wanted = null; // an iteration to go to with the next picture, so that a fast drag skips some

function goAt(scrub, event) {
  const { left, width } = scrub.getBoundingClientRect();
  if (wanted === null) {
    requestAnimationFrame(() => {
      if (wanted !== state.iteration || state.step) go(wanted);
      wanted = null;
    });
  }
  wanted = clamp(Math.floor((iterations.length * (event.clientX - left)) / width), 0, lastIteration);
}

// By depth, the share of the trees so far and that deep whose path got there.
function buildDepths() {
  const counts = [{ reached: [], accepted: [] }]; // before each iteration, and after the last
  for (const { tree, path } of iterations) {
    const { reached, accepted } = counts[counts.length - 1];
    const next = { reached: reached.slice(), accepted: accepted.slice() };
    for (let depth = 1; depth <= (tree ? Math.max(...depthsOf(tree.parents)) : 0); depth++) {
      next.reached[depth] = (reached[depth] ?? 0) + 1;
      next.accepted[depth] = (accepted[depth] ?? 0) + (depth < path.length ? 1 : 0);
    }
    counts.push(next);
  }
  const most = counts[counts.length - 1].reached.length - 1;
  const bars = [];
  for (let depth = 1; depth <= most; depth++) {
    const bar = html("i", {});
    const share = html("span", { class: "share" });
    const well = html("div", { class: "well" }, bar);
    const column = html("div", { class: "depth" }, share, well, html("span", {}, String(depth)));
    byId("depths").append(column);
    bars.push({ bar, share, well });
  }
  if (!bars.length) byId("depths").append(nothing("No tree has a depth."));
  byId("depths").classList.toggle("many", most > 9);
  return function drawDepths(view, stage) {
    const { reached, accepted } = counts[view.index + (isAt(stage, "accept") ? 1 : 0)];
    bars.forEach(({ bar, share, well }, i) => {
      const [there, taken] = [reached[i + 1] ?? 0, accepted[i + 1] ?? 0];
      bar.style.height = there ? `${(100 * taken) / there}%` : "0";
      share.textContent = there ? String(Math.round((100 * taken) / there)) : "–";
      well.title = `depth ${i + 1}: ${taken} of ${there} trees so deep`;
    });
  };
}
