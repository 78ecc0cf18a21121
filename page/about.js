// What is said of the whole run: the totals in the heading, what repeats it, and what every word and
// colour means.

const PAPER = "https://github.com/cny123222/DynaTree/blob/main/paper/dynatree.pdf";
const ACCEPTANCES = { // where they are described
  token: ["DySpec", "https://arxiv.org/abs/2410.11744", ", Algorithm 3"],
  block: ["Block Verification", "https://arxiv.org/abs/2403.10444", ""],
  traversal: ["Traversal Verification", "https://arxiv.org/abs/2505.12398", ""],
};

function buildAbout() {
  const { metrics, sampling } = { ...data, ...settings };
  const how = isSampled ? `sampled at ${plain(sampling.temperature)}` : "greedy";
  const window = settings.window ? `, window ${settings.window.size}` : "";
  byId("method").textContent = `${settings.method}, ${how}${window}`;
  document.title = `${settings.method}: ${counted(metrics.new_tokens, "token")}, DynaTree`;
  byId("totals").append(...totals().map(([value, unit, kind]) => {
    return html("div", { class: kind ?? "" }, html("dt", {}, unit), html("dd", {}, value));
  }));
  byId("about").append(...sections());
  byId("words").append(...glossary());
}

function totals() {
  const { metrics, compare } = data;
  const found = [
    [metrics.new_tokens, metrics.new_tokens === 1 ? "token" : "tokens"],
    [metrics.iterations, metrics.iterations === 1 ? "iteration" : "iterations"],
  ];
  if (metrics.iterations) {
    found.push([metrics.tokens_per_iter.toFixed(2), "tokens / iteration"]);
    found.push([metrics.throughput.toFixed(1), "tokens / s"]);
  }
  if (metrics.drafted_per_iter) {
    found.push([`${Math.round(100 * metrics.acceptance_rate)} %`, "accepted"]);
  }
  if (compare) {
    found.push([`${compare.speedup.toFixed(2)}×`, `ar (${compare.ar_throughput.toFixed(1)} / s)`]);
    found.push(verdict(compare));
  }
  if (data.interrupted) found.push(["interrupted", "before its end", "warning"]);
  return found;
}

function verdict({ exact, logits_difference: differs, first_difference: first }) {
  if (exact === null) return ["sampled", "ids not compared"];
  if (differs !== null) return ["logits differ", `from token ${differs}`, "warning"];
  return exact ? ["ids equal", "to ar’s", "good"] : ["ids differ", `from token ${first}`, "warning"];
}

function sections() {
  const { meanings, versions, graphs, metrics, compare, base, format } = data;
  const rows = Object.entries(settings).map(([key, value]) => [key, value, meanings[key]]);
  const ofBase = Object.entries(base?.settings ?? {}).map((row) => [...row, base.meanings[row[0]]]);
  const tables = [
    [`Settings of ${settings.method}`, rows.filter(([key]) => key in meanings)],
    [`Settings of its base, ${settings.base}`, ofBase],
    ["Run", [...rows.filter(([key]) => !(key in meanings)), ["finish_reason", data.finish_reason]]],
    ["Measured", Object.entries(metrics)],
    ["Compared with ar", Object.entries(compare ?? {})],
    ["Machine", [...Object.entries(versions), ["graphs", graphs]]],
  ];
  return [
    html("h3", {}, "Command"),
    html("code", { class: "command" }, data.command.map(shellWord).join(" ")),
    ...tables.filter(([, found]) => found.length).flatMap(([title, found]) => {
      return [html("h3", {}, title), table(found)];
    }),
    html("p", { class: "hint" }, `Data: ${format.name}, version ${format.version}, in this file.`),
  ];
}

function shellWord(text) {
  const isPlain = /^[\w@%+=:,./-]+$/.test(text);
  return isPlain ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

function table(rows) {
  return html("table", {}, html("tbody", {}, ...rows.map(([key, value, meaning]) => {
    const cells = [html("th", { scope: "row" }, key), html("td", {}, described(value))];
    if (meaning) cells.push(html("td", { class: "meaning" }, meaning));
    return html("tr", {}, ...cells);
  })));
}

function described(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : plain(value);
}

const WORDS = [
  ["root", "the pending token: the target’s own last prediction, right by construction"],
  ["n", "tokens in the target’s cache before this iteration; the root stands at position n"],
  ["p(u)", "the draft’s probability of the path from the root to u, or its chance as it is counted; of the root 1"],
  ["c(u)", "the draft’s probability of its own best guess after u"],
  ["B(u)", "how many children the rule wants below u"],
  ["bonus", "the target’s own token after the accepted path; the next root"],
];
const WORDS_OF_SAMPLING = [
  ["chance", "of a child: what the target has left for it / what the draft gave it, at most 1; " +
    "where the draft ranked and did not draw, what the target has left for it"],
  ["coin", "uniform on [0, 1): a child is kept if it is below the chance. If not, so much is left " +
    "of the target’s distribution, from which the next sibling is judged and the bonus drawn"],
];
const WORDS_OF_PATHS = [ // accepted by block or by traversal
  ["chance", "of a row to be kept with all above it: the chance above it x what the target has left " +
    "for it / what the draft gave it, at most 1; less once a child of it has been rejected"],
  ["coin", "uniform on [0, 1): the first row whose coin is below its chance ends the path. If it is " +
    "not, so much is left of the target’s distribution after the row above"],
];

function wordsOfSampling() {
  if (!isSampled) return [];
  const isOfPaths = ["block", "traversal"].includes(settings.acceptance);
  return isOfPaths ? WORDS_OF_PATHS : WORDS_OF_SAMPLING;
}

const COLOURS = [
  ["prompt", "prompt", "what was given"],
  ["drafted", "drafted", "the draft’s guess; the darker, and the wider its line, the higher is p(u)"],
  ["retrieved", "retrieved", "a guess from memory, without the draft; its p(u) is an estimate"],
  ["bonus", "target", "the target’s own: root and bonus, and what it says after a node"],
  ["", "dashed, no box", "a candidate that was dropped, with its p and the gate"],
];
const KEYS_SAY = [
  ["← →", "iteration"],
  ["↑ ↓ or [ ]", "step"],
  ["home, end", "first and last iteration"],
  ["space", "play, pause"],
  ["tab, enter", "from node to node, and keep one"],
  ["escape", "let go, close"],
];

// Every word, gate and colour of this run.
function glossary() {
  const trees = iterations.filter((iteration) => iteration.tree);
  const states = new Set(trees.flatMap(({ state }) => Object.keys(state)));
  const gates = new Set(trees.flatMap(({ tree }) => tree.dropped.map(([, , , gate]) => gate)));
  for (const { tree } of trees) tree.stopped.forEach((gate) => gate && gates.add(gate));
  const says = (names) => [...names].map((name) => [name, meaningOf(name)]);
  const source = isSampled ? ACCEPTANCES[settings.acceptance] : null;
  const link = (text, href) => html("a", { href, target: "_blank", rel: "noreferrer" }, text);
  return [
    html("h3", {}, "Words"),
    table([...WORDS, ...wordsOfSampling(), ...says(states)]),
    html("h3", {}, "Gates, which keep a candidate out or let nothing grow below a node"),
    table(says([...gates].sort())),
    html("h3", {}, "Colours"),
    table(COLOURS.map(([kind, name, what]) => [html("span", { class: `key ${kind}` }, name), what])),
    html("h3", {}, "Keys"),
    table(KEYS_SAY),
    html("p", { class: "hint" }, link("DynaTree", PAPER),
      ", section 3: the rule and its gates 3.3, mask and verification 3.4, commit 3.5.",
      ...(source ? [" Acceptance: ", link(source[0], source[1]), `${source[2]}.`] : [])),
  ];
}
