// The recorded candidates of the draft along the text, as CandidateTree and RecordedDraft have them
// in dynatree_lab/replay/candidates.py. A node's number is its place in the columns by node.

const MISSING = -1; // in place of a node that is not recorded

function bytesOf(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

// Little-endian integers of n bytes each.
function integersOf(text, n) {
  const bytes = bytesOf(text);
  const valueAt = (i) => {
    let value = 0;
    for (let at = n * i + n - 1; at >= n * i; at--) value = 256 * value + bytes[at];
    return value;
  };
  return Array.from({ length: bytes.length / n }, (_, i) => valueAt(i));
}

function floatsOf(text) {
  const view = new DataView(bytesOf(text).buffer);
  return Array.from({ length: view.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

// The sum of the counts before each of them.
function startsOf(counts) {
  let total = 0;
  return counts.map((count) => (total += count) - count);
}

class Recording {
  constructor({ text, prompt, candidates }) {
    this.text = text;
    this.nPrompt = prompt.n_tokens;
    this.temperatures = candidates.temperatures;
    this.others = this.temperatures.filter((temperature) => temperature !== 1); // have log-sums
    this.nChildren = integersOf(candidates.n_children, 1);
    this.nCandidates = integersOf(candidates.n_candidates, 1);
    this.tokens = integersOf(candidates.tokens, candidates.token_bytes);
    this.logprobs = floatsOf(candidates.logprobs);
    this.logSums = integersOf(candidates.log_sums, 3).map((sum) => -sum / candidates.sum_scale);
    this.firstCandidate = startsOf(this.nCandidates);
    this.runIndex = startsOf(this.nCandidates.map((n) => Number(n > 0)));
    this.roots = startsOf(candidates.tree_sizes); // of the tree below each token of the text
    const treeOf = candidates.tree_sizes.flatMap((size, tree) => Array(size).fill(tree));
    // A tree's children follow its root in the order of their parents
    this.firstChild = startsOf(this.nChildren).map((start, node) => 1 + start + treeOf[node]);
    this.nextRoots = new Map(); // of the child of a root that is the next root
    this.roots.slice(0, -1).forEach((root, i) => {
      const child = this.childOf(root, text[i + 1]);
      if (child !== MISSING) this.nextRoots.set(child, this.roots[i + 1]);
    });
  }

  childOf(node, token) {
    const rank = this.rankOf(node, token);
    return rank >= 0 && rank < this.nChildren[node] ? this.firstChild[node] + rank : MISSING;
  }

  // The node of a token below a node, or MISSING if nothing is recorded below it.
  follow(node, token) {
    const child = this.childOf(node, token);
    const found = this.nextRoots.get(child) ?? child;
    return this.nCandidates[found] ? found : MISSING;
  }

  // The place of a token among a node's candidates, or -1.
  rankOf(node, token) {
    const first = this.firstCandidate[node];
    return this.tokens.slice(first, first + this.nCandidates[node]).indexOf(token);
  }

  // The k likeliest candidates below a node, or as many as are recorded, with their
  // log-probabilities at a temperature of the draft. nan, from an overflow, is no candidate's.
  candidatesOf(node, k, temperature) {
    const n = Math.min(this.nCandidates[node] ?? 0, k);
    const first = this.firstCandidate[node];
    const other = this.others.indexOf(temperature);
    const sum = other < 0 ? 0 : this.logSums[this.runIndex[node] * this.others.length + other];
    const found = Array.from({ length: n }, (_, rank) => {
      const logprob = Math.fround(this.logprobs[first + rank] / temperature - sum);
      return { token: this.tokens[first + rank], logprob: Math.min(logprob, 0) };
    });
    return found.filter(({ logprob }) => logprob > -Infinity);
  }
}
