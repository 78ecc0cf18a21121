// The numbers of what is pointed at: a node, a dropped candidate, or the iteration as a whole.

function drawDetails(view, target) {
  const place = byId("details");
  const title = byId("details-title");
  if (view.tree && target?.row !== undefined && target.row !== null) {
    title.replaceChildren("Node ", html("code", {}, visible(word(view.tree.tokens[target.row]))));
    place.replaceChildren(...nodeDetails(view, target.row));
  } else if (view.tree && target?.dropped !== undefined) {
    title.textContent = "Dropped";
    place.replaceChildren(...droppedDetails(view, target.dropped));
  } else {
    title.textContent = "Iteration";
    place.replaceChildren(...iterationDetails(view));
  }
}

const CHOICE = isSampled ? "The target’s likeliest here: " : "The target’s choice here: ";

function list(pairs) {
  const parts = [];
  for (const [name, value] of pairs) {
    if (value !== null) parts.push(html("div", {}, html("dt", {}, name), html("dd", {}, value)));
  }
  return html("dl", {}, ...parts);
}

function token(id) {
  return html("code", {}, visible(word(id)));
}

function gateSentence(view, name, verb) {
  const { value, meaning } = gateOf(view, name);
  const setting = value === "" ? name : `${name} = ${value}`;
  return html("p", { class: "gate" }, `${verb} `, html("b", {}, setting), `: ${meaning}.`);
}

function nodeDetails(view, row) {
  const { tree: found } = view;
  const depth = view.depths[row];
  const target = html("span", {}, token(found.target[row]), ` ${whereIs(view, row)}`);
  const slot = found.slots[row] < 0 ? "not run" : `draft ${view.n + found.slots[row]}`;
  const parts = [
    list([
      ["p(u)", probability(found.p[row]) + (isEstimated(view, row) ? ", estimated" : "")],
      ["c(u)", found.slots[row] < 0 ? "– not run" : probability(found.confidence[row])],
      ["B(u)", found.breadth[row] === null ? "–" : String(found.breadth[row])],
      ["row, depth", `${row}, ${depth}`],
      ["position", `n+${depth} = ${view.n + depth}`],
      ["slots", `target ${view.n + row}, ${slot}`],
    ]),
    html("p", { class: "choice" }, CHOICE, target),
    html("p", { class: "fate" }, fateOf(view, row)),
  ];
  if (found.stopped[row]) parts.push(gateSentence(view, found.stopped[row], "Not expanded,"));
  parts.push(...droppedBelow(view, row));
  return parts;
}

// The chance of acceptance is, as auto counts it and as memory guesses it.
function isEstimated(view, row) {
  return row > 0 && (view.isRetrieved.has(row) || data.settings.method === "auto");
}

function whereIs(view, row) {
  const { tokens, target } = view.tree;
  const child = view.children[row].find((candidate) => tokens[candidate] === target[row]);
  if (child !== undefined) return `= row ${child}`;
  const isDropped = view.dropped[row].some((i) => view.tree.dropped[i][1] === target[row]);
  return isDropped ? "(dropped)" : view.children[row].length ? "(not among its children)" : "";
}

function fateOf(view, row) {
  const source = view.isRetrieved.has(row) ? "Retrieved" : "Drafted";
  if (row === 0) return "The root: the pending token, the target’s own.";
  if (view.isAccepted.has(row)) return `${source} and accepted.`;
  const isReached = view.isAccepted.has(view.tree.parents[row]);
  return `${source}; not accepted${isReached ? "." : ", as a node above it is not."}`;
}

function droppedBelow(view, row) {
  if (!view.dropped[row].length) return [];
  const entries = view.dropped[row].map((i) => {
    const [, id, p, gate] = view.tree.dropped[i];
    const { value } = gateOf(view, gate);
    const setting = value === "" ? gate : `${gate} = ${value}`;
    return html("li", {}, token(id), ` ${probability(p)} `, html("b", {}, setting));
  });
  const gates = new Set(view.dropped[row].map((i) => view.tree.dropped[i][3]));
  const why = [...gates].map((gate) => `${gate}: ${gateOf(view, gate).meaning}`).join("; ");
  return [
    html("h3", {}, "Dropped below it"),
    html("ul", { class: "dropped" }, ...entries),
    html("p", { class: "gate" }, `${why}.`),
  ];
}

function droppedDetails(view, index) {
  const [row, id, p, gate] = view.tree.dropped[index];
  const where = html("span", {}, token(view.tree.tokens[row]), ` (row ${row})`);
  return [
    list([["candidate", token(id)], ["p", probability(p)], ["below", where]]),
    gateSentence(view, gate, "Dropped by"),
  ];
}

function iterationDetails(view) {
  const { iteration } = view;
  const [draft, verify, other] = iteration.ms.map(milliseconds);
  const times = [["draft", draft], ["verify", verify], ["other", other]];
  const held = `target ${iteration.cached[0]}${iteration.cached[1] ? `, draft ${iteration.cached[1]}` : ""}`;
  if (!view.tree) return [list([...times, ["cached then", held]])];
  const n = view.tree.tokens.length - 1;
  const nRetrieved = view.isRetrieved.size;
  return [
    list([
      ["drafted", String(n - nRetrieved)],
      ["retrieved", String(nRetrieved)],
      ["accepted", String(iteration.path.length - 1)],
      ...times,
      ["draft passes", iteration.draft_rows.length ? `rows ${iteration.draft_rows.join(" + ")}` : "none"],
      ["cached then", held],
    ]),
    ...cutNote(iteration),
    ...droppedCounts(view),
    html("p", { class: "hint" }, "Point at a node for its numbers; a click keeps them."),
  ];
}

function cutNote(iteration) {
  const n = iteration.path.length - iteration.tokens.length;
  if (n <= 0) return [];
  const what = `The text ends: ${counted(n, "token")} of the path and bonus cut off.`;
  return [html("p", { class: "gate" }, what)];
}

function droppedCounts(view) {
  const { dropped, n_dropped: n } = view.tree;
  if (!n) return [];
  const counts = {};
  for (const [, , , gate] of dropped) counts[gate] = (counts[gate] ?? 0) + 1;
  const gates = Object.keys(counts).map((gate) => `${gate} ${counts[gate]}`);
  const listed = n > dropped.length ? ` of the likeliest ${dropped.length}` : "";
  const what = `${counted(n, "candidate")} dropped;${listed} by `;
  return [html("p", { class: "gate" }, what, html("b", {}, gates.join(", ")), ".")];
}

function readAloud(view, row) {
  const { tree: found } = view;
  const parts = [
    `row ${row}, ${visible(word(found.tokens[row]))}, p ${probability(found.p[row])}`,
    fateOf(view, row),
    `the target says ${visible(word(found.target[row]))}`,
  ];
  if (found.stopped[row]) parts.push(`not expanded, ${found.stopped[row]}`);
  return parts.join("; ");
}
