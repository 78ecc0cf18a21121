// The run as data, and the view of one iteration that all panels share. What is counted here is
// counted of the data; what a rule decided is read from it (docs/page.md), never worked out again.
//
// A stage is what is shown of an iteration: one of its steps, the draft's pass by pass, or the whole
// of it. No panel shows what a later step decides.

const data = JSON.parse(byId("data").textContent);
const { iterations, settings } = data;
const lastIteration = iterations.length - 1;
const isSampled = Boolean(settings.sampling?.temperature);
const ofRule = { ...data.base?.settings, ...settings }; // graft's trees are mostly its base's
const REACH = { careful: 0.6, bolder: 0.8 }; // between them history moves nothing

const STEPS = ["draft", "mask", "verify", "accept", "commit", "adapt"]; // as in the README

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
  view.trials = new Map(); // by row, of sampled text
  for (const [row, chance, coin, left] of iteration.tried ?? []) {
    view.trials.set(row, { chance, coin, left });
  }
  view.stages.push(...stagesOf(iteration));
  return view;
}

// The six steps of the README, the draft pass by pass.
function stagesOf(iteration) {
  const stages = iteration.draft_rows.map((_, pass) => ({ kind: "draft", pass }));
  if (iteration.tree.retrieved.length) stages.push({ kind: "draft", isMemory: true });
  if (!stages.length) stages.push({ kind: "draft", isNothing: true });
  for (const kind of STEPS.slice(1)) stages.push({ kind });
  return stages;
}

// How far an iteration has come: whether the step of this kind is done, or being shown.
function isAt(stage, kind) {
  return stage.kind === "whole" || STEPS.indexOf(stage.kind) >= STEPS.indexOf(kind);
}

// Whether a row is there already: the draft's pass 0 runs the root and gives depth 1.
function isThere(view, stage, row) {
  if (row === 0 || isAt(stage, "mask") || stage.isMemory) return true;
  return !view.isRetrieved.has(row) && view.depths[row] <= stage.pass + 1;
}

// How many of the draft's slots, from the root's on, it has written by then.
function nRun({ iteration }, stage) {
  const [first, ...rest] = iteration.draft_rows;
  if (first === undefined) return 0;
  const isDrafting = stage.pass !== undefined;
  return 1 + sum(isDrafting ? rest.slice(0, stage.pass) : rest);
}

function isRun(view, stage, row) {
  const slot = view.tree.slots[row];
  return slot >= 0 && slot < nRun(view, stage);
}

// How many tokens a window dropped from the target's cache.
function droppedBy({ n, iteration }) {
  return settings.window ? n + iteration.path.length - iteration.cached[0] : 0;
}

// Where the tokens of an iteration came from: the accepted rows, then the target.
function originsOf(iteration) {
  const retrieved = iteration.tree?.retrieved ?? [];
  const path = iteration.path ?? [0];
  return iteration.tokens.map((_, i) => {
    if (i + 1 >= path.length) return "bonus";
    return retrieved.includes(path[i + 1]) ? "retrieved" : "drafted";
  });
}

// The first iteration at which there is something to see: a guess was accepted.
function firstOfInterest() {
  const found = iterations.findIndex((iteration) => iteration.path?.length > 1);
  return found >= 0 ? found : Math.min(1, lastIteration);
}
