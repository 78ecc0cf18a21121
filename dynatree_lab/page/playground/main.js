// The state of the page, what is drawn after each change, the keys and the address. The address has
// both settings, the prices and the place in the text, so that a link can point to them.

const START = "dynatree";
const SIDES = ["now", "kept"]; // the current setting, and the kept one to compare with
const state = { now: null, kept: null, prices: null, position: 0 }; // position: in the text
const latest = new Map(); // method -> its latest setting
const replays = new Map(); // words -> replay
const MAX_REPLAYS = 500;
let isPlanned = false;
let savedHash = "";
let hashTimer = null;

function replayOf(setting) {
  const words = wordsOf(setting);
  if (!replays.has(words)) {
    if (replays.size > MAX_REPLAYS) replays.clear();
    replays.set(words, replay(recording, setting));
  }
  return replays.get(words);
}

// The settings that are shown, with their replays.
function sidesOf() {
  const settings = [state.now, state.kept].filter(Boolean);
  return settings.map((setting) => ({ setting, replay: replayOf(setting) }));
}

function choose(setting) {
  state.now = setting;
  update();
}

// Draw everything with the next frame, because a drag makes many changes.
function update() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    draw();
  });
}

function draw() {
  const sides = sidesOf();
  latest.set(state.now.method, state.now);
  visit(sides[0]);
  document.body.classList.toggle("compared", sides.length > 1);
  rooms.clear();
  drawSliders();
  sides.forEach((side, i) => drawText(byId(`text-${SIDES[i]}`), side.replay));
  drawResult(sides);
  drawEnds(sides[0]);
  drawEnvelope(byId("envelope"), sides);
  byId("command-words").textContent = commandOf(state.now);
  byId("keep").textContent = state.kept ? "swap" : "compare with this";
  byId("clear").hidden = !state.kept;
  drawPlace(sides);
}

// Draw what depends on the place in the text: each setting's iteration that contains it.
function drawPlace(sides = sidesOf()) {
  sides.forEach((side, i) => {
    const index = indexOf(side.replay);
    const iteration = side.replay.iterations[index];
    frameBlock(byId(`text-${SIDES[i]}`), iteration);
    drawTree(byId(`tree-${SIDES[i]}`), iteration);
    if (!i) byId("node").textContent = describeState(side.setting, iteration);
    byId(`caption-${SIDES[i]}`).replaceChildren(html("b", {}, `Iteration ${index + 1}.`), " ",
      captionOf(side.setting, iteration));
  });
  clearTimeout(hashTimer); // browsers limit how often it may change
  hashTimer = setTimeout(writeHash, 250);
}

function indexOf({ iterations }) {
  return Math.max(iterations.findLastIndex(({ start }) => start <= state.position), 0);
}

function go(position) {
  state.position = position;
  drawPlace();
}

function goBy(step) {
  const { iterations } = replayOf(state.now);
  go(iterations[clamp(indexOf({ iterations }) + step, 0, iterations.length - 1)].start);
}

function keepOrSwap() {
  [state.now, state.kept] = [state.kept ?? state.now, state.now];
  update();
}

function endComparison() {
  state.kept = null;
  update();
}

function explain({ target }) {
  const node = target.closest?.(".node");
  if (!node) return;
  const i = node.closest("#tree-kept") ? 1 : 0;
  const { setting, replay: { iterations } } = sidesOf()[i];
  const iteration = iterations[indexOf({ iterations })];
  byId("node").textContent = describeNode(setting, iteration, Number(node.dataset.row));
}

function writeHash() {
  const { now, kept, prices, position } = state;
  const words = new URLSearchParams({ now: wordsOf(now) });
  if (kept) words.set("kept", wordsOf(kept));
  for (const [name, value] of Object.entries(prices)) words.set(name, value);
  words.set("at", position);
  savedHash = `#${String(words).replaceAll("%3D", "=")}`;
  if (location.hash !== savedHash) history.replaceState(null, "", savedHash);
}

function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  const price = (name, otherwise) => {
    const value = words.has(name) ? Number(words.get(name)) : NaN;
    return value >= 0 && value <= PRICE_VALUES.at(-1) ? value : otherwise;
  };
  const { row, draftPass } = pricesOf(Object.keys(data.prices)[0]);
  state.now = parseWords(words.get("now") ?? "") ?? parseWords(START);
  state.kept = parseWords(words.get("kept") ?? "");
  state.prices = { row: price("row", row), draftPass: price("draftPass", draftPass) };
  state.position = clamp(Math.round(Number(words.get("at"))) || 0, 0, data.text.length - 2);
}

const KEYS = {
  ArrowLeft: () => goBy(-1), ArrowRight: () => goBy(1), "[": () => goBy(-1), "]": () => goBy(1),
  c: keepOrSwap, f: () => choose(fastest().setting), Escape: close,
};

function close() {
  const open = document.querySelector("details[open]");
  if (open) open.open = false;
  else endComparison();
}

function listen() {
  byId("previous").addEventListener("click", () => goBy(-1));
  byId("next").addEventListener("click", () => goBy(1));
  byId("keep").addEventListener("click", keepOrSwap);
  byId("clear").addEventListener("click", endComparison);
  byId("texts").addEventListener("click", ({ target }) => {
    const block = target.closest(".block");
    if (block) go(Number(block.dataset.start));
  });
  for (const event of ["pointerover", "focusin"]) byId("trees").addEventListener(event, explain);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isOwn = { INPUT: event.key.startsWith("Arrow"), SELECT: true }[event.target.tagName];
    if (isOwn || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  addEventListener("resize", update);
  addEventListener("hashchange", () => {
    if (location.hash === savedHash) return;
    readHash();
    update();
  });
}

function start() {
  buildMethods();
  buildQuestions();
  const headings = ["Words", "Keys"].map((title) => html("h3", {}, title));
  byId("words").append(headings[0], table(TERMS), headings[1], table(KEY_HELP));
  buildEnvelope(byId("envelope"));
  listen();
  readHash();
  draw();
  window.playground = { recording, state, RULES, replay, parseWords, choose, draw };
  document.documentElement.dataset.ready = "1";
}

start();
