// The time of every iteration as a strip, which is also the scrubber; below it the tokens. The bars
// are drawn once for a size and a colour scheme: to scrub only moves the cursor over them.

const TIMES = ["--draft", "--target", "--other"]; // draft, verify, everything else
const ORIGINS = { drafted: "--draft", retrieved: "--memory", bonus: "--target" };
const WIDEST = 32; // pixels of an iteration, where there are few
const TOKENS_SHARE = 0.34; // of the height

function buildTime() {
  const scrub = byId("scrub");
  scrub.setAttribute("aria-valuemax", lastIteration);
  scrub.style.maxWidth = `${WIDEST * iterations.length}px`;
  const totals = iterations.map((iteration) => sum(iteration.ms));
  const origins = iterations.map((iteration) => countOrigins(iteration));
  const paint = () => paintBars(byId("bars"), totals, origins);
  new ResizeObserver(paint).observe(scrub);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  scrub.addEventListener("pointerdown", (event) => {
    scrub.setPointerCapture(event.pointerId);
    goAt(scrub, event);
  });
  scrub.addEventListener("pointermove", (event) => {
    if (scrub.hasPointerCapture(event.pointerId)) goAt(scrub, event);
  });
  const drawDepths = buildDepths();
  return function drawTime(view, stage) {
    const width = 100 / iterations.length;
    byId("cursor").style.left = `${width * view.index}%`;
    byId("cursor").style.width = `${width}%`;
    scrub.setAttribute("aria-valuenow", view.index);
    scrub.setAttribute("aria-valuetext", `Iteration ${view.index} of ${lastIteration}`);
    byId("place").replaceChildren(html("b", {}, String(view.index)), ` of ${lastIteration}`);
    drawDepths(view);
  };
}

let wanted = null; // an iteration to go to with the next picture, so that a fast drag skips some

function goAt(scrub, event) {
  const { left, width } = scrub.getBoundingClientRect();
  const index = Math.floor((iterations.length * (event.clientX - left)) / width);
  if (wanted === null) {
    requestAnimationFrame(() => {
      const index = wanted;
      wanted = null;
      if (index !== state.iteration || state.step) go(index);
    });
  }
  wanted = clamp(index, 0, lastIteration);
}

function countOrigins(iteration) {
  const counts = [0, 0, 0];
  const names = Object.keys(ORIGINS);
  for (const origin of originsOf(iteration)) counts[names.indexOf(origin)]++;
  return counts;
}

// The time that most iterations stay under: a first slow one does not flatten all others.
function usual(totals) {
  const sorted = totals.slice().sort((a, b) => a - b);
  return 1.2 * sorted[Math.floor(0.95 * (sorted.length - 1))] || 1;
}

function paintBars(canvas, totals, origins) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const most = usual(totals);
  const tokens = origins.map(sum);
  const mostTokens = tokens.reduce((a, b) => Math.max(a, b), 1);
  byId("scale").textContent = `0–${milliseconds(most)}`;
  byId("most").textContent = `0–${mostTokens}`;
  const lower = Math.round(TOKENS_SHARE * height);
  const upper = height - lower - 5;
  const times = iterations.map((iteration) => iteration.ms);
  stack(context, { width, top: 0, height: upper, most, colors: TIMES }, times);
  const colors = Object.values(ORIGINS);
  stack(context, { width, top: upper + 5, height: lower, most: mostTokens, colors }, origins);
}

// Stacked bars, one for each iteration or, where they are narrower than a pixel, for several.
function stack(context, { width, top, height, most, colors }, rows) {
  const paints = colors.map(styled);
  const nBars = Math.min(rows.length, Math.floor(width));
  const bar = width / nBars;
  const gap = bar >= 5 ? 1 : 0;
  for (let i = 0; i < nBars; i++) {
    const first = Math.floor((i * rows.length) / nBars);
    const end = Math.max(first + 1, Math.floor(((i + 1) * rows.length) / nBars));
    let y = top + height;
    let total = 0;
    for (let part = 0; part < paints.length; part++) {
      let value = 0;
      for (let row = first; row < end; row++) value += rows[row][part];
      const size = Math.min((height * value) / (end - first) / most, y - top);
      context.fillStyle = paints[part];
      context.fillRect(i * bar, y - size, bar - gap, size);
      y -= size;
      total += value / (end - first);
    }
    if (total > most) {
      context.fillStyle = styled("--ink"); // higher than is shown
      context.fillRect(i * bar, top, bar - gap, 2);
    }
  }
}

// By depth, the share of trees that deep whose path got there.
function buildDepths() {
  const { most, reached, accepted } = countDepths();
  const place = byId("depths");
  if (!most) {
    place.append(nothing("No tree has a depth."));
    return () => {};
  }
  const bars = [];
  for (let depth = 1; depth <= most; depth++) {
    const bar = html("i", {});
    const share = html("span", { class: "share" });
    const well = html("div", { class: "well" }, bar);
    place.append(html("div", { class: "depth" }, share, well, html("span", {}, String(depth))));
    bars.push({ bar, share });
  }
  place.classList.toggle("many", most > 9);
  return function drawDepths(view) {
    bars.forEach(({ bar, share }, i) => {
      const there = reached[view.index + 1][i + 1];
      const taken = accepted[view.index + 1][i + 1];
      bar.style.height = there ? `${(100 * taken) / there}%` : "0";
      share.textContent = there ? String(Math.round((100 * taken) / there)) : "";
      bar.parentElement.title = `depth ${i + 1}: ${taken} of ${there} trees so deep`;
    });
  };
}
