// Questions for a reader: each chooses two settings and prices, and says what to look at.

const QUESTIONS = [
  {
    ask: "How sure should the draft be?",
    now: "dynatree", kept: "dynatree T=1", prices: "embedded pair, measured",
    look: "The thresholds are equal, but the draft’s probabilities are not. Compare p(u) along " +
      "the accepted paths. Then drag T.",
  },
  {
    ask: "Does a tree beat a chain?",
    now: "dynatree", kept: "linear K=3", prices: "rows are free, a draft pass is 1/5",
    look: "Find an iteration in which the chain’s first token is wrong and the tree has the " +
      "right one. Then raise R: from where on is the chain faster?",
  },
  {
    ask: "What do lower thresholds buy?",
    now: "dynatree tau=0.02 rho_stop=0.03 rho_deep=0.1", kept: "dynatree",
    prices: "target read from disk",
    look: "Compare tokens, rows and draft passes. Then choose other prices: where do the larger " +
      "trees pay?",
  },
  {
    ask: "What does history move?",
    now: "dynatree tau=0.02 D0=2 rho_stop=0.02 rho_deep=0.7 T=0.7",
    kept: "dynatree tau=0.02 D0=2 rho_stop=0.02 rho_deep=0.7 history=off T=0.7",
    prices: "embedded pair, measured",
    look: "Go through the iterations, and watch D0 above the trees. Then drag W: when does it " +
      "begin to move?",
  },
  {
    ask: "Are the likeliest nodes the best ones?",
    now: "dynatree", kept: "dyspec N=12", prices: "embedded pair, measured",
    look: "The trees have about as many rows. Compare tokens and draft passes. Then drag D to " +
      "the left: from where on is DySpec faster?",
  },
];

function buildQuestions() {
  const parts = QUESTIONS.map(({ ask, now, kept, prices, look }) => {
    const button = html("button", { type: "button" }, html("b", {}, ask), ` ${look}`);
    button.addEventListener("click", () => {
      Object.assign(state, { now: parseWords(now), kept: parseWords(kept) });
      state.prices = pricesOf(prices);
      byId("look").replaceChildren(html("b", {}, ask), ` ${look}`);
      byId("questions").open = false;
      update();
    });
    return button;
  });
  byId("questions").lastElementChild.append(...parts);
}
