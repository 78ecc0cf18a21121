// The rules of the five methods, as draft_tree.py, methods/static.py and methods/dyspec.py have
// them. Path probabilities are float32 logarithms, as there, so that equal numbers decide.
//
// `drops` and `stops` return, for each candidate of a level, the gate that it does not pass to
// become a row or to get candidates of its own, or null. gates: the names of what limits the levels
// and the rows of a tree, and of what limits the children of a row (as trace.py has them).

function logThreshold(probability) {
  return probability > 0 ? Math.fround(Math.log(probability)) : -Infinity;
}

class Rule {
  constructor(maxBranches, maxDepth, maxRows, gates) {
    Object.assign(this, { maxBranches, maxDepth, maxRows, gates });
  }
  beginTree(maxDepth) { return Math.min(maxDepth, this.maxDepth); }
  breadth() { return this.maxBranches; }
  drops({ candidates }) { return candidates.map(() => null); }
  stops({ candidates }) { return candidates.map(() => null); }
  finishTree(tree) { return tree; }
  adapt() {}
  state() { return {}; }
}

class StaticRule extends Rule {
  constructor(breadth, depth, maxRows, tau, gates) {
    super(breadth, depth, maxRows, { children: "width", ...gates });
    this.minToAdd = logThreshold(tau);
  }
  drops({ candidates }) {
    return candidates.map(({ logprob }) => (logprob >= this.minToAdd ? null : "tau"));
  }
}

class DynaTreeRule extends Rule {
  constructor(settings) {
    const { adapt_breadth: isAdaptive, B_max, B_mid, D_max, N_max } = settings;
    const gates = { children: "confidence", levels: "D_max", rows: "N_max" };
    super(isAdaptive ? B_max : B_mid, D_max, N_max, gates);
    this.initial = this.current = settings;
    this.ratios = []; // accepted candidates / depth of the tree, for the last W trees
  }
  breadth(confidence) {
    const { adapt_breadth: isAdaptive, tau_h, tau_l, B_min, B_mid, B_max } = this.current;
    if (!isAdaptive) return B_mid;
    if (confidence >= tau_h) return B_min;
    return confidence < tau_l ? B_max : B_mid;
  }
  drops({ candidates }, tree) {
    const tau = logThreshold(this.current.tau);
    return candidates.map(({ row, rank, logprob }) => {
      if (rank >= tree.breadth[row]) return "confidence";
      return logprob >= tau ? null : "tau";
    });
  }
  stops({ depth, candidates }) {
    const isBase = depth + 1 < this.current.D0;
    if (!this.current.adapt_depth) return candidates.map(() => (isBase ? null : "D0"));
    const name = isBase ? "rho_stop" : "rho_deep";
    const threshold = logThreshold(this.current[name]);
    return candidates.map(({ logprob }) => (logprob >= threshold ? null : name));
  }
  adapt(tree, path) {
    if (tree.tokens.length === 1) return;
    this.ratios.push((path.length - 1) / Math.max(...tree.depths));
    if (this.ratios.length > this.initial.W) this.ratios.shift();
    if (!this.current.history || this.ratios.length < this.initial.W) return;
    const mean = this.meanRatio();
    if (mean > data.history.good_ratio) this.moveThresholds(1);
    else if (mean < data.history.poor_ratio) this.moveThresholds(-1);
  }
  meanRatio() {
    return Math.round((sum(this.ratios) / this.ratios.length) * 1e9) / 1e9;
  }
  moveThresholds(direction) {
    const { current, initial } = this;
    const bounds = data.history;
    const step = bounds.step * direction;
    const limits = { D0: [bounds.D0_min, current.D_max - 1], ...bounds };
    const moved = (name, value) => clampWithin(value, initial[name], ...limits[name]);
    const tau_h = moved("tau_h", current.tau_h - step);
    const rho_deep = moved("rho_deep", current.rho_deep - step);
    this.current = {
      ...current,
      D0: moved("D0", current.D0 + direction),
      tau_h: tau_h > current.tau_l ? tau_h : current.tau_h,
      rho_deep: rho_deep > current.rho_stop ? rho_deep : current.rho_deep,
    };
  }
  state() {
    const { D0, tau_h, rho_deep } = this.current;
    return { D0, tau_h, rho_deep };
  }
}

// The value within a range that is widened to contain the initial value.
function clampWithin(value, initial, low, high) {
  return clamp(value, Math.min(low, initial), Math.max(high, initial));
}

// The N nodes with the highest p(u), grown by levels.
class DySpecRule extends Rule {
  constructor({ N, D_max }) {
    const maxRows = N > 1 ? 1 + (N - 1) * D_max : 1; // of all levels together
    super(Math.max(N - 1, 1), D_max, maxRows, { children: "N", levels: "D_max", rows: "N" });
    this.N = N;
  }
  beginTree(maxDepth) {
    this.best = []; // log p(u) of the N - 1 best so far
    return super.beginTree(maxDepth);
  }
  drops({ candidates }) {
    const n = this.N - 1;
    const all = this.best.map((logprob) => ({ logprob, i: -1 }));
    all.push(...candidates.map(({ logprob }, i) => ({ logprob, i })));
    const best = all.sort((a, b) => b.logprob - a.logprob).slice(0, n); // equal ones keep order
    const added = new Set(best.map(({ i }) => i));
    this.best = best.map(({ logprob }) => logprob);
    this.minToExpand = best.length === n ? this.best[n - 1] : -Infinity;
    return candidates.map((_, i) => (added.has(i) ? null : "N"));
  }
  stops({ candidates }) {
    return candidates.map(({ logprob }) => (logprob >= this.minToExpand ? null : "N"));
  }
  finishTree(tree) {
    const rows = tree.tokens.map((_, row) => row);
    const best = rows.sort((a, b) => tree.logprobs[b] - tree.logprobs[a]).slice(0, this.N);
    return selectRows(tree, best.sort((a, b) => a - b), "N");
  }
}

const RULES = {
  ar: () => new Rule(0, 0, 1, {}),
  linear: ({ K }) => new StaticRule(1, K, K + 1, 0, { levels: "K", rows: "rows" }),
  fixed: ({ B, D, tau, N_max }) =>
    new StaticRule(B, D, N_max, tau, { levels: "D", rows: "N_max" }),
  dynatree: (settings) => new DynaTreeRule(settings),
  dyspec: (settings) => new DySpecRule(settings),
};
