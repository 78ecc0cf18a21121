// The replay of the whole text, as the loop of dynatree.py: grow a tree, accept the path that the
// text takes through it, go on after the bonus token.

function replay(recording, { method, settings, temperature }) {
  const { text } = recording;
  const rule = RULES[method](settings);
  const iterations = [];
  let nUncached = recording.nPrompt + 1; // tokens that the draft's next first pass runs
  for (let start = 0; start < text.length - 1;) {
    const state = rule.state();
    // The bonus token needs room, too
    const tree = grow(rule, recording, start, temperature, text.length - start - 2);
    const path = acceptedPath(tree, text.slice(start + 1));
    const nRun = path.filter((row) => tree.nodes[row] !== null).length;
    if (nRun) {
      tree.passes[0] = nUncached;
      nUncached = 1; // the root of the next tree
    }
    nUncached += path.length - nRun;
    const missed = missedToken(recording, rule, tree, path, text[start + path.length]);
    iterations.push({ start, tree, path, state, missed });
    rule.adapt(tree, path);
    start += path.length;
  }
  return { iterations, totals: totalsOf(iterations) };
}

// The rows that the text goes through. text: the tokens after the root.
function acceptedPath({ tokens, parents }, text) {
  const path = [0];
  for (let row = 1; row < tokens.length; row++) {
    if (parents[row] === path.at(-1) && tokens[row] === text[path.length - 1]) path.push(row);
  }
  return path;
}

// The bonus token, and the gate that kept it out of the tree. It is null if the method drafts
// nothing, and "unlikely" if the draft nearly excludes the token, so that it is not recorded.
function missedToken(recording, rule, tree, path, token) {
  const leaf = path.at(-1);
  const node = tree.nodes[leaf];
  if (node === null) return { token, gate: tree.stopped[leaf], isExpanded: false };
  const found = tree.dropped.find((each) => each.row === leaf && each.token === token);
  const rank = recording.rankOf(node, token);
  const gate = found?.gate ?? (rank < 0 ? "unlikely" : rule.gates.children);
  return { token, gate, isExpanded: true, rank, logprob: found?.logprob };
}

function totalsOf(iterations) {
  const total = (count) => sum(iterations.map(count));
  const n = iterations.length;
  return {
    iterations: n,
    nTokens: total(({ path }) => path.length),
    nRows: total(({ tree }) => tree.tokens.length),
    nPasses: total(({ tree }) => tree.passes.length),
    nIncomplete: total(({ tree }) => Number(tree.isIncomplete)),
  };
}

// The computed cost of an iteration, in iterations of ar, and the speed that follows (as x_ar in
// replay/prices.py). An iteration of ar has one row, so the other price is 1 - row.
function costOf({ iterations, nTokens, nRows, nPasses }, { row, draftPass }) {
  const parts = { fixed: 1 - row, rows: (row * nRows) / iterations };
  parts.draft = (draftPass * nPasses) / iterations;
  const cost = parts.fixed + parts.rows + parts.draft;
  return { ...parts, cost, speedup: nTokens / iterations / cost };
}
