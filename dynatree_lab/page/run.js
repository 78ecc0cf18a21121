// The data of the run, and the view of one iteration that all panels share. Decisions of a rule are
// read from the data (docs/page.md) and never computed again; only counts are computed here.
//
// A stage is what the page shows of an iteration: a draft pass, one of the other steps, or the whole
// iteration. No panel shows what a later step decides.

const { iterations, settings } = data;
const lastIteration = iterations.length - 1;
const isSampled = Boolean(settings.sampling?.temperature);
// null: greedy; walk: sampled, and nothing was drawn from the draft; own: the user's; else by trials
const { acceptance } = settings;
const hasTrials = ["token", "traversal"].includes(acceptance);
const ruleSettings = { ...data.base?.settings, ...settings }; // graft mostly uses its base
const DEPTH_RATIO_BOUNDS = { low: 0.6, high: 0.8 }; // between them, history changes no threshold

const STEPS = ["draft", "mask", "verify", "accept", "commit", "adapt"]; // the steps of the README

function depthsOf(parents) {
  const depths = [0];
  for (let row = 1; row < parents.length; row++) depths.push(depths[parents[row]] + 1);
  return depths;
}

// The view of one iteration: its tree by row, the cached tokens before it (n, nDraft), its stages.
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
  view.trials = new Map(); // row -> trial; empty without drawn candidates
  for (const [row, p, uniform, remaining] of iteration.trials) {
    view.trials.set(row, { p, uniform, remaining });
  }
  view.stages.push(...stagesOf(iteration));
  return view;
}

// The six steps, with one stage per draft pass.
function stagesOf(iteration) {
  const stages = iteration.draft_rows.map((_, pass) => ({ kind: "draft", pass }));
  if (iteration.tree.retrieved.length) stages.push({ kind: "draft", isRetrieval: true });
  if (!stages.length) stages.push({ kind: "draft", isNothing: true });
  for (const kind of STEPS.slice(1)) stages.push({ kind });
  return stages;
}

// Whether the step of this kind is shown or already done.
function hasReached(stage, kind) {
  return stage.kind === "whole" || STEPS.indexOf(stage.kind) >= STEPS.indexOf(kind);
}

// Whether a row is in the tree by this stage. Draft pass 0 runs the root, which gives depth 1.
function isRowShown(view, stage, row) {
  if (row === 0 || hasReached(stage, "mask") || stage.isRetrieval) return true;
  return !view.isRetrieved.has(row) && view.depths[row] <= stage.pass + 1;
}

// Number of draft cache slots, from the root's on, that are written by this stage.
function nDraftSlots({ iteration }, stage) {
  const [first, ...rest] = iteration.draft_rows;
  if (first === undefined) return 0;
  const isDrafting = stage.pass !== undefined;
  return 1 + sum(isDrafting ? rest.slice(0, stage.pass) : rest);
}

function isRunByDraft(view, stage, row) {
  const slot = view.tree.slots[row];
  return slot >= 0 && slot < nDraftSlots(view, stage);
}

// Number of tokens that the window dropped from the target model's cache.
function nDroppedByWindow({ n, iteration }) {
  return settings.window ? n + iteration.path.length - iteration.cached[0] : 0;
}

// The origin of each token of an iteration: drafted and retrieved rows, then the bonus token.
function originsOf(iteration) {
  const retrieved = iteration.tree?.retrieved ?? [];
  const path = iteration.path ?? [0];
  return iteration.tokens.map((_, i) => {
    if (i + 1 >= path.length) return "bonus";
    return retrieved.includes(path[i + 1]) ? "retrieved" : "drafted";
  });
}

// The first iteration with an accepted candidate; the page opens there.
function firstWithAccepted() {
  const found = iterations.findIndex((iteration) => iteration.path?.length > 1);
  return found >= 0 ? found : Math.min(1, lastIteration);
}
