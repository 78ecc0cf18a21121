// The texts about one iteration: the captions of its steps, the details of an iteration or a node, and
// the meaning of gates and state values. Captions are also read aloud, so they are sentences.

const OTHER_GATES = { // gates that are not named after a setting
  confidence: "more candidates than B(u)",
  width: "more candidates than the static tree has at this depth",
  shape: "not in the static tree",
  votes: "two of three votes ended the tree",
  c_row: "the row costs more than its expected gain",
  c_level: "another level costs more than its expected gain",
  rows: "no row is left, or better nodes took the last ones",
  limit: "no deeper level: the text ends, a window is about to drop tokens, or the run is strict",
};
const STATES = {
  depth_ratio: "accepted depth / tree depth, mean of the last W trees. " +
    `Above ${DEPTH_RATIO_BOUNDS.high} D0 rises and tau_h and rho_deep fall, so trees get deeper. ` +
    `Below ${DEPTH_RATIO_BOUNDS.low} it is the reverse`,
  ngrams: "net gain of n-grams: expected tokens of the iteration minus the price of its time in tokens",
  draft: "net gain of drafting: mean tokens of recent drafted iterations minus the price of their time",
  source: "which of them made the tree",
};
const STATE_NAMES = {
  ngrams: "the net gain of n-grams",
  draft: "the net gain of drafting",
  source: "the source",
};
const SOURCES_OF_RETRIEVED = {
  auto: "n-grams",
  lookup: "n-grams",
  recycle: "the successor table",
  graft: "the successor table",
};
const RULE_OF_ACCEPTANCE = {
  own: "The user’s acceptance chooses the path.",
  walk: "From the root down, the target model’s next token is drawn. The child that holds it is " +
    "accepted.",
  token: "From the root down, a child is accepted if its uniform number is below its acceptance " +
    "probability.",
  traversal: "From the leaves up, the first row whose uniform number is below its acceptance " +
    "probability ends the path.",
};

function meaningOf(name) {
  const ofSetting = data.base?.meanings[name] ?? data.meanings[name];
  return ofSetting ?? OTHER_GATES[name] ?? STATES[name] ?? "a gate of the method";
}

// A gate with its value in this tree. The gates of graft are mostly those of its base rule.
function gateOf({ iteration }, name) {
  const own = name in data.meanings ? settings[name] : undefined;
  const value = iteration.state[name] ?? data.base?.settings[name] ?? own;
  return value === undefined ? name : `${name} = ${formatValue(value)}`;
}

// Consecutive tokens, in quotation marks.
function quote(ids) {
  return `“${ids.map((id) => visible(textOf(id))).join("")}”`;
}

function captionOf(view, stage) {
  return view.tree ? CAPTIONS[stage.kind](view, stage, view.iteration) : prefillCaption(view.iteration);
}

function prefillCaption({ ms, tokens }) {
  const prompt = `the prompt of ${formatCount(data.prompt.tokens.length, "token")}`;
  const first = `Its first token, ${quote(tokens)}, is the root of the first tree`;
  return `The target model prefills ${prompt} in ${formatMs(ms[1])}. ${first}.`;
}

const CAPTIONS = {
  whole(view, stage, { ms, tokens, path }) {
    const added = `The iteration adds ${quote(tokens)} in ${formatMs(sum(ms))}.`;
    const nRetrieved = view.isRetrieved.size;
    const nDrafted = view.tree.tokens.length - 1 - nRetrieved;
    if (nDrafted + nRetrieved === 0) {
      return `The tree is only its root, so there is no candidate to verify. ${added}`;
    }
    let nodes = `${nDrafted + nRetrieved} nodes (${nDrafted} drafted, ${nRetrieved} retrieved)`;
    if (!nRetrieved) nodes = formatCount(nDrafted, "drafted node");
    if (!nDrafted) nodes = formatCount(nRetrieved, "retrieved node");
    return `The target model accepts ${path.length - 1 || "none"} of ${nodes}. ${added}`;
  },
  draft(view, stage, { draft_rows: passes }) {
    const { pass } = stage;
    if (stage.isNothing) return "Nothing is drafted. The tree is only its root, the pending token.";
    if (stage.isRetrieval) {
      const retrieval = `Retrieval from ${SOURCES_OF_RETRIEVED[settings.method]}`;
      const nodes = formatCount(view.isRetrieved.size, "node");
      return `${retrieval} adds ${nodes}, without a pass of the draft model. Their p(u) is an estimate.`;
    }
    const isAdded = (depth, row) => depth === pass + 1 && !view.isRetrieved.has(row);
    const nAdded = view.depths.filter(isAdded).length;
    const added = nAdded ? formatCount(nAdded, "candidate") : "no candidate";
    const listed = view.tree.dropped.filter(([row]) => view.depths[row] === pass).length;
    const isAll = view.tree.n_dropped === view.tree.dropped.length;
    const dropped = isAll || listed ? `${listed}${isAll ? "" : " or more"}` : "others";
    const uncached = passes[0] > 1 ? `${formatCount(passes[0] - 1, "uncached token")} and ` : "";
    const rows = pass ? `${formatCount(passes[pass], "row")} at once` : `${uncached}the root`;
    const reasons = rowsOfPass(view, pass).map((row) => reasonOfBreadth(view, row)).filter(Boolean);
    const why = reasons.length === 1 ? ` ${reasons[0]}.` : ""; // the details list several reasons
    const which = `Pass ${pass + 1} of ${passes.length}: the draft model runs ${rows}`;
    return `${which}. The rule adds ${added} to the final tree and drops ${dropped}.${why}`;
  },
  mask(view) {
    const n = view.tree.tokens.length;
    if (n === 1) return "The root has one position. It attends to the cached tokens and itself.";
    const positions = formatCount(view.depth + 1, "position");
    const which = `The ${n} rows have ${positions}, one for each depth`;
    return `${which}. Each row attends to the cached tokens, its ancestors and itself.`;
  },
  verify(view, stage, { ms }) {
    const rows = formatCount(view.tree.tokens.length, "row");
    const prediction = isSampled
      ? "It gives a distribution of the next token after every node; the most probable token is shown"
      : "It gives the most probable next token after every node";
    return `One pass of the target model over ${rows} takes ${formatMs(ms[1])}. ${prediction}.`;
  },
  accept(view, stage, { path, bonus }) {
    const rows = path.length > 1 ? `rows ${joinWithAnd(path)} are` : "only the root is";
    const accepted = `${rows} accepted`;
    const how = acceptance === null
      ? "The path starts at the root and follows the target model’s most probable tokens."
      : RULE_OF_ACCEPTANCE[acceptance];
    const nTrials = view.trials.size;
    const trials = `After ${formatCount(nTrials, "trial")}`;
    const outcome = nTrials ? `${trials}, ${accepted}` : capitalise(accepted);
    if (hasTrials) return `${how} ${outcome}. Then the bonus token ${quote([bonus])} is drawn.`;
    return `${how} ${outcome}. ${quote([bonus])} is the bonus token.`;
  },
  commit(view, stage, { path, tokens }) {
    const nMoved = path.filter((row, i) => row !== i).length;
    const nDiscarded = view.tree.tokens.length - path.length;
    const last = view.n + path.length - 1;
    const slots = last > view.n ? `Slots ${view.n} to ${last} are` : `Slot ${last} is`;
    const moves = `${formatCount(nMoved, "row")} moved and ${formatCount(nDiscarded, "row")} discarded`;
    const drop = nDroppedByWindow(view);
    const window = drop > 0 ? ` The window then drops ${formatCount(drop, "old token")}.` : "";
    const committed = `${slots} committed${nDiscarded ? `, with ${moves}` : ""}`;
    return `${quote(tokens)} is added to the text. ${committed}.${window}`;
  },
  adapt(view, stage, { state: now }) {
    const next = iterations[view.index + 1]?.state;
    const names = Object.keys(now);
    if (!names.length) return `The settings of ${settings.method} do not change between trees.`;
    if (!next) return "The text ends here.";
    const changed = names.filter((name) => name !== "depth_ratio" && now[name] !== next[name]);
    const ratio = next.depth_ratio;
    const reason = ratio === undefined ? "" : reasonOfChange(view, ratio, changed.length > 0);
    const why = reason && `, because ${reason}`;
    if (!changed.length) return `Nothing changes for the next tree${why}.`;
    const changes = changed.map((name, i) => {
      const verb = i ? "" : " changes";
      const values = `from ${formatValue(now[name])} to ${formatValue(next[name])}`;
      return `${STATE_NAMES[name] ?? name}${verb} ${values}`;
    });
    return `For the next tree, ${joinWithAnd(changes)}${why}.`;
  },
};

function joinWithAnd(parts) {
  return parts.length < 2 ? parts.join() : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}

// Why dynatree's thresholds changed with this mean depth ratio, or why they did not.
function reasonOfChange(view, depthRatio, hasChanged) {
  const { low, high } = DEPTH_RATIO_BOUNDS;
  const shown = `the depth ratio ${roundUnlessEqual(depthRatio, [low, high])}`;
  if (!ruleSettings.history) return "history is off";
  if (depthRatio >= low && depthRatio <= high) return `${shown} is between ${low} and ${high}`;
  const comparison = `${shown} is ${depthRatio > high ? `above ${high}` : `below ${low}`}`;
  if (hasChanged) return comparison;
  const hasNodes = ({ tree }) => tree.tokens.length > 1; // a root alone has no depth ratio
  const nTrees = iterations.slice(1, view.index + 1).filter(hasNodes).length;
  if (nTrees < ruleSettings.W) return `history begins after W = ${ruleSettings.W} trees`;
  return `the thresholds are at their bounds, although ${comparison}`;
}

function rowsOfPass(view, pass) {
  const { slots } = view.tree;
  return slots.map((_, row) => row).filter((row) => slots[row] >= 0 && view.depths[row] === pass);
}

// Which of dynatree's two thresholds decided B(u); empty for a rule without them.
function reasonOfBreadth({ tree, iteration }, row) {
  const { B_mid, tau_l, adapt_breadth: isAdaptive } = ruleSettings;
  const { tau_h } = iteration.state;
  const c = tree.confidence[row];
  if (B_mid === undefined || c === null) return "";
  const shown = `c(u) ${roundUnlessEqual(c, [tau_l, tau_h])}`;
  let [name, why] = ["B_mid", `tau_l ${formatValue(tau_l)} ≤ ${shown} < tau_h ${formatValue(tau_h)}`];
  if (!isAdaptive) why = "adapt_breadth is off";
  else if (c >= tau_h) [name, why] = ["B_min", `${shown} ≥ tau_h ${formatValue(tau_h)}`];
  else if (c < tau_l) [name, why] = ["B_max", `${shown} < tau_l ${formatValue(tau_l)}`];
  if (ruleSettings[name] !== tree.breadth[row]) return ""; // c(u) rounds to the threshold
  return `${why}, so B(u) = ${name} = ${tree.breadth[row]}`;
}

// A number with two decimals, or with all digits if it would look equal to a threshold.
function roundUnlessEqual(value, thresholds) {
  const text = value.toFixed(2);
  return thresholds.includes(Number(text)) ? formatValue(value) : text;
}

// Show the details of a row, or of the iteration if row is null.
function drawDetails(view, stage, row) {
  const title = row === null ? ["Iteration"] : ["Node ", token(view.tree.tokens[row])];
  const parts = row === null ? iterationDetails(view, stage) : nodeDetails(view, stage, row);
  byId("details-title").replaceChildren(...title);
  byId("details").replaceChildren(...parts);
}

function list(pairs) {
  return html("dl", {}, ...pairs.map(([name, value]) => {
    return html("div", {}, html("dt", {}, name), html("dd", {}, value));
  }));
}

function token(id) {
  return html("code", {}, visible(textOf(id)));
}

function nodeDetails(view, stage, row) {
  const { p, draft_p: draftP, slots, confidence, breadth, target, stopped } = view.tree;
  const depth = view.depths[row];
  const wasRun = isRunByDraft(view, stage, row);
  const isEstimated = row > 0 && (view.isRetrieved.has(row) || settings.method === "auto" || draftP);
  const ofDraft = draftP?.[row] ?? null;
  const kind = ofDraft === null ? ", estimated" : `, calibrated; draft ${formatProbability(ofDraft)}`;
  const parts = [
    list([
      ["p(u)", formatProbability(p[row]) + (isEstimated ? kind : "")],
      ["c(u)", wasRun ? formatProbability(confidence[row]) : "not run"],
      ["B(u)", wasRun ? formatValue(breadth[row] ?? "–") : "–"],
      ["row, depth", `${row}, ${depth}`],
      ["position", `n+${depth} = ${view.n + depth}`],
      ["slots", `target ${view.n + row}, ${wasRun ? `draft ${view.n + slots[row]}` : "not run"}`],
    ]),
  ];
  if (hasReached(stage, "verify")) {
    const what = isSampled ? "Most probable next token: " : "Next token of the target model: ";
    parts.push(html("p", {}, what, token(target[row]), ` ${placeInTree(view, row)}`));
  }
  parts.push(html("p", {}, outcomeOf(view, stage, row)));
  if (stopped[row]) {
    const gate = html("b", {}, gateOf(view, stopped[row]));
    parts.push(html("p", {}, "Not expanded because of ", gate, `: ${meaningOf(stopped[row])}.`));
  }
  if (wasRun && reasonOfBreadth(view, row)) parts.push(html("p", {}, `${reasonOfBreadth(view, row)}.`));
  if (wasRun) parts.push(...droppedBelow(view, row));
  return parts;
}

// Where the target model's prediction after a row is in the tree.
function placeInTree(view, row) {
  const { tokens, target, dropped } = view.tree;
  const child = view.children[row].find((candidate) => tokens[candidate] === target[row]);
  if (child !== undefined) return `(row ${child})`;
  if (view.dropped[row].some((i) => dropped[i][1] === target[row])) return "(dropped)";
  return view.children[row].length ? "(not among the children)" : "";
}

function outcomeOf(view, stage, row) {
  if (row === 0) return "The root is the pending token, which the target model chose.";
  const source = view.isRetrieved.has(row) ? "Retrieved" : "Drafted";
  if (!hasReached(stage, "accept")) return `${source}.`;
  const trial = view.trials.get(row);
  if (trial) return `${source} and ${trialOutcome(trial)}`;
  if (view.isAccepted.has(row)) return `${source} and accepted.`;
  if (!view.isAccepted.has(view.tree.parents[row])) {
    return `${source}, but not accepted, because a node above it was not.`;
  }
  if (hasTrials) return `${source}, but not tried, because an earlier sibling was accepted.`;
  if (acceptance === "walk") return `${source}, but another token was drawn.`;
  return `${source}, but not accepted.`;
}

function trialOutcome({ p, uniform, remaining }) {
  const [number, probability] = [uniform, p].map(formatProbability);
  if (uniform < p) return `accepted: uniform number ${number} < acceptance probability ${probability}.`;
  const comparison = `uniform number ${number} ≥ acceptance probability ${probability}`;
  return `rejected: ${comparison}. The remaining mass is ${formatProbability(remaining)}.`;
}

function droppedBelow(view, row) {
  if (!view.dropped[row].length) return [];
  const below = view.dropped[row].map((i) => view.tree.dropped[i]);
  const entries = below.map(([, id, p, gate]) => {
    return html("li", {}, token(id), ` ${formatProbability(p)} `, html("b", {}, gateOf(view, gate)));
  });
  const gates = [...new Set(below.map(([, , , gate]) => gate))];
  return [
    html("h3", {}, "Dropped candidates"),
    html("ul", { class: "dropped" }, ...entries),
    html("p", {}, `${gates.map((gate) => `${gate}: ${meaningOf(gate)}`).join("; ")}.`),
  ];
}

function iterationDetails(view, stage) {
  const { iteration, tree } = view;
  const [draft, verify, other] = iteration.ms.map(formatMs);
  const [target, ofDraft] = iteration.cached;
  const cached = ofDraft ? `${target}, draft ${ofDraft}` : String(target);
  if (!tree) return [list([["draft", draft], ["verify", verify], ["other", other], ["cached", cached]])];
  const shown = tree.tokens.map((_, row) => row).filter((row) => row && isRowShown(view, stage, row));
  const nRetrieved = shown.filter((row) => view.isRetrieved.has(row)).length;
  const passes = iteration.draft_rows.slice(0, (stage.pass ?? Infinity) + 1);
  const pairs = [ // the first step that shows it, its name, its value
    ["draft", "drafted", shown.length - nRetrieved],
    ["draft", "retrieved", nRetrieved],
    ["draft", "rows per pass", passes.join(" + ") || "none"],
    ["accept", "accepted", iteration.path.length - 1],
    ["mask", "draft", draft],
    ["verify", "verify", verify],
    ["adapt", "other", other],
    ["commit", "cached", cached],
  ];
  const known = pairs.filter(([kind]) => hasReached(stage, kind));
  const parts = [list(known.map(([, name, value]) => [name, String(value)]))];
  if (hasReached(stage, "mask") && tree.n_dropped) parts.push(droppedCounts(tree));
  if (hasReached(stage, "accept")) parts.push(...trialsOf(view));
  parts.push(...breadthsOf(view, stage));
  const n = iteration.path.length - iteration.tokens.length;
  if (hasReached(stage, "commit") && n > 0) {
    const cut = `the last ${formatCount(n, "token")} of the path and bonus`;
    parts.push(html("p", {}, `The text ends here, without ${cut}.`));
  }
  parts.push(html("p", { class: "hint" }, "Point at a node to see its numbers. Click a node to pin it."));
  return parts;
}

// Why each row of a pass, or of all passes, has its number of children.
function breadthsOf(view, stage) {
  if (!["whole", "draft"].includes(stage.kind)) return [];
  const passes = stage.pass === undefined ? view.iteration.draft_rows.keys() : [stage.pass];
  const rows = [...passes].flatMap((pass) => rowsOfPass(view, pass));
  const entries = rows.filter((row) => reasonOfBreadth(view, row)).map((row) => {
    const why = ` ${reasonOfBreadth(view, row)}`;
    return html("li", { "data-row": row }, token(view.tree.tokens[row]), why);
  });
  if (!entries.length) return [];
  return [html("h3", {}, "Number of children"), html("ul", { class: "breadths" }, ...entries)];
}

// What decided a path of sampled text: the trials in their order, or the tokens drawn in a walk.
function trialsOf(view) {
  if (acceptance === "walk") return drawnTokensOf(view);
  if (!view.trials.size) return [];
  const entries = [...view.trials].map(([row, { p, uniform, remaining }]) => {
    const isAccepted = uniform < p;
    const [number, probability] = [uniform, p].map(formatProbability);
    const comparison = `${number} ${isAccepted ? "<" : "≥"} ${probability}`;
    const rest = isAccepted ? "accepted" : `rejected, remaining mass ${formatProbability(remaining)}`;
    return html("li", {}, token(view.tree.tokens[row]), ` ${comparison}: ${rest}`);
  });
  const title = "Trials: uniform number, probability";
  return [html("h3", {}, title), html("ol", { class: "trials" }, ...entries)];
}

// The token drawn after each row of the path, and the child that holds it.
function drawnTokensOf({ iteration: { path, bonus }, tree }) {
  const entries = path.map((row, i) => {
    const child = path[i + 1];
    const held = child === undefined ? "held by no child" : `held by row ${child}`;
    const drawn = child === undefined ? bonus : tree.tokens[child];
    return html("li", {}, token(tree.tokens[row]), " then ", token(drawn), `: ${held}`);
  });
  return [html("h3", {}, "Drawn tokens"), html("ol", { class: "trials" }, ...entries)];
}

function droppedCounts({ dropped, n_dropped: n }) {
  const counts = {};
  for (const [, , , gate] of dropped) counts[gate] = (counts[gate] ?? 0) + 1;
  const gates = Object.keys(counts).map((gate) => `${counts[gate]} by ${gate}`);
  const listed = n > dropped.length ? `, of the ${dropped.length} most probable` : "";
  const what = `${formatCount(n, "candidate")} dropped${listed}: `;
  return html("p", {}, what, html("b", {}, gates.join(", ")), ".");
}

function accessibleName(view, stage, row) {
  const { p, stopped } = view.tree;
  const [text, prediction] = [view.tree.tokens, view.tree.target].map((ids) => visible(textOf(ids[row])));
  const parts = [`Row ${row}, ${text}, p(u) ${formatProbability(p[row])}.`, outcomeOf(view, stage, row)];
  if (hasReached(stage, "verify")) parts.push(`The target model predicts ${prediction}.`);
  if (stopped[row]) parts.push(`Not expanded because of ${stopped[row]}.`);
  return parts.join(" ");
}
