// What the rule went by, over the run: a small chart of each number that changes, drawn once, with
// a line at the current iteration.

// Charts of the numbers that are known by name: how far they go, and where nothing is moved.
const CHARTS = [
  { title: "D0", names: ["D0"], low: 0, high: data.settings.D_max },
  { title: "tau_h", names: ["tau_h"], low: 0.4, high: 1 },
  { title: "rho_deep", names: ["rho_deep"], low: 0.2, high: 0.9 },
  { title: "reach", names: ["reach"], low: 0, high: 1, band: [0.6, 0.8] },
  { title: "worth in tokens", names: ["memory", "draft"], zero: true },
];
const MEANINGS = {
  reach: "mean of accepted depth / depth over the window: bolder above 0.8, more careful below 0.6",
  memory: "tokens that memory's tree is expected to bring beyond its time",
  draft: "tokens that the draft's tree is expected to bring beyond its time",
  chosen: "what made the tree",
};

function buildThresholds() {
  const place = byId("thresholds");
  const names = new Set();
  for (const iteration of iterations) Object.keys(iteration.state ?? {}).forEach((key) => names.add(key));
  if (!names.size) {
    const hasTree = iterations.some((iteration) => iteration.tree);
    const why = `${data.settings.method} keeps to its settings: no threshold moves during a run.`;
    place.append(nothing(hasTree ? why : "No tree was grown, so no threshold was used."));
    return () => {};
  }
  const charts = [];
  for (const chart of CHARTS) {
    const shown = chart.names.filter((key) => names.has(key));
    if (!shown.length) continue;
    charts.push(lineChart({ ...chart, names: shown }));
    shown.forEach((key) => names.delete(key));
  }
  for (const key of names) {
    charts.push(isNumeric(key) ? lineChart({ title: key, names: [key] }) : stripChart(key));
  }
  place.append(...charts.map((chart) => chart.element));
  return function drawThresholds(view) {
    for (const chart of charts) chart.show(view);
  };
}

function isNumeric(key) {
  return iterations.every((iteration) => typeof iteration.state?.[key] !== "string");
}

function valuesOf(key) {
  return iterations.map((iteration) => iteration.state?.[key]);
}

function rangeOf({ low, high, zero }, columns) {
  const values = columns.flat().filter((value) => value !== undefined);
  const least = values.reduce((a, b) => Math.min(a, b), zero ? 0 : Infinity);
  const most = values.reduce((a, b) => Math.max(a, b), zero ? 0 : -Infinity);
  const from = Math.min(low ?? least, least);
  const to = Math.max(high ?? most, most);
  return [from, to > from ? to : from + 1];
}

function lineChart(chart) {
  const columns = chart.names.map(valuesOf);
  const [low, high] = rangeOf(chart, columns);
  const y = (value) => 2 + (36 * (high - value)) / (high - low);
  const cursor = html("div", { class: "now" });
  const parts = [];
  if (chart.band) {
    const [from, to] = chart.band;
    parts.push(svg("rect", { class: "band", x: 0, y: y(to), width: 100, height: y(from) - y(to) }));
  }
  if (chart.zero) parts.push(svg("path", { class: "zero", d: `M0 ${y(0)}H100` }));
  columns.forEach((values, i) => {
    parts.push(svg("path", { class: `line ${chart.names[i]}`, d: stairs(values, y) }));
  });
  const value = html("span", { class: "values" });
  return {
    element: figure(chart, value, plot(chart.title, cursor, parts), [rounded(high), rounded(low)]),
    show(view) {
      cursor.style.left = across(view.index);
      value.replaceChildren(...chart.names.map((key) => valueNow(view, key, chart.names.length > 1)));
    },
  };
}

function across(index) {
  return `${(100 * (index + 0.5)) / iterations.length}%`;
}

function rounded(value) {
  return String(Number(value.toPrecision(2)));
}

function valueNow(view, key, isNamed) {
  const value = view.state?.[key];
  const text = value === undefined ? "–" : rounded(value);
  return html("span", { class: `value ${key}`, title: MEANINGS[key] }, isNamed ? `${key} ${text}` : text);
}

function plot(title, cursor, parts) {
  const attributes = { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img" };
  const drawn = svg("svg", { ...attributes, "aria-label": `${title} over the run` }, ...parts);
  return html("div", { class: "field" }, drawn, cursor);
}

function figure({ title, names }, value, drawn, ticks) {
  const meanings = names.map((key) => data.meanings[key] ?? MEANINGS[key] ?? key);
  const caption = html("figcaption", { title: meanings.join("; ") }, html("b", {}, title), " ", value);
  const marks = ticks.map((tick) => html("span", {}, tick));
  const scale = html("div", { class: "ticks", "aria-hidden": "true" }, ...marks);
  const isWide = names.length > 1 || ticks.length > 2 || ticks.some((tick) => tick.length > 6);
  const plotted = html("div", { class: "plot" }, scale, drawn);
  return html("figure", { class: classes({ wide: isWide }) }, caption, plotted);
}

// A value holds until the next one.
function stairs(values, y) {
  let path = "";
  let isDrawing = false;
  values.forEach((value, i) => {
    if (value === undefined) {
      isDrawing = false;
      return;
    }
    const x0 = ((100 * i) / values.length).toFixed(2);
    const x1 = ((100 * (i + 1)) / values.length).toFixed(2);
    path += `${isDrawing ? "V" : `M${x0} `}${y(value).toFixed(2)}H${x1}`;
    isDrawing = true;
  });
  return path;
}

// What was chosen, as a strip of runs of equal choices, one line for each.
function stripChart(key) {
  const values = valuesOf(key);
  const choices = [...new Set(values.filter((value) => value !== undefined))].sort();
  const parts = [];
  let start = 0;
  for (let i = 1; i <= values.length; i++) {
    if (i < values.length && values[i] === values[start]) continue;
    const line = choices.indexOf(values[start]);
    if (line >= 0) {
      const x = (100 * start) / values.length;
      const width = (100 * (i - start)) / values.length;
      const height = 36 / choices.length;
      const box = { x, y: 2 + line * height, width, height: height - 2 };
      parts.push(svg("rect", { class: `choice-${line}`, ...box }));
    }
    start = i;
  }
  const cursor = html("div", { class: "now" });
  const value = html("span", { class: "values" });
  const chart = { title: key, names: [key] };
  return {
    element: figure(chart, value, plot(key, cursor, parts), choices),
    show(view) {
      cursor.style.left = across(view.index);
      value.textContent = view.state?.[key] ?? "–";
    },
  };
}
