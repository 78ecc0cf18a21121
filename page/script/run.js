// The run as data, and the view of one iteration that all panels share. What is counted here is
// counted of the data; what a rule decided is read from it (docs/page.md), never worked out again.

const data = JSON.parse(byId("data").textContent);
const iterations = data.iterations;
const lastIteration = iterations.length - 1;
const isSampled = Boolean(data.settings.sampling);

const STEPS = ["draft", "mask", "verify", "accept", "commit", "adapt"]; // as in the README

// What gates say that are no setting.
const OTHER_GATES = {
  confidence: "more candidates than B(u)",
  width: "more candidates than the shape has there",
  shape: "more than the settled shape has",
  rows: "no row was left, or better nodes took them",
  limit: "no deeper: the text ends, a window is about to drop, or the run is strict",
};

function word(id) {
  return data.vocabulary[id] ?? `#${id}`;
}

function depthsOf(parents) {
  const depths = [0];
  for (let row = 1; row < parents.length; row++) depths.push(depths[parents[row]] + 1);
  return depths;
}

// Everything about one iteration: its tree by row, what its caches held before it, its stages.
function viewOf(index) {
  const iteration = iterations[index];
  const [n, nDraft] = index ? iterations[index - 1].cached : [0, 0];
  const view = { index, iteration, tree: iteration.tree, n, nDraft, stages: [{ kind: "whole" }] };
  if (!view.tree) return view;
  const { tokens, parents, retrieved, dropped } = view.tree;
  view.depths = depthsOf(parents);
  view.depth = Math.max(...view.depths);
  view.children = tokens.map(() => []);
  for (let row = 1; row < tokens.length; row++) view.children[parents[row]].push(row);
  view.dropped = tokens.map(() => []);
  dropped.forEach((entry, i) => view.dropped[entry[0]].push(i));
  view.isRetrieved = new Set(retrieved);
  view.isAccepted = new Set(iteration.path);
  view.leaf = iteration.path[iteration.path.length - 1];
  view.state = iteration.state;
  view.stages.push(...stagesOf(iteration));
  return view;
}

// The six steps of the README, the draft pass by pass.
function stagesOf(iteration) {
  const passes = iteration.draft_rows.length;
  const stages = [];
  for (let pass = 0; pass < passes; pass++) stages.push({ kind: "draft", pass, passes });
  if (iteration.tree.retrieved.length) stages.push({ kind: "draft", isMemory: true });
  if (!stages.length) stages.push({ kind: "draft", isNothing: true });
  for (const kind of STEPS.slice(1)) stages.push({ kind });
  return stages;
}

// Whether a row is there already: the draft's pass 0 runs the root and gives depth 1.
function isThere(view, stage, row) {
  if (row === 0 || stage.kind !== "draft" || stage.isMemory) return true;
  return !view.isRetrieved.has(row) && view.depths[row] <= stage.pass + 1;
}

// Whether the draft has run a row by then.
function isRun(view, stage, row) {
  const slot = view.tree.slots[row];
  return slot >= 0 && !(stage.kind === "draft" && view.depths[row] > (stage.pass ?? Infinity));
}

// How far an iteration has come: whether the step of this kind is done, or being shown.
function isAt(stage, kind) {
  return stage.kind === "whole" || STEPS.indexOf(stage.kind) >= STEPS.indexOf(kind);
}

// A gate with the value it had in this tree and what it means; graft's are mostly its base's.
function gateOf(view, name) {
  const value = view.state[name] ?? data.base?.settings[name] ?? ownValue(name);
  const meaning = data.base?.meanings[name] ?? data.meanings[name] ?? OTHER_GATES[name] ?? "its own gate";
  return { name, value: value === undefined ? "" : plain(value), meaning };
}

function ownValue(name) {
  return name in data.meanings ? data.settings[name] : undefined;
}

// How many tokens a window dropped from the target's cache.
function droppedBy({ n, iteration }) {
  return data.settings.window ? n + iteration.path.length - iteration.cached[0] : 0;
}

// Where the tokens of an iteration came from: the accepted rows, then the target.
function originsOf(iteration) {
  const retrieved = new Set(iteration.tree ? iteration.tree.retrieved : []);
  const path = iteration.path ?? [0];
  return iteration.tokens.map((_, i) => {
    if (i + 1 >= path.length) return "bonus";
    return retrieved.has(path[i + 1]) ? "retrieved" : "drafted";
  });
}

// By iteration and depth, how many trees so far reached the depth, and how many paths did.
function countDepths() {
  const depths = iterations.map((found) => (found.tree ? depthsOf(found.tree.parents) : [0]));
  const deepest = depths.map((found) => Math.max(...found));
  const most = Math.max(...deepest);
  const reached = [new Array(most + 1).fill(0)];
  const accepted = [new Array(most + 1).fill(0)];
  iterations.forEach((found, i) => {
    const there = reached[i].slice();
    const taken = accepted[i].slice();
    for (let depth = 1; depth <= deepest[i]; depth++) there[depth]++;
    for (let depth = 1; depth < (found.path ?? [0]).length; depth++) taken[depth]++;
    reached.push(there);
    accepted.push(taken);
  });
  return { most, reached, accepted };
}

// The first iteration at which there is something to see: a guess was accepted.
function firstOfInterest() {
  const found = iterations.findIndex((iteration) => iteration.path && iteration.path.length > 1);
  return found >= 0 ? found : Math.min(1, lastIteration);
}
