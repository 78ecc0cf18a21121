// The numbers of the current setting and of the kept one, and the gates that ended accepted paths.

const NUMBERS = [ // name, format of the totals and the costs
  ["tokens / iteration", ({ nTokens, iterations }) => (nTokens / iterations).toFixed(2)],
  ["iterations", ({ iterations }) => iterations],
  ["rows / iteration", ({ nRows, iterations }) => (nRows / iterations).toFixed(1)],
  ["draft passes / iteration", ({ nPasses, iterations }) => (nPasses / iterations).toFixed(2)],
  ["cost / iteration", (_, { cost }) => cost.toFixed(2)],
  ["× ar, computed", (_, { speedup }) => speedup.toFixed(2)],
];

function drawResult(sides) {
  const found = sides.map(({ replay: { totals } }) => [totals, costOf(totals, state.prices)]);
  const names = sides.map(({ setting: { method } }, i) =>
    html("th", { scope: "col", class: SIDES[i] }, LABELS[method] ?? method));
  const rows = NUMBERS.map(([name, format]) => html("tr", {}, html("th", { scope: "row" }, name),
    ...found.map((each, i) => html("td", { class: SIDES[i] }, String(format(...each))))));
  byId("result").replaceChildren(html("table", {}, html("tr", {}, html("th"), ...names), ...rows));
  const [totals, { fixed, rows: ofRows, draft, speedup }] = found[0];
  const tokens = (totals.nTokens / totals.iterations).toFixed(2);
  const parts = [fixed, ofRows, draft].map((part) => part.toFixed(2));
  byId("formula").replaceChildren(`${tokens} / (${parts[0]} + `,
    html("span", { class: "bonus" }, `rows ${parts[1]}`), " + ",
    html("span", { class: "of-draft" }, `draft ${parts[2]}`), `) = ${speedup.toFixed(2)}`);
  const kept = sides[1]?.setting;
  byId("kept").textContent = kept ? wordsOf(kept) : "c keeps this setting beside the next ones";
  byId("kept").title = byId("kept").textContent; // which may be cut
  drawMisses(sides);
}

// Say how many trees the recording lacks candidates of.
function drawMisses(sides) {
  const counts = sides.map(({ replay: { totals } }) => [totals.nIncomplete, totals.iterations]);
  const found = counts.filter(([n]) => n).map(([n, all]) => `${n} of ${all} trees`);
  byId("misses").hidden = !found.length;
  byId("misses").textContent = `${found.join(" and ")} may be incomplete, because the recording ` +
    "lacks candidates of theirs. Their blocks are dotted.";
}

// By gate, the iterations whose next token it kept out of the tree, the most frequent gate first.
function endsOf({ iterations }) {
  const found = new Map();
  for (const { start, missed: { gate } } of iterations) {
    if (Object.hasOwn(GATES, gate)) found.set(gate, [...(found.get(gate) ?? []), start]);
  }
  return [...found].sort((a, b) => b[1].length - a[1].length);
}

function drawEnds({ replay: found }) {
  const ends = endsOf(found);
  const most = ends[0]?.[1].length;
  byId("ends").replaceChildren(...ends.map(([gate, starts]) => {
    const bar = html("i", {});
    bar.style.width = `${(100 * starts.length) / most}%`;
    const button = html("button", { type: "button", title: "Show the next such iteration" },
      html("code", {}, gate), html("span", { class: "well" }, bar), String(starts.length));
    const next = () => starts.find((start) => start > state.position) ?? starts[0];
    button.addEventListener("click", () => go(next()));
    return button;
  }));
  const n = found.iterations.length;
  const [where, advice] = GATES[ends[0]?.[0]] ?? [];
  byId("advice").textContent = where
    ? `Most often (${most} of ${n}) the next token was ${where}. ${advice}` : "";
}
