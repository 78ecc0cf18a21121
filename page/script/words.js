// An iteration in a sentence, step by step: the caption, which is also read aloud.

function captionOf(view, stage) {
  const { iteration } = view;
  if (!view.tree) return promptCaption(view);
  const tell = CAPTIONS[stage.kind];
  return tell(view, stage, iteration);
}

// Tokens one after another, as they stand in the text.
function quoted(ids) {
  return `“${ids.map((id) => visible(word(id))).join("")}”`;
}

function promptCaption({ iteration }) {
  const n = data.prompt.tokens.length;
  const first = quoted(iteration.tokens);
  const time = milliseconds(iteration.ms[1]);
  const reading = `The target reads the prompt, ${counted(n, "token")}, in ${time}`;
  return `${reading}; its first token is ${first}, the root of the first tree.`;
}

const CAPTIONS = {
  whole: tellWhole,
  draft: tellDraft,
  mask: tellMask,
  verify: tellVerify,
  accept: tellAccept,
  commit: tellCommit,
  adapt: tellAdapt,
};

function tellWhole(view, stage, iteration) {
  const added = quoted(iteration.tokens);
  const time = milliseconds(sum(iteration.ms));
  if (view.tree.tokens.length === 1) {
    return `No guess to check: one pass of the target writes ${added}, ${time}.`;
  }
  const nRetrieved = view.isRetrieved.size;
  const nDrafted = view.tree.tokens.length - 1 - nRetrieved;
  const guesses = [];
  if (nDrafted || !nRetrieved) guesses.push(`${nDrafted} drafted`);
  if (nRetrieved) guesses.push(`${nRetrieved} retrieved`);
  const nAccepted = iteration.path.length - 1;
  const made = `${guesses.join(" and ")}, ${nAccepted} accepted`;
  return `${made}: one pass of the target writes ${added}, ${time}.`;
}

function tellDraft(view, stage, iteration) {
  if (stage.isNothing) return "Nothing is drafted: the tree is its root, the pending token.";
  if (stage.isMemory) {
    const n = counted(view.isRetrieved.size, "node");
    return `${n} from memory, without a pass of the draft; the probability of each is an estimate.`;
  }
  const added = view.depths.filter(
    (depth, row) => depth === stage.pass + 1 && !view.isRetrieved.has(row),
  ).length;
  const dropped = view.tree.dropped.filter(([row]) => view.depths[row] === stage.pass).length;
  const nRows = iteration.draft_rows[stage.pass];
  let read = `the draft reads ${counted(nRows, "row")} at once`;
  if (stage.pass === 0) {
    const lacking = nRows > 1 ? `${counted(nRows - 1, "token")} it has not read yet, and ` : "";
    read = `the draft reads ${lacking}the root`;
  }
  const isAll = view.tree.n_dropped === view.tree.dropped.length;
  const candidates = `${counted(added, "guess", "guesses")} kept, ${dropped}${isAll ? "" : " or more"} dropped`;
  return `Pass ${stage.pass + 1} of ${stage.passes}: ${read}; ${candidates}.`;
}

function tellMask(view) {
  const rows = counted(view.tree.tokens.length, "row");
  const positions = counted(view.depth + 1, "position");
  return `${rows} at ${positions}: each sees the text and its own ancestors, and stands at its depth.`;
}

function tellVerify(view, stage, iteration) {
  const rows = counted(view.tree.tokens.length, "row");
  const which = isSampled ? "likeliest token" : "next token";
  const time = milliseconds(iteration.ms[1]);
  return `One pass of the target over ${rows}, ${time}: its ${which} after every node.`;
}

function tellAccept(view, stage, iteration) {
  const how = isSampled
    ? "From the root, children are tried by a coin, so that the text is distributed as the target’s own"
    : "From the root, follow the child that the target itself would write";
  const { path } = iteration;
  const rows = path.length > 1 ? `rows ${path.join(", ")}` : "the root alone";
  return `${how}: ${rows}. ${quoted([iteration.bonus])} is the bonus.`;
}

function tellCommit(view, stage, iteration) {
  const nPath = iteration.path.length;
  const moved = iteration.path.filter((row, i) => row !== i).length;
  const what = moved ? `${counted(moved, "row")} moved, the rest forgotten` : "nothing moves";
  const drop = droppedBy(view);
  const window = drop > 0 ? ` The window then drops ${drop} old tokens.` : "";
  return `The accepted rows stay in slots ${view.n} to ${view.n + nPath - 1}: ${what}.${window}`;
}

function tellAdapt(view) {
  const next = view.index < lastIteration ? iterations[view.index + 1].state : null;
  const names = Object.keys(view.state);
  if (!names.length) return `${data.settings.method} keeps to its settings; no history moves them.`;
  if (!next) return "The text ends here.";
  const moved = names.filter((name) => view.state[name] !== next[name]);
  if (!moved.length) return "Nothing has moved for the next tree.";
  const changes = moved.map((name) => `${name} ${plain(view.state[name])} → ${plain(next[name])}`);
  return `For the next tree: ${changes.join(", ")}.`;
}
