// The header and its two panels: totals of the run, its settings with the command that repeats it, and
// the glossary of words and colours.

const PAPER = "https://github.com/cny123222/DynaTree/blob/main/paper/dynatree.pdf";
const ACCEPTANCES = { // name, address and section of the paper
  token: ["DySpec", "https://arxiv.org/abs/2410.11744", ", Algorithm 3"],
  traversal: ["Traversal Verification", "https://arxiv.org/abs/2505.12398", ""],
};

function buildAbout() {
  const { metrics, sampling } = { ...data, ...settings };
  const candidates = acceptance === "walk" ? ", candidates not drawn" : "";
  const how = isSampled ? `sampled at ${formatValue(sampling.temperature)}${candidates}` : "greedy";
  const window = settings.window ? `, window ${settings.window.size}` : "";
  const own = Object.entries(settings.objects ?? {}).map(([kind, name]) => `, ${kind} ${name}`);
  byId("method").textContent = `${settings.method}, ${how}${window}${own.join("")}`;
  document.title = `${settings.method}: ${formatCount(metrics.new_tokens, "token")}, DynaTree`;
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
    const { speedup, ar_throughput: speed } = compare;
    if (speedup) found.push([`${speedup.toFixed(2)}×`, `ar (${speed.toFixed(1)} / s)`]);
    found.push(verdict(compare));
  }
  if (data.interrupted) found.push(["interrupted", "before the end", "warning"]);
  return found;
}

function verdict({ exact, first_difference: first }) {
  if (exact === null) return ["sampled", "ids not compared"];
  return exact ? ["ids equal", "to ar’s", "good"] : ["ids differ", `from token ${first}`, "warning"];
}

function sections() {
  const { meanings, versions, graphs, metrics, compare, base, format } = data;
  const rows = Object.entries(settings).map(([key, value]) => [key, value, meanings[key]]);
  const ofBase = Object.entries(base?.settings ?? {}).map((row) => [...row, base.meanings[row[0]]]);
  const tables = [
    [`Settings of ${settings.method}`, rows.filter(([key]) => key in meanings)],
    [`Settings of the base rule, ${settings.base}`, ofBase],
    ["Run", [...rows.filter(([key]) => !(key in meanings)), ["finish_reason", data.finish_reason]]],
    ["Measured", Object.entries(metrics)],
    ["Compared with ar", Object.entries(compare ?? {})],
    ["Machine", [...Object.entries(versions), ["graphs", graphs]]],
  ];
  const command = data.command.map(shellWord).join(" ");
  return [
    ...(command ? [html("h3", {}, "Command"), html("code", { class: "command" }, command)] : []),
    ...tables.filter(([, found]) => found.length).flatMap(([title, found]) => {
      return [html("h3", {}, title), table(found)];
    }),
    html("p", { class: "hint" }, `Data: ${format.name}, version ${format.version}, in this file.`),
  ];
}

const TERMS = [
  ["root", "the pending token: chosen by the target model, but not yet in the cache"],
  ["n", "number of tokens in the target model’s cache before this iteration; also the root’s position"],
  ["p(u)", "the draft model’s probability of the path from the root to u; for retrieved nodes and " +
    "with calibration, the estimated acceptance probability of the path; 1 for the root"],
  ["c(u)", "the draft model’s probability of its most probable token after u"],
  ["B(u)", "number of children that the rule allows below u"],
  ["bonus", "the target model’s token after the accepted path; the root of the next tree"],
];
const TERMS_OF_TOKEN = [
  ["acceptance probability", "of a drawn child: its remaining target probability / its draft " +
    "probability, at most 1; of a retrieved child: its remaining target probability"],
  ["uniform number", "drawn from [0, 1); a child is accepted if it is below the acceptance probability"],
  ["remaining mass", "the part of the target distribution that is left after a rejection. The next " +
    "sibling is tried against this part, normalised, or the bonus token is drawn from it"],
];
const TERMS_OF_PATHS = [ // for acceptance by traversal
  ["acceptance probability", "of a row and all rows above it: that of its parent × remaining target " +
    "probability / draft probability, at most 1. It falls with each rejected child"],
  ["uniform number", "drawn from [0, 1); the path ends at the first row for which it is below the " +
    "acceptance probability"],
  ["remaining mass", "the part of the target distribution after the parent that is left if the row " +
    "is rejected"],
];

function termsOfSampling() {
  if (!hasTrials) return [];
  return acceptance === "traversal" ? TERMS_OF_PATHS : TERMS_OF_TOKEN;
}

const COLOURS = [
  ["prompt", "prompt", "the given text"],
  ["drafted", "drafted", "a node of the draft model; a darker box and a wider line mean a higher p(u)"],
  ["retrieved", "retrieved", "a node from n-grams or the successor table; its p(u) is an estimate"],
  ["bonus", "target", "from the target model: the root, the bonus token, and predictions after a node"],
  ["", "dashed, no box", "a dropped candidate, with its p(u) and the gate that dropped it"],
];
const KEY_HELP = [
  ["← →", "previous, next iteration"],
  ["↑ ↓ or [ ]", "previous, next step"],
  ["home, end", "first, last iteration"],
  ["space", "play, pause"],
  ["tab, enter", "move between nodes, pin a node"],
  ["escape", "unpin the node, close the panel"],
];

// The glossary of the words, gates and colours of this run.
function glossary() {
  const trees = iterations.filter((iteration) => iteration.tree);
  const states = new Set(trees.flatMap(({ state }) => Object.keys(state)));
  const gates = new Set(trees.flatMap(({ tree }) => tree.dropped.map(([, , , gate]) => gate)));
  for (const { tree } of trees) tree.stopped.forEach((gate) => gate && gates.add(gate));
  const meaningRows = (names) => [...names].map((name) => [name, meaningOf(name)]);
  const source = ACCEPTANCES[acceptance];
  const link = (text, href) => html("a", { href, target: "_blank", rel: "noreferrer" }, text);
  return [
    html("h3", {}, "Words"),
    table([...TERMS, ...termsOfSampling(), ...meaningRows(states)]),
    html("h3", {}, "Gates, which drop a candidate or stop the growth below a node"),
    table(meaningRows([...gates].sort())),
    html("h3", {}, "Colours"),
    table(COLOURS.map(([kind, name, what]) => [html("span", { class: `key ${kind}` }, name), what])),
    html("h3", {}, "Keys"),
    table(KEY_HELP),
    html("p", { class: "hint" }, link("DynaTree", PAPER),
      ", section 3: the rule and its gates 3.3, mask and verification 3.4, commit 3.5.",
      ...(source ? [" Acceptance: ", link(source[0], source[1]), `${source[2]}.`] : [])),
  ];
}
