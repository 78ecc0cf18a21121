// What is said of the whole run: the totals in the heading, and what repeats it.

function buildAbout() {
  const { settings, metrics } = data;
  const how = isSampled ? `sampled at ${plain(settings.sampling.temperature)}` : "greedy";
  byId("method").textContent = [settings.method, how].join(", ");
  document.title = `${settings.method}: ${counted(metrics.new_tokens, "token")}, DynaTree`;
  byId("totals").append(...totals().map(([value, unit, kind]) => {
    return html("div", { class: kind ?? "" }, html("dt", {}, unit), html("dd", {}, value));
  }));
  byId("about").append(...sections());
}

function totals() {
  const { metrics, compare } = data;
  const found = [
    [String(metrics.new_tokens), metrics.new_tokens === 1 ? "token" : "tokens"],
    [String(metrics.iterations), metrics.iterations === 1 ? "iteration" : "iterations"],
  ];
  if (metrics.iterations) {
    found.push([metrics.tokens_per_iter.toFixed(2), "tokens / iteration"]);
    found.push([metrics.throughput.toFixed(1), "tokens / s"]);
  }
  if (metrics.draft_nodes) found.push([`${Math.round(100 * metrics.acceptance)} %`, "accepted"]);
  if (compare) {
    found.push([`${compare.speedup.toFixed(2)}×`, `ar (${compare.ar_throughput.toFixed(1)} / s)`]);
    found.push(verdict(compare));
  }
  if (data.interrupted) found.push(["interrupted", "before its end", "warning"]);
  return found;
}

function verdict(compare) {
  if (compare.exact === null) return ["sampled", "ids not compared"];
  if (compare.logits_difference !== null) {
    return ["logits differ", `from token ${compare.logits_difference}`, "warning"];
  }
  if (compare.exact) return ["ids equal", "to ar’s", "good"];
  return [`ids differ`, `from token ${compare.first_difference}`, "warning"];
}

function sections() {
  const { settings, meanings, versions, graphs, metrics, compare } = data;
  const own = [];
  const run = [];
  for (const [key, value] of Object.entries(settings)) {
    if (key in meanings) own.push([key, value, meanings[key]]);
    else run.push([key, value]);
  }
  const found = [
    html("h3", {}, "Command"),
    html("code", { class: "command" }, commandLine()),
    html("h3", {}, `Settings of ${settings.method}`), table(own),
    ...baseSection(),
    html("h3", {}, "Run"), table(run),
    html("h3", {}, "Measured"), table(Object.entries(metrics)),
  ];
  if (compare) found.push(html("h3", {}, "Compared with ar"), table(Object.entries(compare)));
  found.push(html("h3", {}, "Machine"), table([...Object.entries(versions), ["graphs", graphs]]));
  const { name: format, version } = data.format;
  found.push(html("p", { class: "hint" }, `Data: ${format}, version ${version}, in this file.`));
  return found;
}

function baseSection() {
  if (!data.base) return [];
  const { settings, meanings } = data.base;
  const rows = Object.entries(settings).map(([key, value]) => [key, value, meanings[key]]);
  return [html("h3", {}, `Settings of its base, ${data.settings.base}`), table(rows)];
}

function commandLine() {
  const words = data.command ?? [];
  return words.map(shellWord).join(" ");
}

function shellWord(text) {
  const isPlain = /^[\w@%+=:,./-]+$/.test(text);
  return isPlain ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

function table(rows) {
  const lines = rows.map(([key, value, meaning]) => {
    const cells = [html("th", { scope: "row" }, key), html("td", {}, described(value))];
    if (meaning) cells.push(html("td", { class: "meaning" }, meaning));
    return html("tr", {}, ...cells);
  });
  return html("table", {}, html("tbody", {}, ...lines));
}

function described(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : plain(value);
}
