// The growth of a tree, as `grow` in draft_tree.py, with what dropped or stopped each candidate, as
// trace.py tells it. A tree has lists by row; row 0 is the root.

function newTree(token) {
  return {
    tokens: [token], parents: [-1], depths: [0],
    logprobs: [0], // log p(u)
    nodes: [null], // of the recording, for rows that the draft has run
    confidence: [null], // c(u) of the rows that the draft has run
    breadth: [null], // B(u) of them
    stopped: [null], // the gate because of which the draft has not run a row
    dropped: [], // candidates that are no rows: { row, token, logprob, gate }
    passes: [], // rows of each draft pass
    isIncomplete: false, // the recording lacks candidates, so a real tree may have more rows
  };
}

function addRow(tree, parent, token, logprob, gate) {
  tree.tokens.push(token);
  tree.parents.push(parent);
  tree.depths.push(tree.depths[parent] + 1);
  tree.logprobs.push(logprob);
  tree.stopped.push(gate);
  for (const name of ["nodes", "confidence", "breadth"]) tree[name].push(null);
}

// Grow a tree of at most maxDepth levels below the token at a position of the text.
function grow(rule, recording, position, temperature, maxDepth) {
  const tree = newTree(recording.text[position]);
  const nLevels = rule.beginTree(maxDepth);
  const lastGate = nLevels === maxDepth ? "limit" : rule.gates.levels; // of the deepest rows
  if (maxDepth < 1) tree.stopped[0] = "limit";
  let frontier = [0];
  for (let depth = 0; depth < nLevels; depth++) {
    if (!frontier.length || tree.tokens.length >= rule.maxRows) break;
    const nodes = frontier.map((row) => row
      ? recording.follow(tree.nodes[tree.parents[row]], tree.tokens[row])
      : recording.roots[position]);
    const candidates = runLevel(tree, frontier, nodes, rule, recording, temperature);
    const level = { depth, candidates };
    const drops = rule.drops(level, tree);
    const stops = rule.stops(level);
    frontier = [];
    level.candidates.forEach(({ row, token, logprob }, i) => {
      const gate = drops[i] ?? (tree.tokens.length >= rule.maxRows ? rule.gates.rows : null);
      if (gate) {
        tree.dropped.push({ row, token, logprob, gate });
        return;
      }
      addRow(tree, row, token, logprob, stops[i] ?? (depth + 1 < nLevels ? null : lastGate));
      if (!stops[i]) frontier.push(tree.tokens.length - 1);
    });
  }
  // Rows that nothing stopped were left when the tree was full
  if (nLevels) for (const row of frontier) tree.stopped[row] ??= rule.gates.rows;
  checkBreadth(tree, recording, rule.maxBranches);
  return rule.finishTree(tree);
}

// Run the rows of a level, which are these nodes, and return their candidates, row by row.
function runLevel(tree, rows, nodes, rule, recording, temperature) {
  tree.passes.push(rows.length);
  return rows.flatMap((row, i) => {
    const node = nodes[i];
    const found = recording.candidatesOf(node, rule.maxBranches, temperature);
    tree.nodes[row] = node;
    tree.isIncomplete ||= !recording.nCandidates[node];
    tree.confidence[row] = Math.fround(Math.exp(found[0]?.logprob ?? -Infinity));
    tree.breadth[row] = rule.breadth(tree.confidence[row]);
    return found.map(({ token, logprob }, rank) => {
      return { row, rank, token, logprob: Math.fround(tree.logprobs[row] + logprob) };
    });
  });
}

// A row may have all candidates that are recorded below it, but fewer than the rule asked for. The
// next one might have become a row, too.
function checkBreadth(tree, recording, k) {
  const nBelow = new Map();
  for (const row of tree.parents.slice(1)) nBelow.set(row, (nBelow.get(row) ?? 0) + 1);
  for (const [row, n] of nBelow) {
    const nRecorded = recording.nCandidates[tree.nodes[row]];
    if (nRecorded <= n && n < k) tree.isIncomplete = true;
  }
}

// The tree of these rows. The others become candidates that a gate dropped.
function selectRows(tree, rows, gate) {
  const renamed = new Map(rows.map((row, i) => [row, i]));
  const found = { ...tree };
  const columns = ["tokens", "depths", "logprobs", "nodes", "confidence", "breadth", "stopped"];
  for (const name of columns) found[name] = rows.map((row) => tree[name][row]);
  found.parents = rows.map((row) => renamed.get(tree.parents[row]) ?? -1);
  const others = tree.tokens.map((token, row) => {
    return { row: tree.parents[row], token, logprob: tree.logprobs[row], gate, own: row };
  });
  found.dropped = [...tree.dropped, ...others.filter(({ own }) => !renamed.has(own))]
    .filter(({ row }) => renamed.has(row))
    .map(({ row, token, logprob, gate: name }) => {
      return { row: renamed.get(row), token, logprob, gate: name };
    });
  return found;
}
