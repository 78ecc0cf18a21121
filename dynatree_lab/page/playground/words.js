// What the page says of its words, of a gate, of an iteration and of a node.

const TERMS = [
  ["p(u)", "the product of the draft’s probabilities along the path from the root to node u"],
  ["c(u)", "the draft’s probability of its likeliest token after u"],
  ["B(u)", "the number of children that the rule allows below u"],
  ["bonus", "the target’s token after the accepted path, and the gate that kept it out"],
  ["dashed lines", "to the likeliest candidates that a gate dropped; of one speed, on the right"],
  ["cost", "of an iteration: 1 - R, R for each row and D for each draft pass; ar’s is 1"],
  ["× ar", "tokens / cost, because ar writes a token per iteration; computed, not measured"],
  ["black line", "the visited settings that no other one beats at their cost"],
];
const KEY_HELP = [
  ["← → or [ ]", "previous, next iteration; on a slider, arrows change its value"],
  ["c", "keep this setting to compare others with it; then swap the two"],
  ["f", "the fastest visited setting; a click on a dot goes back to its setting"],
  ["escape", "close the panel, end the comparison"],
];

// Of a gate that kept the next token out of the tree: where that token was, and what helps.
const GATES = {
  tau: ["too unlikely for the tree", "Lower tau for wider trees."],
  confidence: ["not among the B(u) likeliest", "Raise B_mid or B_max for wider trees."],
  width: ["not among the likeliest candidates", "A wider tree would have it."],
  rho_stop: ["below a node that rho_stop ended", "Lower rho_stop for deeper trees."],
  rho_deep: ["below a node that rho_deep ended", "Lower rho_deep for deeper trees."],
  D0: ["below depth D0", "Raise D0 for deeper trees."],
  D_max: ["below the deepest level", "Raise D_max for deeper trees."],
  D: ["below the deepest level", "Raise D for deeper trees."],
  K: ["after the end of the chain", "Raise K for longer ones."],
  N: ["less likely than the N nodes", "Raise N for larger trees."],
  N_max: ["left out of a full tree", "Raise N_max, or tau for smaller trees."],
  unlikely: ["one that the draft nearly excludes", "No setting helps."],
};

const INCOMPLETE = "The recording lacks candidates of this tree; a real one may have more nodes.";

function quote(tokens) {
  return `“${tokens.map((token) => visible(textOf(token))).join("")}”`;
}

// The value of a setting in an iteration; history may have moved it.
function valueIn({ settings }, { state }, name) {
  return formatValue(state[name] ?? settings[name]);
}

function captionOf(setting, iteration) {
  const { start, tree, path, missed } = iteration;
  const added = quote(recording.text.slice(start + 1, start + 1 + path.length));
  const nDrafted = tree.tokens.length - 1;
  const passes = formatCount(tree.passes.length, "draft pass", "draft passes");
  const accepted = `The target accepts ${path.length - 1} of ${formatCount(nDrafted, "node")}`;
  const what = nDrafted ? `${accepted} (${passes}) and` : "The tree is only its root. The target";
  const why = reasonOf(setting, iteration, missed);
  const reason = why && ` ${quote([missed.token])} is not in the tree: ${why}.`;
  return `${what} adds ${added}.${reason}${tree.isIncomplete ? ` ${INCOMPLETE}` : ""}`;
}

// Why the bonus token was not in the tree; empty for a tree that the end of the text cuts.
function reasonOf(setting, iteration, { gate, isExpanded, rank, logprob }) {
  const { tree, path } = iteration;
  const leaf = path.at(-1);
  const value = () => `${gate} ${valueIn(setting, iteration, gate)}`;
  const p = formatProbability(Math.exp(logprob ?? tree.logprobs[leaf]));
  if (gate === null || gate === "limit" || gate === "rows") return "";
  if (gate === "unlikely") return `its p(u) is below ${data.min_probability}`;
  if (gate === "width") return `it is candidate ${rank + 1} of the draft`;
  if (gate === "N") return `p(u) ${p}, and other nodes are likelier`;
  if (gate === "confidence") {
    return `it is candidate ${rank + 1}, and ${reasonOfBreadth(setting, iteration, leaf)}`;
  }
  if (gate.startsWith("rho")) return `the path ends at p(u) ${p} < ${value()}`;
  if (gate === "tau") return `p(u) ${p} < ${value()}`;
  return isExpanded ? `no row was left, ${value()}` : `the tree ends at ${value()}`;
}

function reasonOfBreadth(setting, iteration, row) {
  const { confidence, breadth } = iteration.tree;
  const c = `c(u) ${formatProbability(confidence[row])}`;
  const [low, high] = ["tau_l", "tau_h"].map((name) => valueIn(setting, iteration, name));
  let why = `tau_l ${low} ≤ ${c} < tau_h ${high}`;
  if (!setting.settings.adapt_breadth) why = "adapt_breadth is off";
  else if (confidence[row] >= Number(high)) why = `${c} ≥ tau_h ${high}`;
  else if (confidence[row] < Number(low)) why = `${c} < tau_l ${low}`;
  return `B(u) = ${breadth[row]}, because ${why}`;
}

// The thresholds of a tree that history may have moved.
function describeState({ settings }, { state: now }) {
  const names = settings.history ? Object.keys(now) : [];
  const words = names.map((name) => `${name} ${formatValue(now[name])}`);
  return words.length ? `${words.join(", ")}. Point at a node.` : "Point at a node.";
}

function describeNode(setting, iteration, row) {
  const { tokens, logprobs, nodes, stopped } = iteration.tree;
  const p = row ? `p(u) ${formatProbability(Math.exp(logprobs[row]))}` : "the root";
  const parts = [`${visible(textOf(tokens[row]))}: ${p}`];
  if (nodes[row] !== null && setting.method === "dynatree") {
    parts.push(reasonOfBreadth(setting, iteration, row));
  } else if (stopped[row]) {
    parts.push(`no candidates below it: ${stopped[row]}`);
  }
  return parts.join(", ");
}
