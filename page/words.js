// An iteration in words: the caption, step by step, which is also read aloud; the numbers of what is
// pointed at; and what every word and colour means.

// What gates say that are no setting.
const OTHER_GATES = {
  confidence: "more candidates than B(u)",
  width: "more candidates than the shape has there",
  shape: "more than the settled shape has",
  rows: "no row was left, or better nodes took them",
  limit: "no deeper: the text ends, a window is about to drop, or the run is strict",
};
const STATES = {
  reach: "mean of accepted depth / depth over the window: " +
    `bolder above ${REACH.bolder}, more careful below ${REACH.careful}`,
  memory: "tokens that memory’s tree is expected to bring beyond its time",
  draft: "tokens that the draft’s tree is expected to bring beyond its time",
  chosen: "which of them made the tree",
};
const ACCEPTED_BY = {
  token: "From the root, a child is kept if its coin is below its chance",
  block: "From the chain’s end, the first row whose coin is below its chance is kept, with all above it",
  traversal: "From the leaves, the first row whose coin is below its chance is kept, with all above it",
  "the method's": "By an acceptance of the method’s own",
};

function meaningOf(name) {
  const settled = data.base?.meanings[name] ?? data.meanings[name];
  return settled ?? OTHER_GATES[name] ?? STATES[name] ?? "its own gate";
}

// A gate with the value that it had in this tree; graft's are mostly its base's.
function gateOf({ iteration }, name) {
  const own = name in data.meanings ? settings[name] : undefined;
  const value = iteration.state[name] ?? data.base?.settings[name] ?? own;
  return value === undefined ? name : `${name} = ${plain(value)}`;
}

// Tokens one after another, as they stand in the text.
function quoted(ids) {
  return `“${ids.map((id) => visible(word(id))).join("")}”`;
}

function captionOf(view, stage) {
  return view.tree ? CAPTIONS[stage.kind](view, stage, view.iteration) : tellPrompt(view.iteration);
}

function tellPrompt({ ms, tokens }) {
  const prompt = `The target reads the prompt, ${counted(data.prompt.tokens.length, "token")}`;
  const first = `its first token is ${quoted(tokens)}, the root of the first tree`;
  return `${prompt}, in ${milliseconds(ms[1])}; ${first}.`;
}

const CAPTIONS = {
  whole(view, stage, { ms, tokens, path }) {
    const written = `one pass of the target writes ${quoted(tokens)}, ${milliseconds(sum(ms))}.`;
    const nRetrieved = view.isRetrieved.size;
    const nDrafted = view.tree.tokens.length - 1 - nRetrieved;
    if (nDrafted + nRetrieved === 0) return `No guess to check: ${written}`;
    const guesses = [nDrafted && `${nDrafted} drafted`, nRetrieved && `${nRetrieved} retrieved`];
    return `${guesses.filter(Boolean).join(" and ")}, ${path.length - 1} accepted: ${written}`;
  },
  draft(view, stage, { draft_rows: passes }) {
    const { pass } = stage;
    if (stage.isNothing) return "Nothing is drafted: the tree is its root, the pending token.";
    if (stage.isMemory) {
      const n = counted(view.isRetrieved.size, "node");
      return `${n} from memory, without a pass of the draft; the probability of each is an estimate.`;
    }
    const isKept = (depth, row) => depth === pass + 1 && !view.isRetrieved.has(row);
    const kept = counted(view.depths.filter(isKept).length, "guess", "guesses");
    const listed = view.tree.dropped.filter(([row]) => view.depths[row] === pass).length;
    const isAll = view.tree.n_dropped === view.tree.dropped.length;
    const dropped = isAll || listed ? `${listed}${isAll ? "" : " or more"}` : "others";
    const lacking = passes[0] > 1 ? `${counted(passes[0] - 1, "token")} it has not read yet, and ` : "";
    const read = pass ? `${counted(passes[pass], "row")} at once` : `${lacking}the root`;
    const reasons = rowsOfPass(view, pass).map((row) => whyBreadth(view, row)).filter(Boolean);
    const why = reasons.length === 1 ? ` ${reasons[0]}.` : ""; // more have room beside the tree
    const which = `Pass ${pass + 1} of ${passes.length}: the draft reads ${read}`;
    return `${which}; ${kept} in the end kept, ${dropped} dropped.${why}`;
  },
  mask(view) {
    const rows = counted(view.tree.tokens.length, "row");
    const at = counted(view.depth + 1, "position");
    return `${rows} at ${at}: each sees the text and its own ancestors, and stands at its depth.`;
  },
  verify(view, stage, { ms }) {
    const which = isSampled
      ? "after every node it has a distribution; the likeliest token is shown, but the text is drawn"
      : "its own next token after every node";
    const rows = counted(view.tree.tokens.length, "row");
    return `One pass of the target over ${rows}, ${milliseconds(ms[1])}: ${which}.`;
  },
  accept(view, stage, { path, bonus }) {
    const rows = path.length > 1 ? `kept: rows ${path.join(", ")}` : "kept: the root alone";
    if (!isSampled) {
      const how = "From the root, follow the child that the target itself would write";
      return `${how}; ${rows}. ${quoted([bonus])} is the bonus.`;
    }
    const how = ACCEPTED_BY[settings.acceptance] ?? ACCEPTED_BY.token;
    const drawn = `${quoted([bonus])}, the bonus, is drawn from what the target has left`;
    return `${how}: ${view.trials.size} tried; ${rows}. ${drawn}.`;
  },
  commit(view, stage, { path, tokens }) {
    const moved = path.filter((row, i) => row !== i).length;
    const what = moved ? `${counted(moved, "row")} moved, the rest forgotten` : "nothing moves";
    const drop = droppedBy(view);
    const window = drop > 0 ? ` The window then drops ${drop} old tokens.` : "";
    const last = view.n + path.length - 1;
    return `${quoted(tokens)} is added; slots ${view.n} to ${last} stay, ${what}.${window}`;
  },
  adapt(view, stage, { state: now }) {
    const next = iterations[view.index + 1]?.state;
    const names = Object.keys(now);
    if (!names.length) return `${settings.method} keeps to its settings; no history moves them.`;
    if (!next) return "The text ends here.";
    const moved = names.filter((name) => name !== "reach" && now[name] !== next[name]);
    const why = next.reach === undefined ? "" : `, as ${whyMoved(view, next.reach, moved.length > 0)}`;
    if (!moved.length) return `Nothing moves for the next tree${why}.`;
    const changes = moved.map((name) => `${name} ${plain(now[name])} → ${plain(next[name])}`);
    return `For the next tree: ${changes.join(", ")}${why}.`;
  },
};

// The mean that moved dynatree's thresholds, and if it did not, what held them.
function whyMoved(view, reach, hasMoved) {
  const shown = `reach ${beside(reach, Object.values(REACH))}`;
  if (!ofRule.history) return "history is off";
  if (reach >= REACH.careful && reach <= REACH.bolder) {
    return `${shown} is between ${REACH.careful} and ${REACH.bolder}`;
  }
  const isBolder = reach > REACH.bolder;
  const moving = `${shown} is ${isBolder ? `above ${REACH.bolder}` : `below ${REACH.careful}`}`;
  if (hasMoved) return moving;
  const isTold = ({ tree }) => tree.tokens.length > 1; // a root alone tells nothing
  const n = iterations.slice(1, view.index + 1).filter(isTold).length;
  if (n < ofRule.W) return `history begins after W = ${ofRule.W} trees`;
  return `${moving}, but they are at their bounds`;
}

function rowsOfPass(view, pass) {
  const { slots } = view.tree;
  return slots.map((_, row) => row).filter((row) => slots[row] >= 0 && view.depths[row] === pass);
}

// Which of dynatree's two bars gave B(u); nothing for a rule that has none.
function whyBreadth({ tree, iteration }, row) {
  const { B_mid, tau_l, adapt_breadth: isAdaptive } = ofRule;
  const { tau_h } = iteration.state;
  const c = tree.confidence[row];
  if (B_mid === undefined || c === null) return "";
  const shown = `c(u) ${beside(c, [tau_l, tau_h])}`;
  let [name, why] = ["B_mid", `tau_l ${plain(tau_l)} ≤ ${shown} < tau_h ${plain(tau_h)}`];
  if (!isAdaptive) why = "adapt_breadth is off";
  else if (c >= tau_h) [name, why] = ["B_min", `${shown} ≥ tau_h ${plain(tau_h)}`];
  else if (c < tau_l) [name, why] = ["B_max", `${shown} < tau_l ${plain(tau_l)}`];
  if (ofRule[name] !== tree.breadth[row]) return ""; // its four digits are those of the bar
  return `${why}: ${name} = ${counted(tree.breadth[row], "child", "children")}`;
}

// A number in two digits, or where they are a bar's that it is held against, in all.
function beside(value, bars) {
  const text = value.toFixed(2);
  return bars.includes(Number(text)) ? plain(value) : text;
}

// Of a row, or of the iteration if there is none.
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
  return html("code", {}, visible(word(id)));
}

function gateSentence(view, name, verb) {
  return html("p", {}, `${verb} `, html("b", {}, gateOf(view, name)), `: ${meaningOf(name)}.`);
}

function nodeDetails(view, stage, row) {
  const { p, believed, slots, confidence, breadth, target, stopped } = view.tree;
  const depth = view.depths[row];
  const wasRun = isRun(view, stage, row);
  const isEstimated = row > 0 && (view.isRetrieved.has(row) || settings.method === "auto" || believed);
  const ofDraft = believed?.[row] ?? null;
  const kind = ofDraft === null ? ", estimated" : `, counted; draft ${probability(ofDraft)}`;
  const parts = [
    list([
      ["p(u)", probability(p[row]) + (isEstimated ? kind : "")],
      ["c(u)", wasRun ? probability(confidence[row]) : "– not run"],
      ["B(u)", wasRun ? plain(breadth[row] ?? "–") : "–"],
      ["row, depth", `${row}, ${depth}`],
      ["position", `n+${depth} = ${view.n + depth}`],
      ["slots", `target ${view.n + row}, ${wasRun ? `draft ${view.n + slots[row]}` : "not run"}`],
    ]),
  ];
  if (isAt(stage, "verify")) {
    const says = isSampled ? "The target’s likeliest here: " : "The target’s choice here: ";
    parts.push(html("p", {}, says, token(target[row]), ` ${whereIs(view, row)}`));
  }
  parts.push(html("p", {}, fateOf(view, stage, row)));
  if (stopped[row]) parts.push(gateSentence(view, stopped[row], "Not expanded,"));
  if (wasRun && whyBreadth(view, row)) parts.push(html("p", {}, `${whyBreadth(view, row)}.`));
  if (wasRun) parts.push(...droppedBelow(view, row));
  return parts;
}

function whereIs(view, row) {
  const { tokens, target, dropped } = view.tree;
  const child = view.children[row].find((candidate) => tokens[candidate] === target[row]);
  if (child !== undefined) return `= row ${child}`;
  if (view.dropped[row].some((i) => dropped[i][1] === target[row])) return "(dropped)";
  return view.children[row].length ? "(not among its children)" : "";
}

function fateOf(view, stage, row) {
  if (row === 0) return "The root: the pending token, the target’s own.";
  const source = view.isRetrieved.has(row) ? "Retrieved" : "Drafted";
  if (!isAt(stage, "accept")) return `${source}.`;
  const trial = view.trials.get(row);
  if (trial) return `${source}; ${trialOf(trial)}.`;
  if (view.isAccepted.has(row)) return `${source} and accepted.`;
  const isReached = view.isAccepted.has(view.tree.parents[row]);
  if (isReached && isSampled) return `${source}; not tried, an elder sibling was accepted.`;
  return `${source}; not accepted${isReached ? "." : ", as a node above it is not."}`;
}

function trialOf({ chance, coin, left }) {
  const isKept = coin < chance;
  const fate = isKept ? "accepted" : `rejected, leaves ${probability(left)}`;
  return `coin ${probability(coin)} ${isKept ? "<" : "≥"} chance ${probability(chance)}: ${fate}`;
}

function droppedBelow(view, row) {
  if (!view.dropped[row].length) return [];
  const below = view.dropped[row].map((i) => view.tree.dropped[i]);
  const entries = below.map(([, id, p, gate]) => {
    return html("li", {}, token(id), ` ${probability(p)} `, html("b", {}, gateOf(view, gate)));
  });
  const gates = [...new Set(below.map(([, , , gate]) => gate))];
  return [
    html("h3", {}, "Dropped below it"),
    html("ul", { class: "dropped" }, ...entries),
    html("p", {}, `${gates.map((gate) => `${gate}: ${meaningOf(gate)}`).join("; ")}.`),
  ];
}

function iterationDetails(view, stage) {
  const { iteration, tree } = view;
  const [draft, verify, other] = iteration.ms.map(milliseconds);
  const held = `${iteration.cached[0]}${iteration.cached[1] ? `, draft ${iteration.cached[1]}` : ""}`;
  if (!tree) return [list([["draft", draft], ["verify", verify], ["other", other], ["cached", held]])];
  const there = tree.tokens.map((_, row) => row).filter((row) => row && isThere(view, stage, row));
  const nRetrieved = there.filter((row) => view.isRetrieved.has(row)).length;
  const passes = iteration.draft_rows.slice(0, (stage.pass ?? Infinity) + 1);
  const pairs = [ // from which step on, what it is called, and what it is
    ["draft", "drafted", there.length - nRetrieved],
    ["draft", "retrieved", nRetrieved],
    ["draft", "rows by pass", passes.join(" + ") || "none"],
    ["accept", "accepted", iteration.path.length - 1],
    ["mask", "draft", draft],
    ["verify", "verify", verify],
    ["adapt", "other", other],
    ["commit", "cached", held],
  ];
  const known = pairs.filter(([kind]) => isAt(stage, kind));
  const parts = [list(known.map(([, name, value]) => [name, String(value)]))];
  if (isAt(stage, "mask") && tree.n_dropped) parts.push(droppedCounts(tree));
  if (isAt(stage, "accept")) parts.push(...trialsOf(view));
  parts.push(...breadthsOf(view, stage));
  const n = iteration.path.length - iteration.tokens.length;
  if (isAt(stage, "commit") && n > 0) {
    parts.push(html("p", {}, `The text ends: ${counted(n, "token")} of the path and bonus cut off.`));
  }
  parts.push(html("p", { class: "hint" }, "Point at a node for its numbers; a click keeps them."));
  return parts;
}

// Why each row of a pass, or of them all, has so many children.
function breadthsOf(view, stage) {
  if (!["whole", "draft"].includes(stage.kind)) return [];
  const passes = stage.pass === undefined ? view.iteration.draft_rows.keys() : [stage.pass];
  const rows = [...passes].flatMap((pass) => rowsOfPass(view, pass));
  const entries = rows.filter((row) => whyBreadth(view, row)).map((row) => {
    const why = ` ${whyBreadth(view, row)}`;
    return html("li", { "data-row": row }, token(view.tree.tokens[row]), why);
  });
  if (!entries.length) return [];
  return [html("h3", {}, "Children"), html("ul", { class: "breadths" }, ...entries)];
}

// Of sampled text: each child that was tried, in its order.
function trialsOf(view) {
  if (!view.trials.size) return [];
  const entries = [...view.trials].map(([row, trial]) => {
    return html("li", {}, token(view.tree.tokens[row]), ` ${trialOf(trial)}`);
  });
  return [html("h3", {}, "Tried"), html("ol", { class: "tried" }, ...entries)];
}

function droppedCounts({ dropped, n_dropped: n }) {
  const counts = {};
  for (const [, , , gate] of dropped) counts[gate] = (counts[gate] ?? 0) + 1;
  const gates = Object.keys(counts).map((gate) => `${counts[gate]} by ${gate}`);
  const listed = n > dropped.length ? ` of the likeliest ${dropped.length}` : "";
  const what = `${counted(n, "candidate")} dropped:${listed} `;
  return html("p", {}, what, html("b", {}, gates.join(", ")), ".");
}

function readAloud(view, stage, row) {
  const { tokens, p, target, stopped } = view.tree;
  const name = `row ${row}, ${visible(word(tokens[row]))}, p ${probability(p[row])}`;
  const parts = [name, fateOf(view, stage, row)];
  if (isAt(stage, "verify")) parts.push(`the target says ${visible(word(target[row]))}`);
  if (stopped[row]) parts.push(`not expanded, ${stopped[row]}`);
  return parts.join("; ");
}
